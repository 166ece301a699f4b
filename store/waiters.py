"""Long polls of one group, first come first served: one message wakes one of them.

A waiter sleeps until it is woken or its time is over. A woken one tries to be served; if somebody was faster it
goes back to the front. While one is awake and not served yet, newcomers stand in line behind it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from millpond.core.errors import TooManyRequests
from millpond.core.limits import WAITERS


class Waiter:
    """`queue_ids`: the queues it asks for; None for all of its group's."""

    __slots__ = ("future", "queue_ids")

    def __init__(self, queue_ids: frozenset[int] | None) -> None:
        self.queue_ids = queue_ids
        self.future: asyncio.Future[bool] | None = None

    def wants(self, queue_id: int) -> bool:
        return self.queue_ids is None or queue_id in self.queue_ids


class WaiterCount:
    """How many wait in the whole store, bounded by WAITERS."""

    def __init__(self, sleeping: Callable[[], None]) -> None:
        """`sleeping` is called before one falls asleep: somebody now waits for a due time."""
        self.sleeping = sleeping
        self.count = 0

    def enter(self) -> None:
        if self.count >= WAITERS:
            raise TooManyRequests("too_many_waiters", f"{WAITERS} receives wait already", retry_after_ms=1000)
        self.count += 1

    def leave(self) -> None:
        self.count -= 1


class Waiters:
    """The line of one group."""

    __slots__ = ("_awake", "_count", "_sleeping")

    def __init__(self, count: WaiterCount) -> None:
        self._count = count
        self._sleeping: OrderedDict[int, Waiter] = OrderedDict()  # by identity
        self._awake = 0

    def __bool__(self) -> bool:
        return bool(self._sleeping)

    @property
    def awake(self) -> bool:
        """Whether somebody was woken and has not been served yet."""
        return self._awake > 0

    async def sleep(self, waiter: Waiter, seconds: float, *, first: bool) -> bool:
        """Until woken: True, and `done` must follow; or until the time is over: False.

        Raises the error that `fail` was given.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        waiter.future = future
        self._sleeping[id(waiter)] = waiter
        if first:
            self._sleeping.move_to_end(id(waiter), last=False)
        self._count.sleeping()
        timer = loop.call_later(seconds, _expire, future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None and future.result():
                self.done()  # woken and cancelled in one turn: the caller passes the wake on
            raise
        finally:
            timer.cancel()
            self._sleeping.pop(id(waiter), None)

    def done(self) -> None:
        """A woken waiter was served, went back to sleep or left."""
        self._awake -= 1

    def wake(self, queue_id: int) -> bool:
        """Wake the first that wants this queue; whether there is one."""
        for number, waiter in self._sleeping.items():
            future = waiter.future
            if waiter.wants(queue_id) and future is not None and not future.done():
                del self._sleeping[number]
                self._awake += 1
                future.set_result(True)
                return True
        return False

    def fail(self, error: Exception) -> None:
        """All that sleep end with this error."""
        for waiter in self._sleeping.values():
            if waiter.future is not None and not waiter.future.done():
                waiter.future.set_exception(error)


def _expire(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)
