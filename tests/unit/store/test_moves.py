"""How groups are moved in their queues, and what is told of where they stand."""

from __future__ import annotations

import msgspec
from support.deliveries import GROUP, Bench, Q, attempts, got, offsets, turns

from millpond.store.client import SeekOutcome, SeekRequest
from millpond.store.delivery import Delivery
from millpond.store.fold.cursors import Cursors


async def test_seek_voids_leases(bench: Bench) -> None:
    """After a seek the messages come again from there, and leases of before are void."""
    bench.put(10)
    grant = await bench.take(5)
    assert await bench.seek(2) == (0, 2)
    assert await bench.settle(grant) == ["void"] * 5
    again = await bench.take(10)
    assert (offsets(again)[0], attempts(again)[0], again.generation) == (2, 1, 2)


async def test_seek_dry_run_changes_nothing(bench: Bench) -> None:
    """A dry run says from where to where, ends included, and leaves leases as they are."""
    bench.put(10)
    grant = await bench.take(5)
    assert await bench.seek(99, dry_run=True) == (0, 10)
    assert await bench.settle(grant) == ["ok"] * 5


async def test_a_seek_begins_the_group_in_its_other_queues(bench: Bench) -> None:
    """A group that has received nothing yet is moved in one queue: in the others it begins where it is told to."""
    bench.put(3, Q[0])
    bench.put(3, Q[1])
    dry = SeekRequest(GROUP, [Q[0]], [1], "s", True, start="latest", others=[Q[1]])
    assert (await bench.delivery.seek(dry)).queues == [SeekOutcome(40, 3, 1)]
    assert (await bench.delivery.seek(msgspec.structs.replace(dry, dry_run=False))).queues == [SeekOutcome(40, 3, 1)]
    bench.put(1, Q[1])
    result = await bench.receive(10, Q[:2], start="latest")
    assert {grant.queue_id: offsets(grant) for grant in result.grants} == {40: [1, 2], 41: [3]}


async def test_a_queue_that_joins_later_is_read_from_its_first_message_on(bench: Bench) -> None:
    """Lag says so, too, before the first receive that names it."""
    await bench.receive(10, start="latest")
    bench.put(3, Q[1])
    assert (await bench.lag(Q[1])).committed == 0
    assert got(await bench.receive(10, Q[:2], start="latest")) == [0, 1, 2]


async def test_seek_is_idempotent_by_its_id(bench: Bench) -> None:
    """A repeated seek answers as the first did and moves nothing, also after a restart."""
    bench.put(10)
    await bench.settle(await bench.take(5))
    assert await bench.seek(1, "one") == (5, 1)
    grant = await bench.take(3)
    loaded = Cursors()
    loaded.load(bench.cursors.snapshot()())
    bench.cursors, bench.delivery = loaded, Delivery(bench.log, loaded, bench.log.now_ms)
    assert await bench.seek(1, "one") == (5, 1)
    assert await bench.settle(grant) == ["ok"] * 3
    assert await bench.seek(1, "two") == (4, 1)


async def test_seek_keeps_retries(bench: Bench) -> None:
    """With `keep_retries` unsettled messages below the new position are still retried."""
    bench.put(10)
    await bench.settle(await bench.take(5), "nack", [1, 3], delay_ms=1000)
    await bench.seek(3, keep_retries=True)
    bench.pass_time(1000)
    result = await bench.receive(10)
    assert sorted(got(result)) == [1, 3, 4, 5, 6, 7, 8, 9]


async def test_seek_wakes_waiters(bench: Bench) -> None:
    """Seeking back serves who waits."""
    bench.put(3)
    await bench.settle(await bench.take())
    task = bench.waiting()
    await turns()
    await bench.seek(0)
    await turns()
    assert got(task.result()) == [0, 1, 2]


async def test_trim_counts_what_was_skipped(bench: Bench) -> None:
    """A cursor below the first kept offset moves to it; the messages it never saw are counted."""
    bench.put(10)
    await bench.settle(await bench.take(2))
    bench.log.start[40] = bench.log.local[40] = 6
    lag = await bench.lag()
    assert (lag.committed, lag.skipped) == (6, 4)
    assert got(await bench.receive(10)) == [6, 7, 8, 9]
    assert (await bench.lag()).skipped == 4
