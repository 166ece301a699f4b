"""Frames read before they are asked for: `FramesAhead`.

Who drains a backlog asks for some megabytes, handles them, and asks for those behind them: the disk rests meanwhile,
and then everybody waits for the disk. So when a large read goes on where one of the same queue ended, or is a group's,
which always goes on, what follows is read while the answer is on its way:

    kept      AHEAD_BYTES at most, over all queues; each frame until it is asked for, or for AHEAD_SECONDS
    wanted    half again what was read last: whoever takes a little more the next time finds that too
    not now   while producers wait for flushes, which would wait for the disk
    damaged   nothing is kept: whoever asks for it meets the error

Frames in memory (`recent`) are none of its business, and a reader that asks for something else costs nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from millpond.core.errors import MillpondError
from millpond.core.limits import AHEAD_BYTES, AHEAD_LEAST_BYTES, AHEAD_SECONDS
from millpond.core.tasks import Tasks
from millpond.store.client import StoredFrame
from millpond.store.directory import Directory, FrameSpot
from millpond.store.flushes import Flushes
from millpond.store.fold.queues import Queues
from millpond.store.reader import FrameReader

_ENDS = 1_024  # of large reads remembered; the oldest goes first


class _Load:
    """Frames that were read at once. They share buffers: the memory is free when the last of them has gone."""

    __slots__ = ("bytes", "left", "since")

    def __init__(self, size: int, frames: int, since: float) -> None:
        self.bytes = size
        self.left = frames
        self.since = since


class _Kept(NamedTuple):
    frame: StoredFrame
    load: _Load


class FramesAhead:
    def __init__(self, queues: Queues, directory: Directory, reader: FrameReader, flushes: Flushes) -> None:
        self._queues = queues
        self._directory = directory
        self._reader = reader
        self._flushes = flushes
        self._tasks = Tasks()  # should one die, that is logged, and who asks reads for himself
        self._ends: OrderedDict[tuple[int, int], None] = OrderedDict()  # (queue id, offset behind a large read)
        self._kept: dict[int, _Kept] = {}  # by position, the oldest first
        self._loading: dict[int, asyncio.Task[None]] = {}  # by position
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False
        self.bytes = 0  # held by frames that are kept, or on their way

    async def frames(self, queue_id: int, spots: list[FrameSpot], *, goes_on: bool = False) -> list[StoredFrame]:
        """`FrameReader.frames` of consecutive offsets of a queue. `goes_on`: what follows will be asked for next."""
        size = sum(spot.length for spot in spots)
        if size < AHEAD_LEAST_BYTES and not self._kept and not self._loading:
            return await self._reader.frames(spots)
        if self._loading:
            coming = {task for spot in spots if (task := self._loading.get(spot.position)) is not None}
            if coming:
                await asyncio.wait(coming)
        kept = [self._take(spot) for spot in spots]
        absent = [spot for spot, frame in zip(spots, kept, strict=True) if frame is None]
        from_disk = len(absent) < len(spots) or not self._reader.in_memory(spots[-1])
        read = iter(await self._reader.frames(absent) if absent else [])
        if size >= AHEAD_LEAST_BYTES and from_disk:
            self._went_on(queue_id, spots[0].first, spots[-1].end, size, goes_on)
        return [next(read) if frame is None else frame for frame in kept]

    def _take(self, spot: FrameSpot) -> StoredFrame | None:
        kept = self._kept.get(spot.position)
        if kept is None:
            return None
        if spot.end == kept.frame.first_offset + kept.frame.count:
            self._drop(spot.position)
        return kept.frame

    def _drop(self, position: int) -> None:
        load = self._kept.pop(position).load
        load.left -= 1
        if not load.left:
            self.bytes -= load.bytes

    def _went_on(self, queue_id: int, first: int, end: int, size: int, goes_on: bool) -> None:
        """A large read has ended at `end`: the next one, if it is one of a row, wants what stands there."""
        follows = goes_on or (queue_id, first) in self._ends
        self._ends.pop((queue_id, first), None)
        self._ends[queue_id, end] = None
        if len(self._ends) > _ENDS:
            self._ends.popitem(last=False)
        if follows and not (self._closed or self.bytes >= AHEAD_BYTES or self._flushes.lately()):
            self._tasks.spawn(self._read(queue_id, end, 2 * (end - first), size + size // 2), "read ahead")

    async def _read(self, queue_id: int, offset: int, rows: int, max_bytes: int) -> None:
        """Read frames from `offset` on, until they and those that are here already have `max_bytes`; but for the one
        that is being read."""
        queue = self._queues.get(queue_id)
        most = 0 if queue is None else min(rows, queue.confirmed_end - offset)
        if most <= 0:
            return
        try:
            chosen = self._missing(await self._directory.spots(queue_id, offset, most), max_bytes)
            size = sum(spot.length for spot in chosen)
            task = asyncio.current_task()
            if not chosen or task is None or self.bytes + size > AHEAD_BYTES:
                return
            self.bytes += size
            self._loading |= dict.fromkeys((spot.position for spot in chosen), task)
            frames: list[StoredFrame] = []
            try:
                frames = await self._reader.frames(chosen)
            finally:
                for spot in chosen:
                    del self._loading[spot.position]
                self._keep(frames, size)
        except (MillpondError, OSError):
            return

    def _missing(self, spots: list[FrameSpot], max_bytes: int) -> list[FrameSpot]:
        """Those of the first `max_bytes` that are neither here nor on their way, as whole frames."""
        chosen: list[FrameSpot] = []
        for spot in spots:
            kept = self._kept.get(spot.position)
            here = self._reader.begun(spot) if kept is None else kept.frame
            if here is not None and here.first_offset < spot.first:
                continue  # it is being read: what is wanted stands behind it
            max_bytes -= spot.length
            if max_bytes < 0:
                break
            if here is None and spot.position not in self._loading and not self._reader.in_memory(spot):
                chosen.append(spot._replace(first=0, end=0))
        return chosen

    def _keep(self, frames: list[StoredFrame], size: int) -> None:
        """Frames of `size` bytes, which are counted already; none: they could not be read."""
        if not frames:
            self.bytes -= size
            return
        loop = asyncio.get_running_loop()
        load = _Load(size, len(frames), loop.time())
        self._kept |= {frame.position: _Kept(frame, load) for frame in frames}
        if self._sweeping is None:
            self._sweeping = loop.call_later(AHEAD_SECONDS, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let go of what nobody has asked for."""
        self._sweeping = None
        until = loop.time() - AHEAD_SECONDS
        while self._kept:
            position, kept = next(iter(self._kept.items()))
            if kept.load.since > until:
                self._sweeping = loop.call_at(kept.load.since + AHEAD_SECONDS, self._sweep, loop)
                return
            self._drop(position)

    async def close(self) -> None:
        """Nothing more is read ahead."""
        self._closed = True
        await self._tasks.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
