"""Long polls of one group, first come first served: one message wakes one of them.

A waiter sleeps until it is woken or its time is over. A woken one tries to be served; if somebody was faster it
goes back to the front. While one is awake and not served yet, newcomers stand in line behind it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from millpond.core.errors import TooManyRequests
from millpond.core.limits import WAITERS
from millpond.store.client import QueueRef


class Waiter:
    """`queues`: those it asks for. `queue_ids`: the same, None while they are all of its group's."""

    __slots__ = ("future", "queue_ids", "queues")

    def __init__(self, queues: list[QueueRef]) -> None:
        self.queues = queues
        self.queue_ids: frozenset[int] | None = None
        self.future: asyncio.Future[bool] | None = None

    def wants(self, queue_id: int) -> bool:
        return self.queue_ids is None or queue_id in self.queue_ids


_LENGTH_BITS = 6  # of a wait's length count: 32 steps at least, of half a second for 30
_AT_ONCE = 64  # that end in one turn of the loop, each with an answer to be sent


class Ends:
    """Ends waits whose time is over, those that are over at about the same time together: a turn of the loop for many
    long polls, and one timer for all. A wait ends up to a 32nd of its length early, never late for its length."""

    def __init__(self) -> None:
        self._due: dict[int, set[asyncio.Future[bool]]] = {}  # by ms of the loop's clock
        self._times: list[int] = []  # a heap of the same
        self._timer: tuple[int, asyncio.TimerHandle] | None = None

    def add(self, future: asyncio.Future[bool], seconds: float) -> set[asyncio.Future[bool]]:
        """Have `future` end with False then; it is in the set given until that, or until somebody takes it out."""
        loop = asyncio.get_running_loop()
        wait_ms = max(1, round(seconds * 1000))
        step = 1 << max(0, wait_ms.bit_length() - _LENGTH_BITS)
        at = round(loop.time() * 1000) + wait_ms
        at -= at % step
        together = self._due.get(at)
        if together is None:
            together = self._due[at] = set()
            heappush(self._times, at)
            if self._timer is None or at < self._timer[0]:
                self._arm(loop)
        together.add(future)
        return together

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer[1].cancel()
        self._timer = (self._times[0], loop.call_at(self._times[0] / 1000, self._over)) if self._times else None

    def _over(self) -> None:
        loop = asyncio.get_running_loop()
        now = round(loop.time() * 1000)
        left = _AT_ONCE
        while left and self._times and self._times[0] <= now:
            together = self._due[self._times[0]]
            while left and together:
                _expire(together.pop())
                left -= 1
            if not together:
                del self._due[heappop(self._times)]
        self._timer = None
        self._arm(loop)  # at once for what is left

    def close(self) -> None:
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None


class WaiterCount:
    """How many wait in the whole store, bounded by WAITERS, and when they have waited long enough."""

    def __init__(self, sleeping: Callable[[], None]) -> None:
        """`sleeping` is called before one falls asleep: somebody now waits for a due time."""
        self.sleeping = sleeping
        self.ends = Ends()
        self.count = 0

    def enter(self) -> None:
        if self.full:
            raise TooManyRequests("too_many_waiters", f"{WAITERS} receives wait already", retry_after_ms=1000)
        self.count += 1

    def leave(self) -> None:
        self.count -= 1

    @property
    def full(self) -> bool:
        return self.count >= WAITERS


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
        future = self.lie_down(waiter, seconds, first=first)
        try:
            return await future
        except asyncio.CancelledError:
            if was_woken(future):
                self.done()  # woken and cancelled in one turn: the caller passes the wake on
            raise

    def lie_down(
        self, waiter: Waiter, seconds: float, *, first: bool = False, rose: Callable[[bool], None] | None = None
    ) -> asyncio.Future[bool]:
        """The same as a future; cancelled, it leaves the line. One that was woken still owes its `done`. `rose` is told
        whether it was woken, before whoever awaits the future goes on."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiter.future = future
        self._sleeping[id(waiter)] = waiter
        if first:
            self._sleeping.move_to_end(id(waiter), last=False)
        self._count.sleeping()
        together = self._count.ends.add(future, seconds)
        future.add_done_callback(partial(self._rise, waiter, together, rose))
        return future

    def _rise(
        self,
        waiter: Waiter,
        together: set[asyncio.Future[bool]],
        rose: Callable[[bool], None] | None,
        future: asyncio.Future[bool],
    ) -> None:
        """Before whoever awaits the future goes on: it was added first."""
        together.discard(future)
        self._sleeping.pop(id(waiter), None)
        if rose is not None:
            rose(was_woken(future))

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

    def narrow(self) -> None:
        """The group has got more queues: whoever asked for all of them asked for those there were."""
        known: dict[int, frozenset[int]] = {}  # by the list's identity: many name the same one
        for waiter in self._sleeping.values():
            if waiter.queue_ids is None:
                ids = known.get(id(waiter.queues)) or ids_of(waiter.queues)
                waiter.queue_ids = known[id(waiter.queues)] = ids

    def fail(self, error: Exception) -> None:
        """All that sleep end with this error."""
        for waiter in self._sleeping.values():
            if waiter.future is not None and not waiter.future.done():
                waiter.future.set_exception(error)


def ids_of(queues: list[QueueRef]) -> frozenset[int]:
    return frozenset(queue.queue_id for queue in queues)


def was_woken(future: asyncio.Future[bool]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None and future.result()


def _expire(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)
