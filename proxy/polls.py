"""A receive that has no task of its own while it waits: `Poll`, what `prompt` of `routes/receive.py` begins.

    park -> the time is over -> nothing
         -> woken -> task: run the receiver, encode, until it may be shown -> the answer
    or, when there may be something at once, the task from the beginning

Its future is the answer to come: buffers that follow each other. When it is left it hands back whatever was leased.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from millpond.core.gathered import Buffer
from millpond.core.tasks import Tasks
from millpond.proxy.grants import Receiver
from millpond.store.client import Risen

Pieces: TypeAlias = list[Buffer]


class Poll:
    """`future`: the answer, or the error that it ends with."""

    def __init__(
        self, receiver: Receiver, nothing: Pieces, serve: Callable[[Receiver], Awaitable[Pieces]], releases: Tasks
    ) -> None:
        """`nothing`: the answer that says so; `serve` runs the receiver and encodes what it got; `releases`: whose the
        handing back is when there is an answer and nobody to take it."""
        self._receiver = receiver
        self._nothing = nothing
        self._serve = serve
        self._releases = releases
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.future: asyncio.Future[Pieces] = self._loop.create_future()
        self._parked = receiver.park(self._rose)
        if self._parked is None:
            self._begin()

    def _rose(self, how: Risen) -> None:
        if self.future.done():  # cancelled by another than `leave`
            self._loop.call_soon(self._left)
        elif how is True:
            self._begin()
        elif isinstance(how, Exception):
            self.future.set_exception(how)
        elif self._parked is not None and self._parked.full:
            self._begin()
        else:
            self.future.set_result(self._nothing)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run(), name="receive")
        self._task.add_done_callback(self._ran)

    async def _run(self) -> None:
        try:
            answer = await self._serve(self._receiver)
            await self._receiver.shown()
        except Exception as error:  # noqa: BLE001 - whoever waits for the future is told
            if not self.future.done():
                self.future.set_exception(error)
            return
        if self.future.done():
            await self._receiver.held.release()
        else:
            self.future.set_result(answer)

    def _ran(self, task: asyncio.Task[None]) -> None:
        self._left()  # should it have been cancelled before its first step
        self.future.cancel()
        if not task.cancelled():
            task.exception()

    def leave(self) -> None:
        """Nobody waits for it any more: its future is cancelled."""
        self.future.cancel()
        if self._task is not None:
            self._task.cancel()
        else:
            self._left()

    def _left(self) -> None:
        if self._parked is not None:
            self._parked.leave()

    def lost(self) -> None:
        """There is an answer, and nobody to take it."""
        self._releases.spawn(self._receiver.held.release(), "release of leases")
