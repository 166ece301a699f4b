"""Frames read before they are asked for: `ReadAhead`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from millpond.core.errors import MillpondError
from millpond.store.client import StoredFrame

STEPS_AHEAD = 3  # that wait for the disk, or for who wants them


class Reading(NamedTuple):
    """A step that is being read. `end`: the offset behind it."""

    frames: asyncio.Task[list[StoredFrame]]
    end: int


Begin = Callable[[int, int, int, int], Awaitable[Reading]]
"""Begins what `frames` of `source.SealSource` does. Steps are read in the order in which they begin."""


class ReadAhead:
    """`frames` again, for one caller who mostly goes on where the last call ended. The disk goes on while nobody looks:
    who waits for it waits for a core next."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._of = (0, 0)  # queue id, end of what is read ahead
        self._last: list[StoredFrame] = []
        self._ahead: deque[Reading] = deque()  # what stands behind _last

    async def frames(self, queue_id: int, offset: int, end: int, max_bytes: int, *, ahead: int) -> list[StoredFrame]:
        """As of `SealSource`, or more than `max_bytes`. `ahead`: what follows is wanted soon, and read in steps of so
        many bytes; 0: it is not."""
        if (queue_id, end) != self._of:
            await self.forget()
            self._of = (queue_id, end)
        frames = _from(offset, self._last)  # the caller took a part of them
        if not frames and self._ahead:
            frames = _from(offset, await self._next())
        if not frames or frames[0].first_offset > offset:
            await self.forget()
            self._ahead.append(reading := await self._begin(queue_id, offset, end, max_bytes))
            await self._go_on(reading.end, ahead)
            frames = await asyncio.shield(reading.frames)
            self._ahead.popleft()
        self._last = frames
        await self._go_on(_end(frames[-1]) if frames else end, ahead)
        return frames

    async def _next(self) -> list[StoredFrame]:
        """Nothing where it cannot be read: whoever asks for that meets the error."""
        reading = self._ahead[0]
        await asyncio.wait([reading.frames])
        self._ahead.popleft()
        return [] if reading.frames.exception() else reading.frames.result()

    async def _go_on(self, behind: int, step_bytes: int) -> None:
        """Begin the steps that are to be read ahead; the first one at `behind`."""
        queue_id, end = self._of
        while step_bytes and len(self._ahead) < STEPS_AHEAD:
            behind = self._ahead[-1].end if self._ahead else behind
            if behind >= end:
                return
            try:
                self._ahead.append(await self._begin(queue_id, behind, end, step_bytes))
            except MillpondError:  # met by who asks for it
                return

    async def forget(self) -> None:
        """Nothing is being read when it returns."""
        self._last = []
        while self._ahead:
            await self._next()


def _from(offset: int, frames: list[StoredFrame]) -> list[StoredFrame]:
    return [frame for frame in frames if _end(frame) > offset]


def _end(frame: StoredFrame) -> int:
    return frame.first_offset + frame.count
