"""Blocking calls on threads of their own, awaited by the event loop: `Threads`.

    run(call, *args) --> queue --> one of the threads --> call_soon_threadsafe --> the caller's future

asyncio's `run_in_executor` takes a call through three futures, four locks and their callbacks, mostly with the
interpreter held: 103 us of CPU for what takes 54 here. Each flush of the log is such a call, and each read of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import Empty, SimpleQueue
from select import select
from threading import Thread
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")
_Job: TypeAlias = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Threads:
    """`count` threads named `name`, made at the first call; each does `begin` before its own first. Of one event loop.

    The call of a caller that is cancelled is left out; one that has begun goes on, and nobody hears of it.
    """

    def __init__(self, count: int, name: str, begin: Callable[[], None] | None = None) -> None:
        self._count, self._name, self._begin = count, name, begin
        self._threads: list[Thread] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop  # from the first call on
        self._closed = False

    def run(self, call: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """What `call(*args)` answers or raises. RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError(f"{self._name}: closed")
        if not self._threads:
            self._start()
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((future, call, args))
        return future

    def _start(self) -> None:
        """Where not even one can be made, its RuntimeError is the caller's, and the next call tries again."""
        self._loop = asyncio.get_running_loop()
        for number in range(self._count):
            thread = Thread(target=self._work, name=f"{self._name}_{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def close(self, *, wait: bool = True) -> None:
        """Take no more calls. Blocks until those taken are done; without `wait`, calls that have not begun are
        cancelled and those that have are left alone. Idempotent."""
        if not wait:
            self._cancel()
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _cancel(self) -> None:
        try:
            while (job := self._jobs.get_nowait()) is not None:
                job[0].cancel()
            self._jobs.put(None)  # a thread's end, from an earlier `close`
        except Empty:
            pass

    def _work(self) -> None:
        begin, tell = self._begin, self._loop.call_soon_threadsafe
        while (job := self._jobs.get()) is not None:
            future, call, args = job
            answer: object = None
            failed: BaseException | None = None
            try:
                if begin is not None:
                    begin()
                    begin = None
                if not future.cancelled():
                    answer = call(*args)
            except StopIteration as error:  # the one that no future takes
                failed = RuntimeError(repr(error))
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
                failed = error
            try:
                tell(_settle, future, answer, failed)
            except RuntimeError:  # the loop is closed: nobody waits
                return
            del job, future, call, args, answer, failed  # what was written or read is not kept until the next call


def give_way() -> None:
    """Let another thread have the interpreter, for a tenth of a millisecond.

    Who waits for it asks for it after 5 ms in which it was not let go of. Calls of Arrow's let go of it and take it
    back before anybody is awake, so a thread that does many of them is never asked: a loop stood still for 70 ms.
    """
    select((), (), (), 1e-4)


def _settle(future: asyncio.Future[Any], answer: object, failed: BaseException | None) -> None:
    if future.done():
        return  # its caller was cancelled
    if failed is None:
        future.set_result(answer)
    else:
        future.set_exception(failed)
