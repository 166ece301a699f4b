"""Long polls of one group, first come first served: one message wakes one of them.

A waiter sleeps until it is woken or its time is over. A woken one tries to be served; if somebody was faster it
goes back to the front. While one is awake and not served yet, newcomers stand in line behind it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush

from millpond.core.errors import TooManyRequests
from millpond.core.limits import WAITERS
from millpond.store.client import QueueRef, Risen


class Waiter:
    """`queues`: those it asks for. `queue_ids`: the same, None while they are all of its group's. While it sleeps
    `rises` is told how that ends, and `line` and `together` are where it stands."""

    __slots__ = ("line", "queue_ids", "queues", "rises", "together")

    def __init__(self, queues: list[QueueRef]) -> None:
        self.queues = queues
        self.queue_ids: frozenset[int] | None = None
        self.rises: Callable[[Risen], None] | None = None
        self.line: Waiters | None = None
        self.together: set[Waiter] | None = None

    def wants(self, queue_id: int) -> bool:
        return self.queue_ids is None or queue_id in self.queue_ids

    def rise(self, how: Risen) -> None:
        """It sleeps no more, and is told how that ended."""
        rises = self.get_up()
        if rises is not None:
            rises(how)

    def get_up(self) -> Callable[[Risen], None] | None:
        """It sleeps no more; what is to be told so, None when it did not sleep."""
        rises, self.rises = self.rises, None
        if self.line is not None:
            self.line.without(self)
            self.line = None
        if self.together is not None:
            self.together.discard(self)
            self.together = None
        return rises


_LENGTH_BITS = 6  # of a wait's length count: 32 steps at least, of half a second for 30
_AT_ONCE = 64  # that end in one turn of the loop, each with an answer to be sent


class Ends:
    """Ends waits whose time is over, those that are over at about the same time together: a turn of the loop for many
    long polls, and one timer for all. A wait ends up to a 32nd of its length early, never late for its length. Of one
    event loop, that of the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: dict[int, set[Waiter]] = {}  # by ms of the loop's clock
        self._times: list[int] = []  # a heap of the same
        self._timer: tuple[int, asyncio.TimerHandle] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # a system call
        return self._loop

    def add(self, waiter: Waiter, seconds: float) -> None:
        """Have `waiter` rise with False then; until that it is one of its `together`."""
        wait_ms = max(1, round(seconds * 1000))
        step = 1 << max(0, wait_ms.bit_length() - _LENGTH_BITS)
        at = round(self.loop.time() * 1000) + wait_ms
        at -= at % step
        together = self._due.get(at)
        if together is None:
            together = self._due[at] = set()
            heappush(self._times, at)
            if self._timer is None or at < self._timer[0]:
                self._arm()
        together.add(waiter)
        waiter.together = together

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer[1].cancel()
        self._timer = (self._times[0], self.loop.call_at(self._times[0] / 1000, self._over)) if self._times else None

    def _over(self) -> None:
        now = round(self.loop.time() * 1000)
        left = _AT_ONCE
        try:
            while left and self._times and self._times[0] <= now:
                together = self._due[self._times[0]]
                while left and together:
                    together.pop().rise(False)
                    left -= 1
                if not together:
                    del self._due[heappop(self._times)]
        finally:
            self._timer = None
            self._arm()  # at once for what is left, also when one of them fails

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

    @property
    def time(self) -> float:
        """Now, in the loop's seconds."""
        return self._count.ends.loop.time()

    async def sleep(self, waiter: Waiter, seconds: float, *, first: bool) -> bool:
        """Until woken: True, and `done` must follow; or until the time is over: False.

        Raises the error that `fail` was given.
        """
        future: asyncio.Future[bool] = self._count.ends.loop.create_future()
        woken = False

        def rises(how: Risen) -> None:
            nonlocal woken
            woken = how is True
            if future.cancelled():
                return
            if isinstance(how, Exception):
                future.set_exception(how)
            else:
                future.set_result(how)

        self.lie_down(waiter, seconds, rises, first=first)
        try:
            return await future
        except asyncio.CancelledError:
            waiter.get_up()
            if woken:
                self.done()  # woken and cancelled in one turn: the caller passes the wake on
            raise

    def lie_down(self, waiter: Waiter, seconds: float, rises: Callable[[Risen], None], *, first: bool = False) -> None:
        """Until `rises` is called, in the midst of whatever wakes it, so it may only note what is to be done; one that
        was woken owes its `done`. Or until it gets up by itself."""
        waiter.rises = rises
        waiter.line = self
        self._sleeping[id(waiter)] = waiter
        if first:
            self._sleeping.move_to_end(id(waiter), last=False)
        self._count.sleeping()
        self._count.ends.add(waiter, seconds)

    def without(self, waiter: Waiter) -> None:
        """It sleeps here no more."""
        self._sleeping.pop(id(waiter), None)

    def done(self) -> None:
        """A woken waiter was served, went back to sleep or left."""
        self._awake -= 1

    def wake(self, queue_id: int) -> bool:
        """Wake the first that wants this queue; whether there is one."""
        for waiter in self._sleeping.values():
            if waiter.wants(queue_id):
                self._awake += 1
                waiter.rise(True)
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
        for waiter in list(self._sleeping.values()):
            waiter.rise(error)


def ids_of(queues: list[QueueRef]) -> frozenset[int]:
    return frozenset(queue.queue_id for queue in queues)
