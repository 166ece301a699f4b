"""What a store does beside its traffic: the next segment is ready, full segments' indexes are written, checkpoints
are taken, segments that are no longer needed are recycled.

    segment loop      makes the next segment once the open one is half full: recycled when one may go, else allocated
    zero loop         zeroes the next blocks behind the tail, where they are only reserved, while little is appended
    index loop        writes the `.idx` of each full segment
    checkpoint loop   a snapshot every CHECKPOINT_BYTES or CHECKPOINT_FRAMES, published once confirmed

Each loop is one task of the engine, which notices its death. A full disk is not a death: `disk_full` is set, the
loop tries again every second, and produces are refused meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from functools import partial

from millpond.core.limits import MIB
from millpond.core.threads import Threads
from millpond.store.checkpoint import Checkpoint, Checkpoints, Head, encode
from millpond.store.commitlog import Segment
from millpond.store.fold.snapshot import Snapshot
from millpond.store.tail import FRAMES_PER_SEGMENT, Tail
from millpond.store.writer import Writer

_log = logging.getLogger("millpond.store")

RETRY_SECONDS = 1.0
CALM_BYTES_PER_SECOND = 32 * MIB  # what is filled faster is not zeroed beforehand: it would double the writing
CALM_SECONDS = 0.1  # .. for so long
CHECKPOINT_SHARE = 0.2  # of the time, half of it pauses: under heavy load checkpoints come less often, not to slow it
CHECKPOINT_SECONDS_LEAST = 1.0
INDEXES_MOST = 4  # of full segments that wait to be written, each held in memory: with more of them the log waits


class Housekeeping:
    """`recyclable()` names the oldest segment when it may go, else None; `snapshot()` makes a checkpoint."""

    def __init__(
        self,
        tail: Tail,
        writer: Writer,
        checkpoints: Checkpoints,
        snapshot: Callable[[], tuple[Head, Snapshot]],
        recyclable: Callable[[], Segment | None],
        limits: tuple[int, int],
    ) -> None:
        self._tail = tail
        self._writer = writer
        self._checkpoints = checkpoints
        self._snapshot = snapshot
        self._recyclable = recyclable
        self._checkpoint_bytes, self._checkpoint_frames = limits
        self._threads = Threads(1, "millpond-housekeeping")
        self._checkpoint_threads = Threads(1, "millpond-checkpoint")  # a segment that is needed waits for none
        self._segment_wake = asyncio.Event()
        self._index_wake = asyncio.Event()
        self._index_tried = asyncio.Event()
        self._index_refused = False  # the last one, by a full disk
        self._checkpoint_wake = asyncio.Event()
        self._zero_wake = asyncio.Event()
        self._ready = asyncio.Event()
        self._segment_wake.set()
        self._quarter = (-1, 0.0)  # the segment that was last seen a quarter full, and when, by the loop's clock
        self._demanded = False  # somebody waits for a segment, whatever the open one holds
        self.disk_full = False
        self.checkpoint_position = checkpoints.positions[-1] if checkpoints.positions else 0
        self._checkpoint_frame = tail.frames
        self.checkpoints_taken = 0
        self.segments_recycled = 0

    # -- segments ------------------------------------------------------------------------------------------

    async def segment_ready(self) -> None:
        """Until another segment is ready, or the disk is found to be full; the caller looks again, and bounds the
        wait."""
        self._ready.clear()
        self.demand_segment()
        await self._ready.wait()

    def demand_segment(self) -> None:
        """Something waits for room."""
        self._demanded = True
        self._segment_wake.set()

    def rolled(self) -> None:
        """The tail has moved into a new segment: the index of the last one may be written."""
        self._index_wake.set()

    def _filling(self) -> None:
        """How far the open segment is filled: is the next one due, or more of this one to be zeroed?"""
        log = self._tail.log
        base, filled = self._open()
        if filled * 4 >= log.segment_bytes and self._quarter[0] != base:
            self._quarter = (base, asyncio.get_running_loop().time())
        if not log.has_spare and self._full(1 / 2):
            self._segment_wake.set()
        if log.lacks_zeros:
            self._zero_wake.set()

    def _full(self, share: float) -> bool:
        """Whether so much of the last segment is, which is the open one as long as there is no spare: by bytes, or by
        frames (a segment of many small ones ends early)."""
        log = self._tail.log
        filled, frames = log.tail - log.segments[-1].base, len(self._tail.directory.open)
        return filled >= share * log.segment_bytes or frames >= share * FRAMES_PER_SEGMENT

    def _open(self) -> tuple[int, int]:
        """Base of the open segment, and bytes in it."""
        log = self._tail.log
        filled = log.tail % log.segment_bytes
        return log.tail - filled, filled

    def _wanted(self) -> bool:
        return not self._tail.log.has_spare and (self._demanded or self._full(1 / 2))

    def _calm(self) -> bool:
        """Whether the open segment's second quarter was filled slowly: then the next one is worth being zeroed."""
        base, filled = self._open()
        if self._quarter[0] != base:
            return False
        seconds = asyncio.get_running_loop().time() - self._quarter[1]
        return seconds * CALM_BYTES_PER_SECOND > filled - self._tail.log.segment_bytes // 4

    def _hurried(self) -> bool:
        """Whether the next segment may be needed before it is zeroed: a burst has begun meanwhile. Asked in a
        thread."""
        return self._demanded or self._full(3 / 4)

    async def segment_loop(self) -> None:
        while True:
            await self._segment_wake.wait()
            self._segment_wake.clear()
            while self._wanted():
                await self._few_indexes()
                if not await self._one_more_segment():
                    await self._pause()
            self._demanded = False
            self.disk_full = False
            self._ready.set()
            self._writer.wake()  # state may wait for this room

    async def _few_indexes(self) -> None:
        """Until few enough wait to be written; not for what a full disk refuses, a segment that goes makes room."""
        while len(self._tail.directory.closing()) > INDEXES_MOST and not self._index_refused:
            self._index_tried.clear()
            await self._index_tried.wait()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RETRY_SECONDS):
                await self._segment_wake.wait()
                self._segment_wake.clear()
        except TimeoutError:
            return

    async def _one_more_segment(self) -> bool:
        """Recycle or allocate a segment; False when the disk is full."""
        log = self._tail.log
        make, old = partial(log.allocate_segment, hurry=self._hurried), self._recyclable()
        if old is not None:
            assert log.drop_first_segment() is old
            self._tail.directory.forget(old.base)
            await self._tail.directory.remove_file(old.base)
            self.segments_recycled += 1
            make = partial(log.recycle_segment, old)
        try:
            segment = await self._threads.run(make, self._calm())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self.disk_full:
                _log.warning("the disk is full: messages are refused once the open segment is")
            self.disk_full = True
            self._ready.set()  # who waits for the segment is told so now
            return False
        log.add_segment(segment)
        return True

    async def zero_loop(self) -> None:
        """In a segment that a burst has begun: zero what stands behind the tail once little is appended. A flush that
        is the first to write to a reserved block must have the file system say so in its journal."""
        log = self._tail.log
        while True:
            await self._zero_wake.wait()
            tail = log.tail
            await asyncio.sleep(CALM_SECONDS)
            self._zero_wake.clear()
            if log.tail - tail > CALM_BYTES_PER_SECOND * CALM_SECONDS:
                continue
            try:
                while (blank := log.next_blank()) is not None:
                    await self._writer.zero(blank, self._threads)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise

    async def release(self, old: Segment) -> None:
        """Give a segment's room back to the disk; it has left the log already."""
        self._tail.directory.forget(old.base)
        await self._tail.directory.remove_file(old.base)
        await self._threads.run(self._tail.log.remove_segment_file, old)
        self.segments_recycled += 1

    # -- indexes -------------------------------------------------------------------------------------------

    async def index_loop(self) -> None:
        while True:
            await self._index_wake.wait()
            self._index_wake.clear()
            await self.write_indexes()

    async def write_indexes(self) -> None:
        """Write the `.idx` of every full segment whose frames are all on the disk."""
        directory = self._tail.directory
        for index in directory.closing():
            await self._writer.flushed(index.base + self._tail.log.segment_bytes)
            try:
                await directory.close_segment(index)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._index_refused = True
                self._index_tried.set()
                self._index_wake.set()  # it still answers from memory; tried again with the next roll
                await asyncio.sleep(RETRY_SECONDS)
                return
            self._index_refused = False
            self._index_tried.set()

    # -- checkpoints ---------------------------------------------------------------------------------------

    def appended(self) -> None:
        """Something was appended: is a checkpoint due, or a segment?"""
        self._filling()
        if (
            self._tail.log.tail - self.checkpoint_position >= self._checkpoint_bytes
            or self._tail.frames - self._checkpoint_frame >= self._checkpoint_frames
        ):
            self._checkpoint_wake.set()

    def demand_checkpoint(self) -> None:
        """Take one, due or not."""
        self._checkpoint_wake.set()

    async def checkpoint_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._checkpoint_wake.wait()
            self._checkpoint_wake.clear()
            started = loop.time()
            await self.checkpoint()
            took = loop.time() - started
            await asyncio.sleep(max(CHECKPOINT_SECONDS_LEAST, took / CHECKPOINT_SHARE - took))

    async def checkpoint(self) -> None:
        """Take a checkpoint of what is folded now, and publish it once that is confirmed. A full disk only delays."""
        head, tables = self._snapshot()
        position, frames = head.position, self._tail.frames
        data = await self._checkpoint_threads.run(lambda: encode(Checkpoint(head, tables())))
        self._writer.wake()
        await self._writer.flushed(position)
        try:
            await self._checkpoint_threads.run(self._checkpoints.publish, position, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return
        self.checkpoint_position = position
        self._checkpoint_frame = frames
        self.checkpoints_taken += 1
        self._segment_wake.set()

    def stop(self) -> None:
        for threads in (self._threads, self._checkpoint_threads):
            threads.close()
