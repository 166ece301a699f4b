"""Deadlines of calls that are made thousands of times a second: `Deadlines`.

`asyncio.timeout` has a timer, two coroutines and three looks for the running loop (a system call each) for every one,
though hardly any deadline is ever reached: 5.5 us a call, 1.1 here. One timer waits for the earliest of all, and is
seldom set anew: most calls have the same time, so that who begins later ends later.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

TIMER_SECONDS = 0.001  # how true the loop's timers are: one may come so much early


class Deadlines:
    """Of one event loop, that of the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[_Within] = set()
        self._look_at = float("inf")  # in the loop's seconds
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float) -> _Within:
        """`with deadlines.within(1.0): await ..`, of a task; as `async with asyncio.timeout(1.0)`: raises TimeoutError
        when the block has not ended by then."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return _Within(self, self._loop, seconds)

    def begin(self, one: _Within) -> None:
        self._running.add(one)
        if one.until < self._look_at:
            self._look_again(one.until)

    def end(self, one: _Within) -> None:
        self._running.discard(one)

    def _look_again(self, at: float) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._look_at, self._timer = at, self._loop.call_at(at, self._look)

    def _look(self) -> None:
        assert self._loop is not None
        self._look_at, self._timer = float("inf"), None
        now = self._loop.time() + TIMER_SECONDS
        for one in [one for one in self._running if one.until <= now]:
            self._running.discard(one)
            one.expire()
        if self._running:
            self._look_again(min(one.until for one in self._running))


class _Within:
    __slots__ = ("_cancelling", "_deadlines", "_expired", "_task", "until")

    def __init__(self, deadlines: Deadlines, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        task: asyncio.Task[Any] | None = asyncio.current_task(loop)
        assert task is not None, "what ends at a deadline is a task"
        self._deadlines = deadlines
        self._task = task
        self._cancelling = task.cancelling()
        self._expired = False
        self.until = loop.time() + seconds

    def __enter__(self) -> Self:
        self._deadlines.begin(self)
        return self

    def expire(self) -> None:
        self._expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.end(self)
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
