"""Receives whose answer is made while their messages are being flushed, and which show nothing before that is done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.deliveries import Bench, Q, Waits, attempts, got, offsets, turns

from millpond.core.errors import Unavailable


@pytest.fixture
async def known(bench: Bench) -> Bench:
    """Its group has been there, and has nothing."""
    bench.queues = Q[:2]
    await bench.receive(queues=bench.queues)
    return bench


def _park(bench: Bench, **more: Any) -> Waits:
    return Waits(bench.delivery, bench.request(queues=bench.queues, wait_ms=60_000, **more))


async def test_one_that_waits_is_granted_them_during_the_flush(known: Bench) -> None:
    """Leased and written by then; given when the flush has ended, with nothing more to be done."""
    waiting = known.waiting()
    await turns()
    known.begin_flush(2)
    await turns()
    assert known.woken
    assert known.log.calls[-2:] == ["changed", "written"]
    calls = len(known.log.calls)
    assert not waiting.done()
    known.end_flush()
    assert got(await waiting) == [0, 1]
    assert len(known.log.calls) == calls


async def test_a_flush_that_fails_shows_nothing(known: Bench) -> None:
    """Who waited is told so, and holds no lease."""
    waiting = known.waiting()
    await turns()
    known.begin_flush(1)
    await turns()
    known.end_flush(Unavailable("unknown_outcome", "the store has stopped"))
    with pytest.raises(Unavailable):
        await waiting
    known.end_flush()
    assert attempts(await known.take()) == [1]


async def test_one_without_a_task_has_its_answer_early(known: Bench) -> None:
    """For whoever encodes it meanwhile; `shown` says when it may be sent."""
    parked = _park(known)
    known.begin_flush(1)
    assert await parked.woken
    assert len((await parked.receive()).grants) == 1
    shown = asyncio.create_task(parked.shown())
    await turns()
    assert not shown.done()
    known.end_flush()
    await shown


async def test_one_without_a_task_that_lacks_frames_waits_itself(known: Bench) -> None:
    """The proxy would read them from the store, where they are not shown yet."""
    known.log.without_frames = True
    parked = _park(known)
    known.begin_flush(1)
    assert await parked.woken
    receiving = known.spawn(parked.receive())
    await turns()
    assert not receiving.done()
    known.end_flush()
    assert got(await receiving) == [0]


async def test_one_that_comes_during_the_flush_is_woken_at_once(known: Bench) -> None:
    """The same as one that was there before; but one that does not wait gets nothing of it."""
    known.begin_flush(1)
    assert not known.woken
    assert got(await known.receive(queues=known.queues)) == []
    parked = _park(known)
    assert parked.woken.done()
    assert got(await parked.receive()) == [0]


async def test_confirmed_messages_do_not_wait_for_others(known: Bench) -> None:
    """A receive takes those, and leaves what is being flushed to the next one."""
    known.put(2)
    known.begin_flush(3, Q[1])
    assert got(await known.receive(queues=known.queues, wait_ms=60_000)) == [0, 1]
    waiting = known.waiting(queues=known.queues)
    await turns()
    known.end_flush()
    assert got(await waiting) == [0, 1, 2]


async def test_of_one_queue_the_confirmed_ones_first(known: Bench) -> None:
    """They do not wait for those behind them."""
    known.put(2)
    known.begin_flush(1)
    assert got(await known.receive(queues=known.queues, wait_ms=60_000)) == [0, 1]


async def test_with_a_filter(known: Bench) -> None:
    """Those that match are granted early; none that match, and the wait goes on behind them."""
    waiting = known.waiting(queues=known.queues, tag_hashes=[7])
    await turns()
    known.begin_flush(2, tag=5)
    await turns()
    known.end_flush()
    await turns()
    assert not waiting.done()
    known.begin_flush(1, tag=7)
    await turns()
    assert not waiting.done()
    known.end_flush()
    assert got(await waiting) == [2]


async def test_what_is_given_back_during_the_flush_is_shown_to_nobody_before_its_end(known: Bench) -> None:
    """Its caller went away: the next one has it with the same attempt, once it is on the disk."""
    leaving = known.waiting()
    await turns()
    known.begin_flush(1)
    await turns()
    leaving.cancel()
    await turns()
    assert got(await known.receive(queues=known.queues)) == []
    waiting = known.waiting(queues=known.queues)
    await turns()
    assert not waiting.done()
    known.end_flush()
    [grant] = (await waiting).grants
    assert (offsets(grant), attempts(grant)) == ([0], [1])


async def test_a_lease_that_ends_before_the_flush(known: Bench) -> None:
    """Nobody else has it before it is on the disk, in a full group either."""
    first = known.waiting(max_in_flight=1, lease_ms=1_000)
    await turns()
    known.begin_flush(1)
    await turns()
    known.pass_time(2_000)
    assert got(await known.receive(max_in_flight=1)) == []
    other = known.waiting(max_in_flight=1)
    await turns()
    assert not other.done()
    known.end_flush()
    assert got(await first) == [0]
    [grant] = (await other).grants
    assert (offsets(grant), attempts(grant)) == ([0], [2])


async def test_a_repeated_attempt_waits_as_well(known: Bench) -> None:
    """It is given the same, and not before."""
    parked = _park(known, attempt_id="a")
    known.begin_flush(1)
    await parked.receive()
    again = known.waiting(queues=known.queues, attempt_id="a")
    await turns()
    assert not again.done()
    known.end_flush()
    assert got(await again) == [0]


async def test_lag_tells_nothing_of_it(known: Bench) -> None:
    """Neither of its end nor of its lease, until it is confirmed."""
    known.put(1)
    await known.take()
    waiting = known.waiting()
    await turns()
    known.begin_flush(2)
    await turns()
    lag = await known.lag()
    assert (lag.committed, lag.head, lag.end_offset, lag.in_flight) == (0, 1, 1, 1)
    known.end_flush()
    await waiting
    lag = await known.lag()
    assert (lag.committed, lag.head, lag.end_offset, lag.in_flight) == (0, 3, 3, 3)


async def test_one_flush_wakes_as_many_as_it_has_queues(known: Bench) -> None:
    """Each of two that wait has its answer with the same flush; a third goes on waiting."""
    waiting = [known.waiting(1, queues=known.queues) for _ in range(3)]
    await turns()
    known.begin_flush(1)
    known.begin_flush(1, Q[1])
    await turns()
    known.end_flush()
    await turns()
    assert [task.done() for task in waiting] == [True, True, False]
