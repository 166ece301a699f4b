"""Receives that wait without a task: in line with all others, served once, never in the way."""

from __future__ import annotations

import asyncio
import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
from support.deliveries import GROUP, Bench, Q, Waits, got, turns

from millpond.core.errors import NotFound, Unavailable
from millpond.store.waiters import Ends, Waiter


class Known:
    """A group that has nothing, and receives that name its queues as it knows them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.queues = Q[:1]

    def request(self, **more: Any) -> Any:
        return self.bench.request(**{"queues": self.queues, "wait_ms": 60_000, **more})

    def park(self, **more: Any) -> Waits:
        return Waits(self.bench.delivery, self.request(**more))


@pytest.fixture
async def known(bench: Bench) -> Known:
    one = Known(bench)
    await bench.delivery.receive(one.request(wait_ms=0))
    return one


async def test_one_is_served_when_a_message_comes(known: Known) -> None:
    """It is woken and gets it; it waited until then, and no longer."""
    parked = known.park()
    assert known.bench.delivery.waiting == 1
    assert known.bench.delivery.awaits(Q[0].queue_id)
    known.bench.put(2)
    assert await parked.woken
    assert got(await parked.receive()) == [0, 1]
    assert known.bench.delivery.waiting == 0
    parked.leave()


async def test_only_what_must_wait_is_parked(known: Known) -> None:
    """Not one of an unknown group or list of queues, one that does not wait, or when there may be something."""
    delivery = known.bench.delivery
    assert not known.bench.parks(known.request(wait_ms=0))
    assert not known.bench.parks(known.request(queues=Q[:1]))
    assert not known.bench.parks(known.request(group=GROUP.__class__(1, 2, 99)))
    known.bench.put(1)
    assert not known.bench.parks(known.request())
    assert delivery.waiting == 0


async def test_what_falls_due_is_not_waited_for(known: Known) -> None:
    """A row whose lease has ended by now is for this receive."""
    known.bench.put(1)
    await known.bench.delivery.receive(known.request(wait_ms=0))
    assert known.bench.parks(known.request())
    known.bench.log.now += 60_000
    assert not known.bench.parks(known.request())


async def test_a_repeated_attempt_is_answered_at_once(known: Known) -> None:
    """What it holds already is not waited for."""
    known.bench.put(1)
    await known.bench.delivery.receive(known.request(attempt_id="a"))
    assert not known.bench.parks(known.request(attempt_id="a"))
    assert known.bench.parks(known.request(attempt_id="b"))


async def test_the_time_is_over(known: Known) -> None:
    """It ends with False, by itself, and counts no longer."""
    parked = known.park(wait_ms=5)
    assert await parked.woken is False
    assert known.bench.delivery.waiting == 0
    parked.leave()


async def test_they_stand_in_one_line_with_the_others(known: Known) -> None:
    """First come, first served, with and without a task."""
    first = known.park()
    second = known.bench.spawn(known.bench.delivery.receive(known.request()))
    await turns()
    third = known.park()
    for place, one in enumerate([first, None, third]):
        known.bench.put(1)
        await turns()
        if one is None:
            assert got(await second) == [place]
        else:
            assert got(await one.receive()) == [place]


async def test_one_that_leaves_is_woken_no_more(known: Known) -> None:
    """The next one in line gets the message."""
    first, second = known.park(), known.park()
    first.leave()
    await turns()
    assert known.bench.delivery.waiting == 1
    known.bench.put(1)
    assert await second.woken
    assert got(await second.receive()) == [0]


async def test_one_that_leaves_when_it_was_woken_passes_it_on(known: Known) -> None:
    """The message it was woken for goes to the next one."""
    first, second = known.park(), known.park()
    known.bench.put(1)
    assert await first.woken
    first.leave()
    first.leave()
    assert await second.woken
    assert got(await second.receive()) == [0]
    assert known.bench.delivery.waiting == 0


async def test_one_that_was_woken_for_nothing_keeps_its_place(known: Known) -> None:
    """Somebody was faster: it waits on, before those who came later."""
    first, second = known.park(), known.park()
    known.bench.put(1)
    assert await first.woken
    place = known.bench.delivery._groups.find(GROUP.group_id, Q[0].queue_id)
    assert place is not None
    place.cursor.advance(1)
    task = known.bench.spawn(first.receive())
    await turns()
    assert (task.done(), second.woken.done(), known.bench.delivery.waiting) == (False, False, 2)
    known.bench.put(1)
    assert got(await task) == [1]
    second.leave()
    await turns()


@pytest.mark.parametrize("how", ["served", "over", "left"])
async def test_nothing_is_left_to_the_collector(known: Known, how: str) -> None:
    """Who waits knows what it waits in, and is known there only until that ends."""

    class Caller:
        def __init__(self) -> None:
            self.parked = known.bench.delivery.park(known.request(wait_ms=5 if how == "over" else 60_000), self.rises)
            self.ended = asyncio.Event()

        def rises(self, how: bool | Exception) -> None:
            self.ended.set()

    gc.disable()
    try:
        caller = Caller()
        assert caller.parked is not None
        if how == "served":
            known.bench.put(1)
            await caller.parked.receive()
        elif how == "over":
            await caller.ended.wait()
        else:
            caller.parked.leave()
        await turns()
        gone = weakref.ref(caller)
        del caller
        assert gone() is None
    finally:
        gc.enable()


async def test_what_was_leased_for_one_that_left_is_released(known: Known) -> None:
    """Cancelled while its grant is written: the next one gets the same messages, uncounted."""
    first, second = known.park(), known.park()
    known.bench.log.write_gate = asyncio.Event()
    known.bench.put(1)
    assert await first.woken
    task = known.bench.spawn(first.receive())
    await known.bench.log.reached.wait()
    task.cancel()
    assert await second.woken
    known.bench.log.write_gate.set()
    answer = await second.receive()
    assert got(answer) == [0]
    assert answer.grants[0].attempts.to_pybytes() == (1).to_bytes(4, "little")


async def test_a_group_that_is_deleted_ends_them(known: Known) -> None:
    """With group_not_found."""
    parked = known.park()
    await known.bench.delivery.delete_group(GROUP)
    with pytest.raises(NotFound):
        await parked.woken
    await turns()
    assert known.bench.delivery.waiting == 0


async def test_a_store_that_stops_ends_them(known: Known) -> None:
    """With shutting_down."""
    parked = known.park()
    known.bench.delivery.close()
    with pytest.raises(Unavailable):
        await parked.woken


class Sleeper(Waiter):
    """`ended`: how its wait did."""

    def __init__(self) -> None:
        super().__init__([])
        self.ended: asyncio.Future[bool | Exception] = asyncio.get_running_loop().create_future()
        self.rises = self.ended.set_result


@pytest.mark.parametrize("seconds", [0.001, 0.05, 1.0, 30.0])
async def test_waits_end_together_and_hardly_early(seconds: float) -> None:
    """At most a 32nd of their length early, so that those of about the same time are one set."""
    loop = asyncio.get_running_loop()
    ends = Ends()
    sets = set()
    begun = loop.time() * 1000
    for number in range(200):
        sleeper = Sleeper()
        ends.add(sleeper, seconds + number / 10_000)
        assert sleeper.together is not None
        assert sleeper in sleeper.together
        sets.add(id(sleeper.together))
    at = list(ends._due)
    now = loop.time() * 1000
    assert min(at) >= begun + seconds * 1000 * (1 - 1 / 32) - 2
    assert max(at) <= now + seconds * 1000 + 22
    if seconds >= 1:
        assert len(sets) <= 2 + (20 + now - begun) * 64 / (seconds * 1000)
    ends.close()


async def test_many_waits_end_in_turns() -> None:
    """However many end at one moment, others get their turn in between."""
    ends = Ends()
    sleepers = [Sleeper() for _ in range(1000)]
    for sleeper in sleepers:
        ends.add(sleeper, 0.001)
    done = [0]
    while done[-1] < len(sleepers):
        await asyncio.sleep(0)
        done.append(sum(sleeper.ended.done() for sleeper in sleepers))
    assert max(after - before for before, after in pairwise(done)) <= 100
    ends.close()


async def test_one_that_fails_keeps_no_other() -> None:
    """The loop says so, and the others end."""
    loop = asyncio.get_running_loop()
    said: list[BaseException] = []

    def broken(how: object) -> None:
        raise ZeroDivisionError

    loop.set_exception_handler(lambda _, what: said.append(what["exception"]))
    ends = Ends()
    sleepers = [Sleeper() for _ in range(10)]
    for sleeper in sleepers:
        ends.add(sleeper, 0.001)
    sleepers[3].rises = broken
    async with asyncio.timeout(5):
        await asyncio.gather(*(sleeper.ended for sleeper in sleepers if sleeper is not sleepers[3]))
    assert [type(one) for one in said] == [ZeroDivisionError]
    ends.close()


async def test_a_shorter_wait_ends_first() -> None:
    """One timer serves all, whoever came first; who got up meanwhile is not told."""
    ends = Ends()
    long, short, up = Sleeper(), Sleeper(), Sleeper()
    ends.add(long, 3_600)
    ends.add(up, 0.01)
    up.get_up()
    ends.add(short, 0.01)
    assert await short.ended is False
    assert not long.ended.done()
    assert not up.ended.done()
    ends.close()
