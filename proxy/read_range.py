"""Reading a queue by offsets, wherever they stand: the store for hot ones, the tier for cold ones.

`RangeReader` decides hot or cold at the moment of reading: it asks the store, and only when that answers
`below_local` it looks into the manifest. Sealing commits before local bytes are recycled, so an offset that has just
left the store is in the tier; should it be in neither (its retention ended in between), the store is asked again
and says so. Every step must go on exactly where the last one ended: a gap or a repeat is an error that names the
offsets, never a shorter answer. A range that is quarantined on the store's disk is served from the tier if that
has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.errors import BelowLocal, Internal, MillpondError
from millpond.core.limits import READ_MESSAGES, READ_STEPS, RECEIVE_BYTES, SCAN_BYTES
from millpond.core.schema import TIER_SCHEMA
from millpond.core.tier.reader import TierReader
from millpond.core.tier.rows import row_bytes
from millpond.core.turns import Pause, turn, turn_behind
from millpond.metadata.client import MetadataClient, QueueInfo, TopicInfo
from millpond.proxy.frames import FrameCache, runs
from millpond.proxy.manifest_views import ManifestViews, Piece
from millpond.proxy.parts import Stores
from millpond.proxy.tags import TagFilter
from millpond.store.client import QueueEnds, ReadRequest, ReadResult, StoredFrame

MISSES = 3
"""How often an offset may be in neither store nor tier before that is an error: it moves at most once."""


class RangeRead(NamedTuple):
    """`batches`: rows of TIER_SCHEMA, offsets ascending, filtered. Read on at `next_offset`."""

    batches: list[pa.RecordBatch]
    next_offset: int
    ends: QueueEnds


class Selection(NamedTuple):
    """Of the offsets asked for: the rows that could be had, in order, and the others with the reason. `damaged`: those
    of `missing` that stand in a damaged range of the log."""

    batches: list[pa.RecordBatch]
    missing: npt.NDArray[np.int64]
    error: MillpondError | None
    damaged: npt.NDArray[np.int64]


class _Step(NamedTuple):
    """What one source gave: whole batches, the first of which holds the offset asked for; `ends` when it knew."""

    batches: list[pa.RecordBatch]
    next_offset: int
    ends: QueueEnds | None


@dataclass(slots=True)
class _Taken:
    """What a read has so far, and how much more it may have."""

    at: int
    room_rows: int
    room_bytes: int
    tag: TagFilter | None
    batches: list[pa.RecordBatch] = field(default_factory=list)
    scanned_bytes: int = 0
    full: bool = False

    def add(self, batch: pa.RecordBatch) -> None:
        """Take what fits of `batch`, from `at` on; always one row."""
        first = batch.column("offset")[0].as_py()
        end = first + batch.num_rows
        rows = batch.slice(max(0, self.at - first))
        if self.tag is not None:
            self.scanned_bytes += rows.nbytes
            rows = rows.filter(self.tag.mask(rows.column("tag")))
        keep = min(rows.num_rows, self.room_rows)
        size = rows.nbytes  # looks at every column: asked for once
        if size > self.room_bytes:
            sums = np.cumsum(row_bytes(pa.Table.from_batches([rows])))
            keep = min(keep, max(int(np.searchsorted(sums, self.room_bytes, "right")), 0 if self.batches else 1))
        if keep:
            kept = rows if keep == rows.num_rows else rows.slice(0, keep)
            self.batches.append(kept)
            self.room_rows -= keep
            self.room_bytes -= size if kept is rows else kept.nbytes
        if keep < rows.num_rows:
            self.full = True
            self.at = rows.column("offset")[keep].as_py()
        else:
            self.at = end


class RangeReader:
    def __init__(self, stores: Stores, metadata: MetadataClient, tier: TierReader, frames: FrameCache) -> None:
        self.stores = stores
        self.tier = tier
        self.metadata = metadata
        self.frames = frames
        self._views = ManifestViews(metadata)

    async def read(
        self,
        topic: TopicInfo,
        queue: QueueInfo,
        offset: int,
        max_messages: int,
        max_bytes: int,
        wait_ms: int = 0,
        tag: TagFilter | None = None,
        pause: Pause = turn,
    ) -> RangeRead:
        """Messages from `offset` on: at least one when there is one, at most `max_messages` and about `max_bytes`. A
        `pause` behind each large batch.

        At the confirmed end it waits up to `wait_ms` for more. With a `tag` an empty answer may have made
        progress (`next_offset`): a scan ends after SCAN_BYTES. Raises OffsetExpired, OffsetOutOfRange,
        Internal (corrupt_range, tier_corrupt), Unavailable.
        """
        taken = _Taken(offset, max_messages, max_bytes, tag)
        ends: QueueEnds | None = None
        for _ in range(READ_STEPS):
            begin = taken.at
            wait = 0 if taken.batches or begin != offset else wait_ms
            rows = taken.room_rows if tag is None else READ_MESSAGES  # how many will match is not known before
            try:
                step = await self._step(topic, queue, begin, rows, taken.room_bytes, wait, tag)
            except Internal:
                if begin == offset:
                    raise
                break  # what stands before the damage is given first: the next read begins at it and says what it is
            ends = step.ends or ends
            for batch in step.batches:
                taken.add(batch)
                if taken.full:
                    break
                await turn_behind(batch.num_rows, pause)
            else:
                taken.at = max(taken.at, step.next_offset)
            # More than half full is full: what another step adds would end within a frame, which is read again for
            # the rest of it. Who reads on from frame to frame has each read once.
            filled = taken.room_bytes <= max_bytes // 2 if taken.batches else False
            spent = taken.full or not taken.room_rows or filled or taken.scanned_bytes >= SCAN_BYTES
            if spent or taken.at == begin or (step.ends and taken.at >= step.ends.end_offset):
                break
        if ends is None:
            ends = (await self.stores.of(queue).queues([queue.queue_id]))[0]
        return RangeRead(taken.batches, taken.at, ends)

    async def select(
        self,
        topic: TopicInfo,
        queue: QueueInfo,
        offsets: npt.NDArray[np.int64],
        frames: list[StoredFrame],
        local_offset: int,
        cold_bytes: int,
    ) -> Selection:
        """The rows at `offsets` (ascending, distinct): from `frames`, the cache, the store, the tier, in this order.

        Of rows below `local_offset`, whose sizes the store does not know, about `cold_bytes` and at least one; the
        others come back as missing, without an error.
        """
        group = queue.spans[-1].store_group
        chosen = _Chosen(offsets)
        broken: MillpondError | None = None
        for together in runs(frames):
            try:
                chosen.add(self.frames.open_run(group, together, queue.queue))
            except Internal as error:
                broken = error  # perhaps the tier has it: looked for below with all that is missing
        damage: MillpondError | None = None
        while (run := chosen.first_missing()) is not None:
            cold = run[0] < local_offset
            if cold and cold_bytes <= 0 and chosen.some:
                break
            try:
                batches = await self._wanted(topic, queue, run, cold_bytes if cold else RECEIVE_BYTES)
            except MillpondError as error:
                if (behind := _behind_damage(error, run[0])) is None:
                    return chosen.selection(damage or broken or error)
                damage = damage or error
                chosen.give_up(run[0], behind)
                continue
            taken = sum(map(chosen.add, batches))
            cold_bytes -= taken if cold else 0
            if not taken:
                return chosen.selection(damage or broken or _gap(queue, run[0], "what was read does not hold it"))
        return chosen.selection(damage)

    async def _wanted(
        self, topic: TopicInfo, queue: QueueInfo, run: tuple[int, int], max_bytes: int
    ) -> list[pa.RecordBatch]:
        """Batches from the one that holds the run's first offset on."""
        found = self.frames.find(queue.spans[-1].store_group, queue.queue_id, run[0])
        if found is not None:
            return [found]
        step = await self._step(topic, queue, run[0], run[1] - run[0], max(1, max_bytes), 0, None, keep=True)
        if not step.batches:
            raise _gap(queue, run[0], "the store has nothing there")
        return step.batches

    async def _step(
        self,
        topic: TopicInfo,
        queue: QueueInfo,
        offset: int,
        max_messages: int,
        max_bytes: int,
        wait_ms: int,
        tag: TagFilter | None,
        *,
        keep: bool = False,
    ) -> _Step:
        """Whole batches from the one that holds `offset` on, from whichever source has it."""
        hashes = None if tag is None else list(tag.hashes)
        request = ReadRequest(queue.queue_id, offset, max_messages, max_bytes, wait_ms, hashes)
        for _ in range(MISSES):
            try:
                result = await self.stores.of(queue).read(request)
            except BelowLocal:
                step = await self._cold(topic, queue, offset, max_messages, max_bytes)
            except Internal as error:
                if error.code != "corrupt_range":
                    raise
                step = await self._cold(topic, queue, offset, max_messages, max_bytes)
                if step is None:
                    raise
            else:
                _check_frames(queue, result, offset, dense=hashes is None)
                group = queue.spans[-1].store_group
                batches = []
                for together in runs(result.frames):
                    batches.append(self.frames.open_run(group, together, queue.queue, keep=keep))
                    await turn_behind(batches[-1].num_rows)
                return _Step(batches, result.next_offset, result.ends)
            if step is not None:
                return step
        raise Internal(
            "tier_corrupt",
            f"offset {offset} of queue {queue.queue} of topic {topic.name!r} is neither in the store nor in the tier",
            queue=queue.queue, first=offset, end=offset + 1,
        )  # fmt: skip

    async def _cold(
        self, topic: TopicInfo, queue: QueueInfo, offset: int, max_messages: int, max_bytes: int
    ) -> _Step | None:
        """From the tier; None when the manifest has no object that holds `offset`."""
        piece = await self._views.at(topic.topic_id, queue.queue_id, offset)
        if piece is None:
            return None
        try:
            batches = await self._rows(queue, piece, offset, max_messages, max_bytes)
        except Internal as error:
            if not error.extra.get("missing"):
                raise
            again = await self._views.at(topic.topic_id, queue.queue_id, offset, fresh=True)
            if again is None:
                return None
            if again.obj == piece.obj:
                raise
            batches = await self._rows(queue, again, offset, max_messages, max_bytes)
        return _Step(batches, offset + sum(batch.num_rows for batch in batches), None)

    async def _rows(
        self, queue: QueueInfo, piece: Piece, offset: int, max_messages: int, max_bytes: int
    ) -> list[pa.RecordBatch]:
        rows = await self.tier.rows(piece.obj, queue.queue, offset, piece.end, max_messages, max_bytes)
        offsets = rows.column("offset").to_numpy()
        if not len(offsets) or not np.array_equal(offsets, np.arange(offset, offset + len(offsets))):
            shown = f"{offsets[0]} to {offsets[-1]}" if len(offsets) else "nothing"
            raise Internal(
                "tier_corrupt",
                f"object {piece.obj.path}: offsets from {offset} of queue {queue.queue} expected, it gave {shown}",
                queue=queue.queue, first=offset, end=piece.end, path=piece.obj.path,
            )  # fmt: skip
        return [one_batch(batch) for batch in rows.to_batches()]  # one a row group: putting them together copies all


