"""What a receive that was woken finds at hand it is given at once: what it would be given if it had to look."""

from __future__ import annotations

import pytest
from support.deliveries import Bench, Q, Waits, attempts, got, offsets, turns

from millpond.core.errors import NotFound


@pytest.fixture
async def known(bench: Bench) -> Bench:
    """Its group has been there, and has nothing; index and frames are in memory."""
    bench.queues = Q[:2]
    await bench.receive(queues=bench.queues)
    bench.log.in_memory = True
    return bench


def park(bench: Bench, count: int = 10, **more: object) -> Waits:
    return Waits(bench.delivery, bench.request(count, queues=bench.queues, wait_ms=60_000, **more))


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(("count", "sent", "given"), [(10, 3, 3), (3, 10, 3), (2_000, 2_500, 2_000), (1_500, 250, 250)])
async def test_the_same_is_given(known: Bench, in_memory: bool, count: int, sent: int, given: int) -> None:
    """Few, fewer than there are, and of many as many whole frames as fit; then what is left."""
    known.log.in_memory = in_memory
    parked = park(known, count)
    known.put(sent)
    assert await parked.woken
    answer = await parked.receive()
    assert got(answer) == list(range(given))
    assert attempts(answer.grants[0]) == [1] * given
    assert len(answer.grants[0].frames) == -(-given // 100)
    assert known.log.looked == (0 if in_memory else 1)
    rest = await known.receive(5_000, queues=known.queues)
    assert got(rest) == list(range(given, sent))
    assert rest.grants == [] or rest.grants[0].lease > answer.grants[0].lease


async def test_what_is_being_flushed(known: Bench) -> None:
    """It is given during the flush, and shown behind it."""
    parked = park(known)
    known.begin_flush(2)
    assert await parked.woken
    assert got(await parked.receive()) == [0, 1]
    assert known.log.looked == 0
    known.end_flush()
    await parked.shown()
    assert got(await known.receive(queues=known.queues)) == []


async def test_the_next_one_is_woken(known: Bench) -> None:
    """What is left is for whoever waits behind it; a repeated attempt gets the same again."""
    first, second = park(known, 2, attempt_id="a"), park(known)
    known.put(3)
    assert await first.woken
    assert got(await first.receive()) == [0, 1]
    assert await second.woken
    assert got(await second.receive()) == [2]
    again = await known.receive(queues=known.queues, attempt_id="a")
    assert (got(again), known.log.looked) == ([0, 1], 0)
    assert known.delivery.waiting == 0


async def test_what_was_given_to_one_that_left_is_released(known: Bench) -> None:
    """Cancelled while its grant is written."""
    parked = park(known)
    known.log.write_gate = gate = known.log.reached.__class__()
    known.put(1)
    assert await parked.woken
    task = known.spawn(parked.receive())
    await known.log.reached.wait()
    task.cancel()
    await turns()
    gate.set()
    known.log.write_gate = None
    assert attempts(await known.take(queues=known.queues)) == [1]


@pytest.mark.parametrize("why", ["two queues", "due", "filter", "frames elsewhere", "somebody looks", "a queue joined"])
async def test_what_has_to_be_looked_for(known: Bench, why: str) -> None:
    """More than one queue, something that is due, a filter, an index on the disk, or somebody who is at it."""
    more = {"tag_hashes": [1]} if why == "filter" else {}
    if why == "due":
        known.put(1)
        await known.receive(queues=known.queues, lease_ms=1_000)
    parked = park(known, **more)
    place = known.delivery._groups.find(known.request().group.group_id, Q[0].queue_id)
    assert place is not None
    if why == "due":
        known.log.now += 2_000
    if why == "two queues":
        known.put(1, Q[1])
    if why == "frames elsewhere":
        known.log.in_memory = False
    if why == "filter":
        known.put(1, tag=2)
    known.put(1)
    assert await parked.woken
    if why == "somebody looks":
        await place.lock.acquire()
    if why == "a queue joined":
        await known.receive(1, queues=[Q[2]])
    receiving = known.spawn(parked.receive())
    await turns()
    if why == "somebody looks":
        assert not receiving.done()
        place.lock.release()
    expected = {"two queues": {40: [0], 41: [0]}, "due": {40: [0, 1]}, "filter": {40: [1]}}
    found: dict[int, list[int]] = {}
    for grant in (await receiving).grants:
        found.setdefault(grant.queue_id, []).extend(offsets(grant))
    assert found == expected.get(why, {40: [0]})


async def test_a_failure_there_stands_in_nobodys_way(known: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits behind it is given the message."""
    first, second = park(known), park(known)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    known.put(1)
    assert await first.woken
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(known.log, "spots_in_memory", broken)
        await first.receive()
    assert await second.woken
    assert got(await second.receive()) == [0]


async def test_a_group_that_was_deleted_gives_nothing(known: Bench) -> None:
    """It is told so."""
    parked = park(known)
    known.put(1)
    assert await parked.woken
    await known.delivery.delete_group(known.request().group)
    with pytest.raises(NotFound):
        await parked.receive()
