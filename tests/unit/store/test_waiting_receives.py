"""Receives that wait: who is served, when one wakes, and what becomes of one that leaves."""

from __future__ import annotations

import asyncio

from support.deliveries import Bench, Q, attempts, got, turns


async def test_waiters_are_served_first_come_first_served(bench: Bench) -> None:
    """One message wakes one waiter, in the order they came."""
    first, second, third = bench.waiting(), bench.waiting(), bench.waiting()
    await turns()
    bench.put(1)
    await turns()
    assert [task.done() for task in (first, second, third)] == [True, False, False]
    bench.put(1)
    await turns()
    assert [task.done() for task in (first, second, third)] == [True, True, False]
    assert (got(first.result()), got(second.result())) == ([0], [1])


async def test_many_messages_at_once_wake_as_many_as_they_serve(bench: Bench) -> None:
    """Twenty messages confirmed together go to both waiters of ten."""
    tasks = [bench.waiting(10) for _ in range(3)]
    await turns()
    bench.put(20)
    await turns()
    assert [task.done() for task in tasks] == [True, True, False]


async def test_a_waiter_who_found_nothing_keeps_its_place(bench: Bench) -> None:
    """When somebody else is faster, the woken waiter goes back to the front of the line."""
    first, second = bench.waiting(), bench.waiting()
    await turns()
    bench.put(1)
    assert got(await bench.receive()) == [0]
    await turns()
    bench.put(1)
    await turns()
    assert (first.done(), second.done()) == (True, False)


async def test_cancelled_waiter_leaves_the_line(bench: Bench) -> None:
    """A waiter that goes away gets nothing, also when it was woken already."""
    first, second = bench.waiting(), bench.waiting()
    await turns()
    bench.put(1)
    first.cancel()
    await turns()
    assert first.cancelled()
    assert got(second.result()) == [0]


async def test_waiter_wakes_at_a_due_time(bench: Bench) -> None:
    """A waiting receive gets a message when its lease ends, or at once when it is nacked."""
    bench.put(1)
    await bench.take()
    task = bench.waiting()
    await turns()
    bench.pass_time(30_000)
    await turns()
    assert attempts(task.result().grants[0]) == [2]
    second = task.result().grants[0]
    task = bench.waiting()
    await turns()
    await bench.settle(second, "nack")
    await turns()
    assert attempts(task.result().grants[0]) == [3]


async def test_the_timer_wakes_by_itself(bench: Bench) -> None:
    """The earliest due time has a timer of the event loop; nobody needs to look."""
    bench.put(1)
    await bench.settle(await bench.take(), "nack", delay_ms=2)
    task = bench.waiting()
    await turns()
    bench.log.now += 10
    assert got(await asyncio.wait_for(task, 5)) == [0]


async def test_a_timer_that_comes_early_comes_again(bench: Bench) -> None:
    """The store's clock may run behind the loop's: the timer is set again for what is still to come."""
    bench.put(1)
    await bench.settle(await bench.take(), "nack", delay_ms=2)
    task = bench.waiting()
    await turns()
    timer = bench.delivery._timer
    assert timer is not None
    timer[1].cancel()
    bench.delivery._on_timer()
    bench.log.now += 10
    assert got(await asyncio.wait_for(task, 5)) == [0]


async def test_waiting_ends_with_nothing(bench: Bench) -> None:
    """A long poll ends empty when its time is over."""
    result = await asyncio.wait_for(bench.receive(wait_ms=5), 5)
    assert (result.grants, result.reason, result.created) == ([], None, True)


async def test_waiters_of_other_queues_sleep_on(bench: Bench) -> None:
    """A message wakes only who asks for its queue."""
    await bench.receive(queues=Q)
    other, all_of_them = bench.waiting(10, Q[1:2]), bench.waiting(10, Q)
    await turns()
    bench.put(1, Q[0])
    await turns()
    assert (other.done(), all_of_them.done()) == (False, True)
