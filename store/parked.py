"""A receive that waits without a task of its own: `Parked`.

Most long polls find nothing, are told so, and come again. A task each, and what it holds, would be most of what they
cost. So one that can do nothing but wait is a place in its group's line and a timer; only when it is woken is there
something to run (`receive`).

    lie down -> rises with False: the time is over -> answered with nothing
             -> rises with True -> receive() -> an answer -> shown() -> it may be shown
             -> leave()
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from millpond.store.client import ReceiveRequest, ReceiveResult, Risen
from millpond.store.places import Group
from millpond.store.waiters import Waiter


class Woken(NamedTuple):
    """Who waited until now, and until when it may, in the loop's seconds."""

    waiter: Waiter
    deadline: float


class Parked:
    """As `store.client.ParkedReceive` says. It counts as waiting until it is served, or leaves."""

    __slots__ = (
        "_counted", "_leave", "_resume", "_resumed", "_rises", "_shown", "deadline", "group", "request", "shown_at",
        "waiter", "woken",
    )  # fmt: skip

    def __init__(
        self,
        group: Group,
        request: ReceiveRequest,
        rises: Callable[[Risen], None],
        resume: Callable[[Parked], Awaitable[ReceiveResult]],
        shown: Callable[[int], Awaitable[None]],
        leave: Callable[[], None],
    ) -> None:
        """`rises` is told how its wait ends; `resume` sets `shown_at` to the position that must be confirmed before its
        answer is shown; `shown` waits for it. `leave` is called once, when it no longer waits."""
        seconds = request.wait_ms / 1000
        self.group = group
        self.request = request
        self.deadline = group.waiters.time + seconds
        self.waiter = Waiter(request.queues)
        self.woken = False
        self.shown_at = 0
        self._rises: Callable[[Risen], None] | None = rises
        self._resume = resume
        self._shown = shown
        self._leave = leave
        self._resumed = False
        self._counted = True
        group.waiters.lie_down(self.waiter, seconds, self._rose)

    def _rose(self, how: Risen) -> None:
        if how is True:
            self.woken = True
        else:
            self._no_longer()
        rises, self._rises = self._rises, None  # it mostly knows this one: nothing is left to the collector of garbage
        if rises is not None:
            rises(how)

    def _no_longer(self) -> None:
        if self._counted:
            self._counted = False
            self._leave()

    @property
    def full(self) -> bool:
        return bool(self.group.full)

    async def receive(self) -> ReceiveResult:
        assert self.woken and not self._resumed, "a receive is served once, after it was woken"
        self._resumed = True
        try:
            return await self._resume(self)
        finally:
            self._no_longer()

    async def shown(self) -> None:
        await self._shown(self.shown_at)

    def leave(self) -> None:
        """Nobody wants the answer any more. To one that is being served it does nothing: that is cancelled."""
        if self._resumed:
            return
        self._resumed = True
        self._rises = None
        self._no_longer()
        if self.woken:
            self.group.waiters.done()
            self.group.pass_on()
        else:
            self.waiter.get_up()
