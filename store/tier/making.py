"""Sealing's work in this process: `LocalWork`.

    frames, some MiB (source) -> rows, row group (encoder) -> staged object, and its hash (stream)

All four go on side by side in threads, a few MiB apart, so a run of any size takes some 50 MiB. The end of a run is
encoded and staged while the next one is read.
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

import numpy as np
import numpy.typing as npt

from millpond.core.errors import Conflict
from millpond.core.limits import SEAL_END_SECONDS, SEAL_STEP_SECONDS, SEAL_STREAM_BYTES, SEAL_STREAM_STEPS
from millpond.core.tier.encoder import Encoded, Group, Grouping, ObjectEncoder, crc_of
from millpond.core.tier.objects import ObjectStore, Staged
from millpond.core.tier.rows import rows_of
from millpond.core.tier.staged import compare
from millpond.metadata.client import ObjectRange
from millpond.store.client import QueueRef, StoredFrame
from millpond.store.tier.in_time import in_time
from millpond.store.tier.run import DAY_MS, FrameSource, Piece, gather
from millpond.store.tier.threads import SealThreads
from millpond.store.tier.work import Begun, Job, Made

Breathe = Callable[[int], Awaitable[None]]
"""Awaited after each piece of so many raw bytes: whoever is in no hurry waits in it."""


async def _at_once(_size: int) -> None: ...


class LocalWork:
    def __init__(self, source: FrameSource, objects: ObjectStore, breathe: Breathe = _at_once) -> None:
        self._source = source
        self._objects = objects
        self._breathe = breathe
        self._threads = SealThreads()
        self._runs: dict[int, _Run] = {}
        # Of the thread that writes: a file takes pages as they are.
        self._buffer = np.frombuffer(mmap(-1, SEAL_STREAM_BYTES), np.uint8)
        self._numbers = count(1)

    async def begin(self, job: Job) -> Begun | None:
        number = next(self._numbers)
        self._runs[number] = run = _Run(_Stream(self._objects.stage(), self._threads, self._buffer), job, self._threads)
        try:
            pieces = await gather(self._source, job.wanted, job.oldest_ts, job.most_bytes, partial(self._take, run))
        except BaseException:
            self._drop(number)
            raise
        if not pieces:
            self._drop(number)
            return None
        run.pieces = pieces
        return Begun(number, pieces)

    async def _take(self, run: _Run, queue: QueueRef, frames: list[StoredFrame], offset: int) -> None:
        await run.add(queue.queue, frames, offset)
        await self._breathe(sum(frame.payload_size for frame in frames))

    async def finish(self, number: int) -> Made:
        try:
            return await self._runs[number].finish(number)
        except BaseException:
            self._drop(number)
            raise

    async def put(self, made: Made, path: str) -> None:
        try:
            await self._runs[made.number].stream.staged.publish(path, made.sha256)
        except Conflict:  # an earlier attempt may have put it
            await compare(self._objects, path, made.bytes, made.sha256)

    async def drop(self, number: int) -> None:
        dropping = self._drop(number)
        if dropping is not None:
            await asyncio.wait([asyncio.wrap_future(dropping)], timeout=SEAL_STEP_SECONDS)

    def _drop(self, number: int) -> Future[None] | None:
        """Behind what is still being written."""
        run = self._runs.pop(number, None)
        if run is None:
            return None
        run.stop()
        return self._threads.behind(run.stream.staged.drop)

    async def rest(self) -> None: ...

    async def close(self) -> None:
        """What is staged goes; the threads end."""
        for number in list(self._runs):
            self._drop(number)
        last = self._threads.behind(lambda: None)  # also what was dropped before
        await asyncio.wait([asyncio.wrap_future(last)], timeout=SEAL_END_SECONDS)
        self._threads.close()


class _Run:
    """An object on its way."""

    def __init__(self, stream: _Stream, job: Job, threads: SealThreads) -> None:
        self.stream = stream
        self.pieces: list[Piece] = []  # once it was read to its end
        self._threads = threads
        self._encoder = ObjectEncoder(stream.write, job.topic_id, job.epoch, stream.checksum)
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

    async def finish(self, number: int) -> Made:
        async with in_time("write the end of an object"):
            await self._encode(self._grouping.finish())
            while self._encoding:
                await self._encoding.popleft()
            encoded = await self._threads.encode(self._end)
            sha256 = await self.stream.finish()
        return self._made(number, encoded, sha256)

    def _end(self) -> Encoded:
        encoded = self._encoder.finish()
        self.stream.end()
        return encoded

    def _made(self, number: int, encoded: Encoded, sha256: str) -> Made:
        ranges = [
            ObjectRange(
                piece.queue.queue_id, each.queue, piece.first, each.end, each.end - each.first,
                each.min_store_ts, each.max_store_ts, each.min_born_ts, each.max_born_ts,
            )
            for piece, each in zip(self.pieces, encoded.ranges, strict=True)
        ]  # fmt: skip
        lost = [one for piece in self.pieces for one in piece.lost]
        raw_bytes = self._grouping.raw_bytes
        return Made(number, encoded.bytes, sha256, encoded.footer_bytes, ranges, lost, self._first_ts, raw_bytes)

    def stop(self) -> None:
        """Nothing more is written, whatever still runs. (A Parquet writer that was not closed writes a footer when it
        is collected.)"""
        self.stream.stopped = True
        for encoding in self._encoding:
            encoding.cancel()


class _Stream:
    """An object's bytes on their way from the encoder's thread into what is staged, and into its hash, some MiB at
    once."""

    def __init__(self, staged: Staged, threads: SealThreads, buffer: npt.NDArray[np.uint8]) -> None:
        """`buffer`: SEAL_STREAM_BYTES that only the writing thread uses."""
        self.staged = staged
        self.stopped = False
        self._threads = threads
        self._buffer = buffer
        self._gathered: list[memoryview] = []
        self._bytes = 0  # of these
        self._digest = hashlib.sha256()
        self._under_way: deque[tuple[Future[None], Future[None]]] = deque()

    def write(self, data: memoryview) -> None:
        """Kept as it is: it must not change. Raises what an earlier write has met."""
        while data and not self.stopped:
            room = SEAL_STREAM_BYTES - self._bytes
            some, data = data[:room], data[room:]
            self._gathered.append(some)
            self._bytes += len(some)
            if self._bytes == SEAL_STREAM_BYTES:
                self._pass_on()

    def checksum(self, pieces: list[bytes]) -> Callable[[], int]:
        """As the encoder wants it: by the thread that hashes, since the encoder's is what all others wait for."""
        return self._threads.hash(partial(crc_of, pieces)).result

    def end(self) -> None:
        """Nothing more is written."""
        self._pass_on()

    async def finish(self) -> str:
        """After `end`: the SHA-256 of everything, in hex, once all of it is staged. Raises what a write has met."""
        while self._under_way:
            for step in self._under_way.popleft():
                await asyncio.wrap_future(step)
        return self._digest.hexdigest()

    def _pass_on(self) -> None:
        if len(self._under_way) == SEAL_STREAM_STEPS:
            for step in self._under_way.popleft():
                step.result()
        gathered, self._gathered, self._bytes = self._gathered, [], 0
        hashing = self._threads.hash(partial(self._hash, gathered))
        self._under_way.append((hashing, self._threads.behind(partial(self._stage, gathered))))

    def _hash(self, gathered: list[memoryview]) -> None:
        for some in gathered:
            self._digest.update(some)

    def _stage(self, gathered: list[memoryview]) -> None:
        size = 0
        for some in gathered:  # by numpy, which lets the encoder have the interpreter meanwhile
            self._buffer[size : size + len(some)] = np.frombuffer(some, np.uint8)
            size += len(some)
        self.staged.write(self._buffer.data[:size])