class _Chosen:
    """The wanted offsets of one queue and the rows found so far."""

    def __init__(self, offsets: npt.NDArray[np.int64]) -> None:
        self._offsets = offsets
        self._have = np.zeros(len(offsets), np.bool_)
        self._given_up = np.zeros(len(offsets), np.bool_)
        self._pieces: list[tuple[int, pa.RecordBatch]] = []

    @property
    def some(self) -> bool:
        return bool(self._pieces)

    def add(self, batch: pa.RecordBatch) -> int:
        """Take the wanted rows of `batch`, a run of consecutive offsets; answers their bytes."""
        first = batch.column("offset")[0].as_py()
        low, high = np.searchsorted(self._offsets, (first, first + batch.num_rows))
        wanted = low + np.flatnonzero(~self._have[low:high])
        if not len(wanted):
            return 0
        rows = self._offsets[wanted] - first
        dense = rows[-1] - rows[0] + 1 == len(rows)
        piece = batch.slice(int(rows[0]), len(rows)) if dense else batch.take(pa.array(rows))
        self._pieces.append((int(wanted[0]), piece))
        self._have[wanted] = True
        return int(piece.nbytes)

    def first_missing(self) -> tuple[int, int] | None:
        """First offset and end of the first run of consecutive offsets that are wanted and not there."""
        missing = self._offsets[~self._have & ~self._given_up]
        if not len(missing):
            return None
        gaps = np.flatnonzero(np.diff(missing) != 1)
        last = missing[gaps[0]] if len(gaps) else missing[-1]
        return int(missing[0]), int(last) + 1

    def give_up(self, first: int, end: int) -> None:
        """Nobody can read what is still missing of [first, end)."""
        self._given_up |= (self._offsets >= first) & (self._offsets < end) & ~self._have

    def selection(self, error: MillpondError | None) -> Selection:
        batches = [piece for _, piece in sorted(self._pieces, key=lambda item: item[0])]
        return Selection(batches, self._offsets[~self._have], error, self._offsets[self._given_up])


