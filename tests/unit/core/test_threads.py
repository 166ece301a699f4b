"""Blocking calls on threads: each answer and error reaches its caller, and nothing is kept or left hanging."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator

import pytest

from millpond.core.threads import Threads


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    made = Threads(1, "test")
    yield made
    await asyncio.to_thread(made.close)


async def test_answers(threads: Threads) -> None:
    """What the call answers, from a thread that bears the name."""
    assert await threads.run(divmod, 7, 2) == (3, 1)
    assert await threads.run(lambda: threading.current_thread().name) == "test_0"


@pytest.mark.parametrize("error", [OSError(28, "full"), SystemExit(1)])
async def test_raises(threads: Threads, error: BaseException) -> None:
    """What the call raises is raised to its caller, and the thread goes on."""

    def fail() -> None:
        raise error

    future = threads.run(fail)
    await asyncio.wait([future], timeout=5)
    assert future.exception() is error
    assert await threads.run(int) == 0


async def test_stop_iteration_reaches_its_caller(threads: Threads) -> None:
    """The one error that no future takes is told as another, and nobody waits for ever."""
    async with asyncio.timeout(5):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await threads.run(next, iter(()))


async def test_as_many_at_once_as_there_are_threads() -> None:
    """Two calls that wait for each other end when there are two threads."""
    two = Threads(2, "two")
    barrier = threading.Barrier(2)
    await asyncio.gather(two.run(barrier.wait, 5), two.run(barrier.wait, 5))
    await asyncio.to_thread(two.close)


async def test_each_thread_begins_once(threads: Threads) -> None:
    """`begin` runs before a thread's first call and not again; when it fails, the caller is told."""
    begun: list[str] = []

    def begin() -> None:
        begun.append(threading.current_thread().name)
        if len(begun) == 1:
            raise OSError("not yet")

    one = Threads(1, "one", begin)
    with pytest.raises(OSError, match="not yet"):
        await one.run(int)
    assert [await one.run(int), await one.run(int)] == [0, 0]
    assert begun == ["one_0", "one_0"]
    await asyncio.to_thread(one.close)


async def test_cancelled_caller_leaves_the_call_alone(threads: Threads) -> None:
    """A call goes on when its caller is cancelled, whether it answers or raises, and the next one is answered."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    for outcome in (lambda: 1, lambda: 1 // 0):
        begun, go_on = threading.Event(), threading.Event()

        def call(outcome: object = outcome, begun: threading.Event = begun, go_on: threading.Event = go_on) -> object:
            begun.set()
            go_on.wait(5)
            return outcome()  # type: ignore[operator]

        future = threads.run(call)
        assert await asyncio.to_thread(begun.wait, 5)
        future.cancel()
        go_on.set()
        assert await threads.run(int) == 0
    assert complaints == []


async def test_cancelled_caller_withdraws_what_has_not_begun(threads: Threads) -> None:
    """A call behind another one is left out when its caller is cancelled first; those behind it are done."""
    go_on = threading.Event()
    done: list[str] = []
    first, second, third = (threads.run(call) for call in (lambda: go_on.wait(5), lambda: done.append("second"), int))
    second.cancel()
    go_on.set()
    assert (await first, await third) == (True, 0)
    assert done == []


async def test_fewer_threads_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no more threads those that it gave do the work; where it gives none the caller is told,
    and the next call tries again."""
    start, most = threading.Thread.start, 0

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("few") and sum(one.name.startswith("few") for one in threading.enumerate()) >= most:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    few = Threads(3, "few")
    with pytest.raises(RuntimeError, match="can't start"):
        few.run(int)
    most = 1
    async with asyncio.timeout(5):
        assert await asyncio.gather(few.run(int), few.run(int)) == [0, 0]
    assert [one.name for one in threading.enumerate() if one.name.startswith("few")] == ["few_0"]
    await asyncio.to_thread(few.close)


async def test_close_waits_for_what_was_taken(threads: Threads) -> None:
    """Calls taken before are done and answered; later ones are refused."""
    done: list[int] = []
    futures = [threads.run(done.append, number) for number in range(100)]
    await asyncio.to_thread(threads.close)
    assert done == list(range(100))
    await asyncio.gather(*futures)
    with pytest.raises(RuntimeError, match="closed"):
        threads.run(int)
    await asyncio.to_thread(threads.close)


async def test_close_without_waiting(threads: Threads) -> None:
    """What has begun goes on, what has not is cancelled, and `close` comes back at once."""
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def call() -> None:
        begun.set()
        go_on.wait(5)
        done.append("begun")

    first, second = threads.run(call), threads.run(done.append, "not begun")
    assert await asyncio.to_thread(begun.wait, 5)
    threads.close(wait=False)
    threads.close(wait=False)
    assert done == [] and second.cancelled()
    go_on.set()
    await first
    await asyncio.to_thread(threads.close)
    assert done == ["begun"]


async def test_close_before_the_first_call() -> None:
    """Threads that were never made are closed all the same."""
    Threads(3, "never").close()


class _Large:
    pass


async def test_nothing_is_kept(threads: Threads) -> None:
    """Arguments, answers and errors of a call are free once its caller lets them go, not at the next call."""

    def fail(given: _Large) -> None:
        raise ValueError(given)

    large, gone = _Large(), asyncio.Event()
    weakref.finalize(large, asyncio.get_running_loop().call_soon_threadsafe, gone.set)
    assert await threads.run(lambda given: given, large) is large
    with pytest.raises(ValueError, match="_Large"):
        await threads.run(fail, large)
    del large
    async with asyncio.timeout(5):
        await gone.wait()
