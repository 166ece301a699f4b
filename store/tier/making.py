"""Sealing's work in this process: `LocalWork`.

    frames, some MiB (source) -> rows, row group (encoder) -> hash, staged object (stream)

The three go on side by side in threads, a few MiB apart, so a run of any size takes some 30 MiB.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from mmap import mmap

from millpond.core.errors import Conflict
from millpond.core.limits import MIB, SEAL_END_SECONDS, SEAL_STEP_SECONDS, SEAL_STREAM_BUFFERS
from millpond.core.tier.encoder import Group, Grouping, ObjectEncoder
from millpond.core.tier.objects import ObjectStore, Staged
from millpond.core.tier.rows import rows_of
from millpond.core.tier.staged import compare
from millpond.metadata.client import ObjectRange
from millpond.store.client import QueueRef, StoredFrame
from millpond.store.tier.in_time import in_time
from millpond.store.tier.run import DAY_MS, FrameSource, Piece, gather
from millpond.store.tier.threads import SealThreads
from millpond.store.tier.work import Job, Made

Breathe = Callable[[int], Awaitable[None]]
"""Awaited after each piece of so many raw bytes: whoever is in no hurry waits in it."""


async def _at_once(_size: int) -> None: ...


class LocalWork:
    def __init__(self, source: FrameSource, objects: ObjectStore, breathe: Breathe = _at_once) -> None:
        self._source = source
        self._objects = objects
        self._breathe = breathe
        self._threads = SealThreads()
        self._staged: dict[int, Staged] = {}
        self._numbers = count(1)

    async def make(self, job: Job) -> Made | None:
        number = next(self._numbers)
        self._staged[number] = staged = self._objects.stage()
        try:
            made = await self._make(number, staged, job)
        except BaseException:
            self._drop(number)
            raise
        if made is None:
            self._drop(number)
        return made

    async def _make(self, number: int, staged: Staged, job: Job) -> Made | None:
        run = _Run(staged, job, self._threads)
        try:
            pieces = await gather(self._source, job.wanted, job.oldest_ts, job.most_bytes, partial(self._take, run))
            if not pieces:
                return None
            return await run.finish(number, pieces)
        finally:
            run.stop()

    async def _take(self, run: _Run, queue: QueueRef, frames: list[StoredFrame], offset: int) -> None:
        await run.add(queue.queue, frames, offset)
        await self._breathe(sum(frame.payload_size for frame in frames))

    async def put(self, made: Made, path: str) -> None:
        try:
            await self._staged[made.number].publish(path, made.sha256)
        except Conflict:  # an earlier attempt may have put it
            await compare(self._objects, path, made.bytes, made.sha256)

    async def drop(self, made: Made) -> None:
        dropping = self._drop(made.number)
        if dropping is not None:
            await asyncio.wait([asyncio.wrap_future(dropping)], timeout=SEAL_STEP_SECONDS)

    def _drop(self, number: int) -> Future[None] | None:
        """Behind what is still being written."""
        staged = self._staged.pop(number, None)
        return self._threads.behind(staged.drop) if staged is not None else None

    async def rest(self) -> None: ...

    async def close(self) -> None:
        """What is staged goes; the threads end."""
        dropping = [self._drop(number) for number in list(self._staged)]
        waiting = [asyncio.wrap_future(one) for one in dropping if one is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=SEAL_END_SECONDS)
        self._threads.close()


class _Run:
    """An object on its way."""

    def __init__(self, staged: Staged, job: Job, threads: SealThreads) -> None:
        self._threads = threads
        self._stream = _Stream(staged, threads)
        self._encoder = ObjectEncoder(self._stream.write, job.topic_id, job.epoch)
        self._grouping = Grouping(job.most_bytes)
        self._encoding: deque[asyncio.Future[None]] = deque()
        self._first_ts = 0

    async def add(self, queue: int, frames: list[StoredFrame], offset: int) -> None:
        """The rows of `frames` from `offset` on. Returns while they are being encoded."""
        self._first_ts = frames[0].store_ts // DAY_MS * DAY_MS
        async with in_time("encode a row group"):
            await self._encode(await self._threads.before(lambda: self._grouped(queue, frames, offset)))

    def _grouped(self, queue: int, frames: list[StoredFrame], offset: int) -> list[Group]:
        return self._grouping.add(queue, rows_of(queue, frames).slice(offset - frames[0].first_offset))

    async def _encode(self, groups: list[Group]) -> None:
        """One row group is encoded, the next waits for its turn already."""
        for group in groups:
            while len(self._encoding) == 2:
                await self._encoding.popleft()
            self._encoding.append(self._threads.encode(partial(self._encoder.write, group)))

    async def finish(self, number: int, pieces: list[Piece]) -> Made:
        async with in_time("write the end of an object"):
            await self._encode(self._grouping.finish())
            while self._encoding:
                await self._encoding.popleft()
            return await self._threads.encode(lambda: self._finished(number, pieces))

    def _finished(self, number: int, pieces: list[Piece]) -> Made:
        encoded = self._encoder.finish()
        ranges = [
            ObjectRange(
                piece.queue.queue_id, each.queue, piece.first, each.end, each.end - each.first,
                each.min_store_ts, each.max_store_ts, each.min_born_ts, each.max_born_ts,
            )
            for piece, each in zip(pieces, encoded.ranges, strict=True)
        ]  # fmt: skip
        lost = [one for piece in pieces for one in piece.lost]
        sha256, raw_bytes = self._stream.finish(), self._grouping.raw_bytes
        return Made(number, encoded.bytes, sha256, encoded.footer_bytes, ranges, lost, self._first_ts, raw_bytes)

    def stop(self) -> None:
        """Nothing more is written, whatever still runs. (A Parquet writer that was not closed writes a footer when it
        is collected.)"""
        self._stream.stopped = True
        for encoding in self._encoding:
            encoding.cancel()


class _Stream:
    """An object's bytes on their way from the encoder's thread through the hash into what is staged."""

    def __init__(self, staged: Staged, threads: SealThreads) -> None:
        self._staged = staged
        self._threads = threads
        self._buffers = [
            memoryview(mmap(-1, MIB)) for _ in range(SEAL_STREAM_BUFFERS)
        ]  # a file takes pages as they are
        self._held = 0
        self._digest = hashlib.sha256()
        self._under_way: deque[Future[None]] = deque()
        self.stopped = False

    def write(self, data: memoryview) -> None:
        """Copied. Raises what an earlier write has met."""
        while data and not self.stopped:
            taken = min(len(data), MIB - self._held)
            self._buffers[0][self._held : self._held + taken] = data[:taken]
            self._held += taken
            data = data[taken:]
            if self._held == MIB:
                self._pass_on()

    def finish(self) -> str:
        """The SHA-256 of everything, in hex, once all of it is staged."""
        self._pass_on()
        while self._under_way:
            self._under_way.popleft().result()
        return self._digest.hexdigest()

    def _pass_on(self) -> None:
        if len(self._under_way) == SEAL_STREAM_BUFFERS - 1:
            self._under_way.popleft().result()
        data = self._buffers[0][: self._held]
        self._under_way.append(self._threads.behind(lambda: self._stage(data)))
        self._buffers.append(self._buffers.pop(0))
        self._held = 0

    def _stage(self, data: memoryview) -> None:
        self._digest.update(data)
        self._staged.write(data)
