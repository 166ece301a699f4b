"""What delivery sees of a store: ends, the index by columns, frames, and when its own state is on the disk."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from millpond.core.limits import AHEAD_LEAST_BYTES, INLINE_FRAME_BYTES
from millpond.store.ahead import FramesAhead
from millpond.store.client import QueueEnds, QueueRef, StoredFrame
from millpond.store.directory import Directory, FrameSpot, spots_of
from millpond.store.index import ENTRY
from millpond.store.reader import FrameReader
from millpond.store.reads import Reads
from millpond.store.tail import Tail
from millpond.store.writer import Writer


class EngineLog:
    """`DeliveryLog` over a store's tail, index and reader."""

    def __init__(
        self,
        tail: Tail,
        writer: Writer,
        directory: Directory,
        reader: FrameReader,
        ahead: FramesAhead,
        reads: Reads,
    ) -> None:
        self._tail = tail
        self._writer = writer
        self._directory = directory
        self._reader = reader
        self._ahead = ahead
        self._reads = reads
        self._state_position: asyncio.Future[int] | None = None

    # -- queues and index ------------------------------------------------------------------------------------

    def ends(self, queue_id: int) -> QueueEnds:
        return self._reads.ends(queue_id)

    def flushing_end(self, queue_id: int) -> int:
        queue = self._tail.fold.queues.get(queue_id)
        return 0 if queue is None else queue.flushing_end

    def open_queue(self, queue: QueueRef) -> None:
        if self._tail.fold.queues.get(queue.queue_id) is None:
            self._tail.open_queue(queue, 0)
            self._writer.wake()

    async def tag_hashes(self, queue_id: int, first: int, end: int) -> npt.NDArray[np.uint32]:
        """Of [first, end); shorter when something stands in between that is not on this disk. Raises Internal."""
        return (await self._entries(queue_id, first, end))["tag_hash"]

    async def timestamp_at(self, queue_id: int, offset: int) -> int:
        """Store timestamp (ms) of a message; -1 when it is not on this disk."""
        spots = await self._directory.spots(queue_id, offset, 1)
        return (await self._reader.timestamps(spots))[0] if spots else -1

    async def row_bytes(self, queue_id: int, first: int, end: int) -> npt.NDArray[np.float64]:
        """An estimate for each of [first, end): its share of its frame."""
        entries = await self._entries(queue_id, first, end)
        positions = entries["position"]
        heads = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1])))
        counts = np.diff(heads, append=len(entries))
        return np.repeat(entries["length"][heads] / counts, counts)

    async def _entries(self, queue_id: int, first: int, end: int) -> npt.NDArray[np.void]:
        if first >= end:
            return np.empty(0, ENTRY)
        entries = await self._directory.entries(queue_id, first, end - first)
        if not len(entries):
            raise self._reads.missing(queue_id, first)
        return entries

    async def spots(self, queue_id: int, first: int, end: int) -> list[FrameSpot]:
        spots = await self._directory.spots(queue_id, first, end - first)
        if not spots:
            raise self._reads.missing(queue_id, first)
        return spots

    def spots_in_memory(self, queue_id: int, first: int, end: int) -> list[FrameSpot]:
        return self._directory.spots_in_memory(queue_id, first, end - first)

    # -- frames ----------------------------------------------------------------------------------------------

    def frames_in_memory(self, spots: list[FrameSpot], max_bytes: int) -> list[StoredFrame] | None:
        if sum(spot.length for spot in spots) > min(max_bytes, AHEAD_LEAST_BYTES):
            return None  # many: reading ahead counts them
        return self._reader.newest(spots)

    async def frames_at(self, queue_id: int, spots: list[FrameSpot], max_bytes: int) -> list[StoredFrame]:
        """The first of these that fit into `max_bytes`; one at least."""
        size = 0
        for count, spot in enumerate(spots):
            size += spot.length
            if count and size > max_bytes:
                spots = spots[:count]
                break
        return await self._ahead.frames(queue_id, spots, goes_on=True)

    async def frames_for(self, queue_id: int, offsets: npt.NDArray[np.int64], max_bytes: int) -> list[StoredFrame]:
        """The frames that travel with a grant of these offsets (ascending): small ones, and those of which a quarter
        and more is granted; at most `max_bytes`. The proxy reads the others."""
        if not len(offsets):
            return []
        first = int(offsets[0])
        entries = await self._directory.entries(queue_id, first, int(offsets[-1]) + 1 - first)
        chosen: list[FrameSpot] = []
        size = 0
        for spot in spots_of(entries, first):
            low, high = np.searchsorted(offsets, (spot.first, spot.end))
            taken = int(high - low)
            if taken == 0 or (spot.length > INLINE_FRAME_BYTES and 4 * taken < spot.end - spot.first):
                continue
            if chosen and size + spot.length > max_bytes:
                break
            chosen.append(spot)
            size += spot.length
        count = chosen[-1].end - first if chosen else 0
        if count and count <= len(offsets) and offsets[count - 1] == chosen[-1].end - 1:  # none is left out
            return await self._ahead.frames(queue_id, chosen)
        return await self._reader.frames(chosen)

    # -- durability of state -----------------------------------------------------------------------------------

    def state_changed(self) -> None:
        """Cursors are dirty: the writer gathers them in this turn of the loop, with everybody else's."""
        self._writer.wake()

    async def state_written(self) -> None:
        await self._writer.written(await self._gathered())

    async def state_flushed(self) -> None:
        await self._writer.flushed(await self._gathered())

    async def confirmed(self) -> None:
        await self._writer.flushed(await self._gathered())

    @property
    def flushing(self) -> int:
        return self._tail.log.flushing

    async def shown(self, position: int) -> None:
        await self._writer.flushed(position)

    async def _gathered(self) -> int:
        """The position below which all state changes made so far stand."""
        if not self._tail.fold.has_state:
            return self._tail.log.tail
        return await self._writer.gathered()
