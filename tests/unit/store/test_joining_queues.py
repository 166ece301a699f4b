"""A queue that joins a group while receives wait, or are under way: its messages are for who names it."""

from __future__ import annotations

import asyncio

from support.deliveries import Bench, Q, Waits, got, offsets, turns


async def park(bench: Bench) -> Waits:
    """A receive that waits for the first queue, the only one there is."""
    request = bench.request(queues=Q[:1], wait_ms=60_000)
    await bench.receive(queues=request.queues)
    return Waits(bench.delivery, request)


async def test_a_queue_that_joins_is_not_for_who_does_not_name_it(bench: Bench) -> None:
    """Whoever waited before does not know it: a message there is for the one behind it in line. The same for a receive
    that was under way, and for one that repeats another's."""
    await bench.receive(queues=Q[:1])
    old = bench.waiting(queues=Q[:1])
    await turns()
    new = bench.waiting(queues=Q[:2], attempt_id="one")
    await turns()
    bench.put(1, Q[1])
    await turns()
    assert got(new.result()) == [0]
    assert not old.done()
    assert not (await bench.receive(queues=Q[:1], attempt_id="one")).grants
    bench.put(1, Q[0])
    await turns()
    assert {grant.queue_id: offsets(grant) for grant in old.result().grants} == {40: [0]}


async def test_a_queue_that_joins_during_a_receive(bench: Bench) -> None:
    """It looks at the index of the first; meanwhile the second is emptied, and a third joins that has a message."""
    await bench.receive(queues=Q[:2])
    bench.put(1, Q[0], tag=2)
    bench.put(1, Q[1])
    bench.log.gate = gate = asyncio.Event()
    under_way = bench.spawn(bench.receive(queues=Q[:2], tag_hashes=[1]))
    await bench.log.reached.wait()
    bench.log.gate = None
    assert {grant.queue_id for grant in (await bench.receive(1, queues=Q[:3])).grants} == {41}
    bench.put(1, Q[2])
    gate.set()
    assert not (await under_way).grants


async def test_a_queue_that_joins_is_not_for_one_that_was_parked_before(bench: Bench) -> None:
    """A message there wakes who knows it, though he came later."""
    parked = await park(bench)
    new = bench.waiting(queues=Q[:2])
    await turns()
    bench.put(1, Q[1])
    await turns()
    assert {grant.queue_id for grant in new.result().grants} == {Q[1].queue_id}
    assert not parked.woken.done()
    parked.leave()


async def test_a_queue_that_joins_while_one_is_awake(bench: Bench) -> None:
    """Somebody else was faster, and it goes back to sleep: what comes in the new queue still is not for it."""
    parked = await park(bench)
    bench.put(1)
    assert await parked.woken
    await bench.receive(1, queues=Q[:2])
    back = bench.spawn(parked.receive())
    await turns()
    new = bench.waiting(queues=Q[:2])
    await turns()
    bench.put(1, Q[1])
    await turns()
    assert {grant.queue_id for grant in new.result().grants} == {Q[1].queue_id}
    assert not back.done()
