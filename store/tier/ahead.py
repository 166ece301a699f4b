"""Frames read before they are asked for: `ReadAhead`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from millpond.core.errors import MillpondError
from millpond.store.client import StoredFrame

Read = Callable[[int, int, int, int], Awaitable[list[StoredFrame]]]
"""`frames` of `source.SealSource`."""


class ReadAhead:
    """`frames` again, for one caller who mostly goes on where the last call ended. One step is read at a time."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._of = (0, 0)  # queue id, end of what is read ahead
        self._last: list[StoredFrame] = []
        self._ahead: asyncio.Task[list[StoredFrame]] | None = None  # what stands behind _last

    async def frames(self, queue_id: int, offset: int, end: int, max_bytes: int, *, ahead: bool) -> list[StoredFrame]:
        """As of `SealSource`, or more than `max_bytes`. `ahead`: what follows is wanted soon."""
        if (queue_id, end) != self._of:
            await self.forget()
            self._of = (queue_id, end)
        frames = [frame for frame in self._last if _end(frame) > offset]  # the caller took a part of them
        if not frames and self._ahead is not None:
            reading, self._ahead = self._ahead, None
            frames = await asyncio.shield(reading)
        if not frames or frames[0].first_offset > offset or _end(frames[-1]) <= offset:
            await self.forget()
            frames = await self._read(queue_id, offset, end, max_bytes)
        self._last = frames
        if ahead and self._ahead is None:
            self._ahead = asyncio.create_task(self._behind(frames, max_bytes))
        return frames

    async def _behind(self, frames: list[StoredFrame], max_bytes: int) -> list[StoredFrame]:
        """What stands behind `frames`; nothing at the end, or where it cannot be read: whoever asks for that meets the
        error."""
        queue_id, end = self._of
        if not frames or _end(frames[-1]) >= end:
            return []
        try:
            return await self._read(queue_id, _end(frames[-1]), end, max_bytes)
        except MillpondError:
            return []

    async def forget(self) -> None:
        """Nothing is being read when it returns."""
        self._last = []
        if self._ahead is not None:
            await asyncio.wait([self._ahead])
            self._ahead = None


def _end(frame: StoredFrame) -> int:
    return frame.first_offset + frame.count