def _behind_damage(error: MillpondError, offset: int) -> int | None:
    """Where reading may go on when `offset` cannot be read because the log is damaged there; None: nowhere known."""
    behind = error.extra.get("next_offset") if error.code == "corrupt_range" else None
    return behind if isinstance(behind, int) and behind > offset else None


def one_batch(rows: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
    """Rows of the tier as one batch of exactly TIER_SCHEMA (field metadata may have been lost on the way)."""
    if isinstance(rows, pa.Table):
        arrays = [column.combine_chunks() for column in rows.select(TIER_SCHEMA.names).columns]
        return pa.RecordBatch.from_arrays(arrays, schema=TIER_SCHEMA)
    return pa.RecordBatch.from_arrays(rows.select(TIER_SCHEMA.names).columns, schema=TIER_SCHEMA)


def _check_frames(queue: QueueInfo, result: ReadResult, offset: int, *, dense: bool) -> None:
    """Frames must go on from `offset` without a gap or repeat; with a filter, frames may be left out. The store
    may have counted a part of its last frame only: then it would go on inside of it."""
    at = least = offset
    for number, frame in enumerate(result.frames):
        holds = number == 0 and frame.first_offset <= at < frame.first_offset + frame.count
        if not (holds or frame.first_offset == at or (not dense and frame.first_offset > at)):
            raise _gap(queue, at, f"the store went on at {frame.first_offset}")
        least, at = max(at, frame.first_offset + 1), frame.first_offset + frame.count
    if result.next_offset < least or (dense and result.next_offset > at):
        raise _gap(queue, at, f"the store would go on at {result.next_offset}")


def _gap(queue: QueueInfo, offset: int, why: str) -> Internal:
    detail = f"queue {queue.queue}: offset {offset} must come next, but {why}"
    return Internal("internal", detail, queue=queue.queue, offset=offset)
