"""Direct reads: by offset, by time, by key hash; and waiting for what is not there yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from millpond.core.errors import BelowLocal, Internal, OffsetExpired, OffsetOutOfRange
from millpond.core.frame import unpack_sidecar
from millpond.core.limits import SCAN_ENTRIES
from millpond.core.schema import BORN_TS, message_schema
from millpond.store.ahead import FramesAhead
from millpond.store.client import (
    FindRequest,
    QueueEnds,
    ReadRequest,
    ReadResult,
    StoredFrame,
    TimeRequest,
    TimeResult,
)
from millpond.store.closed_index import Table
from millpond.store.directory import Directory, FrameSpot, spots_of
from millpond.store.fold.queues import Queues, QueueState
from millpond.store.reader import FrameReader

_ENTRIES_AT_ONCE = 4_096  # looked at in one go: about as many as a page of 1 KiB messages has
_FRAMES_AT_ONCE = 1_024  # given by one read: each is some microseconds of the loop, however small it is
_BORN_SCAN_BYTES = 4 * 1024 * 1024


class Reads:
    """The read side of a store. `notify` is called for every queue whose confirmed end moved."""

    def __init__(
        self,
        queues: Queues,
        directory: Directory,
        reader: FrameReader,
        ahead: FramesAhead,
        lost: list[tuple[int, int, int]],
        waiting: Callable[[], None],
    ) -> None:
        """`lost`: (queue id, first, end) of offsets that stood in damaged parts of the log. `waiting` is called when
        a read begins to wait for what is not confirmed yet."""
        self._begins_to_wait = waiting
        self._lost = lost
        self._queues = queues
        self._directory = directory
        self._reader = reader
        self._ahead = ahead
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    # -- ends ------------------------------------------------------------------------------------------------

    def ends(self, queue_id: int) -> QueueEnds:
        queue = self._queues.get(queue_id)
        return queue.ends() if queue is not None else QueueEnds(queue_id, 0, 0, 0, 0)

    def notify(self, queue_id: int) -> None:
        for future in self._waiting.pop(queue_id, ()):
            if not future.done():
                future.set_result(None)

    def awaits(self, queue_id: int) -> bool:
        """Whether a read waits for more of this queue."""
        return queue_id in self._waiting

    async def _wait_beyond(self, queue_id: int, offset: int, wait_ms: int) -> None:
        """Until `offset` is confirmed, or the time is up."""
        self._begins_to_wait()
        try:
            async with asyncio.timeout(wait_ms / 1000):
                while self.ends(queue_id).end_offset <= offset:
                    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.setdefault(queue_id, []).append(future)
                    try:
                        await future
                    finally:
                        if future.cancelled() and future in (waiting := self._waiting.get(queue_id, [])):
                            waiting.remove(future)
        except TimeoutError:
            return

    # -- by offset -------------------------------------------------------------------------------------------

    async def read(self, request: ReadRequest) -> ReadResult:
        ends = self.ends(request.queue_id)
        if request.offset < ends.start_offset:
            raise OffsetExpired(
                "offset_expired",
                f"offset {request.offset} has expired: the first there is is {ends.start_offset}",
                start_offset=ends.start_offset,
                end_offset=ends.end_offset,
            )
        if request.offset > ends.end_offset:
            raise OffsetOutOfRange(
                "offset_out_of_range",
                f"offset {request.offset} is beyond the end {ends.end_offset}",
                start_offset=ends.start_offset,
                end_offset=ends.end_offset,
            )
        if request.offset == ends.end_offset and request.wait_ms:
            await self._wait_beyond(request.queue_id, request.offset, request.wait_ms)
            ends = self.ends(request.queue_id)
        if request.offset >= ends.end_offset:
            return ReadResult([], request.offset, ends)
        spots, next_offset = await self._choose(request, ends)
        try:
            frames = await self._frames(request, spots)
        except Internal as error:
            # What stands before the damage is given first; the next read, which begins at it, says what is wrong.
            next_offset = error.extra["offset"]
            before = [spot for spot in spots if spot.first < next_offset]
            if not before:
                raise
            frames = await self._reader.frames(before)
        return ReadResult(frames, next_offset, self.ends(request.queue_id))

    async def _frames(self, request: ReadRequest, spots: list[FrameSpot]) -> list[StoredFrame]:
        if request.tag_hashes:  # leaves frames out
            return await self._reader.frames(spots)
        return await self._ahead.frames(request.queue_id, spots)

    async def _choose(self, request: ReadRequest, ends: QueueEnds) -> tuple[list[FrameSpot], int]:
        """The frames this read gives, and the offset where the next one goes on."""
        most = min(ends.end_offset - request.offset, SCAN_ENTRIES if request.tag_hashes else request.max_messages)
        step = most if request.tag_hashes else _ENTRIES_AT_ONCE
        chosen: list[FrameSpot] = []
        total_bytes = total = 0
        at, end = request.offset, request.offset + most
        while at < end:
            entries = await self._directory.entries(request.queue_id, at, min(end - at, step))
            if not len(entries):
                break
            for spot in self._wanted(entries, at, request.tag_hashes):
                if chosen and chosen[-1].position == spot.position:  # cut by the step
                    chosen[-1] = chosen[-1]._replace(end=spot.end)
                elif chosen and (
                    total_bytes + spot.length > request.max_bytes
                    or total >= request.max_messages
                    or len(chosen) == _FRAMES_AT_ONCE
                ):
                    return chosen, spot.first
                else:
                    chosen.append(spot)
                    total_bytes += spot.length
                total += spot.end - spot.first
            at += len(entries)
        if at == request.offset:
            raise self.missing(request.queue_id, request.offset)
        return chosen, at

    @staticmethod
    def _wanted(entries: Table, offset: int, tag_hashes: list[int] | None) -> list[FrameSpot]:
        """The frames behind `entries`, from `offset` on, that hold a message with one of the tags, if any is named; no
        more than a read gives, and the next one."""
        wanted = np.isin(entries["tag_hash"], np.array(tag_hashes, np.uint32)) if tag_hashes else None
        return spots_of(entries, offset, _FRAMES_AT_ONCE + 1, wanted)

    def missing(self, queue_id: int, offset: int) -> BelowLocal | Internal:
        """Why an offset between start and end has no entry: it is in the tier, or it is lost."""
        queue = self._queues.get(queue_id)
        assert queue is not None
        if offset < queue.tiered_to or offset < queue.local_offset:
            return BelowLocal(
                "below_local",
                f"offset {offset} is no longer on the store's disk",
                first_local_offset=queue.local_offset,
                end_offset=queue.confirmed_end,
            )
        behind = [end for of, first, end in self._lost if of == queue_id and first <= offset < end]
        return Internal(
            "corrupt_range",
            f"messages from offset {offset} on stood in a damaged part of the log; read or seek past them",
            offset=offset,
            next_offset=max(behind, default=None),
        )

    # -- by time ---------------------------------------------------------------------------------------------

    async def offsets_at(self, request: TimeRequest) -> TimeResult:
        offsets: list[int] = []
        local: list[bool] = []
        for queue_id in request.queue_ids:
            queue = self._queues.get(queue_id)
            if queue is None:
                offsets.append(0)
                local.append(True)
                continue
            first = max(queue.local_offset, queue.start_offset)
            if request.clock == "store":
                found = await self._at_store_time(queue, request.ts)
                local.append(found > first or first <= queue.start_offset)
            else:
                found = await self._at_born_time(queue, request.ts)
                local.append(first <= queue.start_offset)
            offsets.append(found)
        return TimeResult(offsets, local)

    async def _at_store_time(self, queue: QueueState, ts: int) -> int:
        """The first confirmed local offset stamped `ts` or later; store timestamps never decrease in a queue."""
        end = queue.confirmed_end
        if queue.last_ts < ts:
            return end
        floor = self._directory.time_floor(ts)
        offset = await self._directory.first_from_position(queue.ref.queue_id, floor)
        offset = max(queue.local_offset, queue.start_offset) if offset is None else max(offset, queue.start_offset)
        while offset < end:
            entries = await self._directory.entries(queue.ref.queue_id, offset, min(end - offset, 4096))
            if not len(entries):
                offset = _behind(self.missing(queue.ref.queue_id, offset))
                continue
            spots = spots_of(entries, offset)
            stamps = await self._reader.timestamps(spots)
            for spot, stamp in zip(spots, stamps, strict=True):
                if stamp >= ts:
                    return spot.first
            offset += len(entries)
        return end

    async def _at_born_time(self, queue: QueueState, ts: int) -> int:
        """The first local offset born at `ts` or later. Producers' clocks come in any order, so this looks at all."""
        offset, end = max(queue.local_offset, queue.start_offset), queue.confirmed_end
        while offset < end:
            request = ReadRequest(queue.ref.queue_id, offset, end - offset, _BORN_SCAN_BYTES)
            try:
                spots, next_offset = await self._choose(request, queue.ends())
            except Internal as error:
                offset = _behind(error)
                continue
            frames = await self._reader.frames(spots)
            found = await asyncio.get_running_loop().run_in_executor(None, _first_born, frames, offset, ts)
            if found is not None:
                return min(found, end)
            offset = next_offset
        return end

    # -- by key ----------------------------------------------------------------------------------------------

    async def find(self, request: FindRequest) -> list[StoredFrame]:
        """Confirmed frames that hold a row of this key hash, newest first, within the times given."""
        spots = await self._directory.key_spots(request.queue_ids, request.key_hash)
        found: list[StoredFrame] = []
        for start in range(len(spots), 0, -64):
            some = [FrameSpot(position, length, 0, 0) for position, length in spots[max(0, start - 64) : start]]
            frames = await self._reader.frames(some)
            found += [frame for frame in reversed(frames) if self._shown(frame, request)]
            if len(found) >= request.max_frames:
                break
        return found[: request.max_frames]

    def _shown(self, frame: StoredFrame, request: FindRequest) -> bool:
        queue = self._queues.get(frame.queue_id)
        if queue is None or frame.first_offset >= queue.confirmed_end:
            return False
        if not request.from_ts <= frame.store_ts < request.to_ts:
            return False
        keys = unpack_sidecar(frame.sidecar, frame.count, frame.columns).key_hash
        return bool((keys == request.key_hash).any()) and frame.first_offset + frame.count > queue.start_offset


def _behind(missing: BelowLocal | Internal) -> int:
    """Where a stretch that was lost ends: a search passes over it. Raises `missing` when that is not known."""
    behind = missing.extra.get("next_offset")
    if not isinstance(behind, int):
        raise missing
    return behind


def _first_born(frames: list[StoredFrame], offset: int, ts: int) -> int | None:
    for frame in frames:
        if frame.columns & BORN_TS == 0:
            continue
        batch = pa.ipc.read_record_batch(frame.payload, message_schema(frame.columns))
        born = batch["born_ts"].cast(pa.int64()).fill_null(-1).to_numpy()
        rows = np.flatnonzero(born >= ts)
        rows = rows[rows >= offset - frame.first_offset]
        if len(rows):
            return frame.first_offset + int(rows[0])
    return None
