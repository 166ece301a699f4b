"""Frames as a reader wants them: a `StoredFrame` decoded into the columns of `TIER_SCHEMA`, and a bounded cache.

A frame's payload is one Arrow record batch without its schema, which the column bitmap names. Opening an
uncompressed one costs microseconds and copies nothing; a compressed one is inflated once and kept. What stands around
a batch costs fifty times as much as opening a frame of one message, so small frames become one batch (`runs`).

Confirmed frames never change, so an entry is never wrong, only unwanted. A log position names one frame of a
store group, but callers look for offsets: so entries stand by (group, queue id, first offset), and remember
the position they came from (a frame that was copied forward has two: equal in all that is shown).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.errors import Internal
from millpond.core.frame import CODEC_NONE
from millpond.core.limits import KIB, OFFSET_MOST, TURN_ROWS
from millpond.core.schema import KNOWN_COLUMNS, PAYLOAD_COLUMNS, TIER_SCHEMA, TIMESTAMP, message_schema
from millpond.core.texts import data_of
from millpond.store.client import StoredFrame

FEW_ROWS = 64  # rows of a frame whose missing columns are kept: what many small frames have in common
SMALL_BYTES = 64 * KIB  # a frame up to here is copied: that costs less than a batch of its own
RUN_BYTES = 512 * KIB

Rows = TypeVar("Rows", pa.RecordBatch, pa.Array)


def runs(frames: Sequence[StoredFrame]) -> Iterator[Sequence[StoredFrame]]:
    """All of `frames`, cut into those that make one batch (`FrameCache.open_run`): small ones of the same columns that
    follow each other, of TURN_ROWS and RUN_BYTES together; each of the others."""
    start = rows = size = 0
    for at, frame in enumerate(frames):
        before = frames[at - 1]
        goes_on = frame.columns == before.columns and frame.first_offset == before.first_offset + before.count
        small = frame.codec == CODEC_NONE and len(frame.payload) <= SMALL_BYTES
        if at > start and not (small and size and goes_on and rows < TURN_ROWS and size < RUN_BYTES):
            yield frames[start:at]
            start, rows, size = at, 0, 0
        rows += frame.count
        size += len(frame.payload) if small else 0
    if start < len(frames):
        yield frames[start:]


def decode(frame: StoredFrame, queue: int, offsets: range | None = None) -> pa.RecordBatch:
    """Rows of `frame` as a batch of TIER_SCHEMA, all or those at `offsets`; `queue` is its queue's number in the topic.

    Raises Internal(corrupt_range) when the frame does not open.
    """
    if offsets is None:
        offsets = within([frame])
    return tier_rows(_columns(rows_at(opened(frame), frame, offsets)), queue, offsets, frame.store_ts)


def opened(frame: StoredFrame) -> pa.RecordBatch:
    """The rows of `frame` as they stand in it, of `message_schema`.

    Raises Internal(corrupt_range) when it does not open (its checksums held when it was read, so this is a frame of a
    newer version, or was damaged on the way).
    """
    if frame.columns & ~KNOWN_COLUMNS:
        raise _unreadable(frame, f"it has columns of a newer version ({frame.columns:#x})")
    try:
        inner = pa.ipc.read_record_batch(pa.py_buffer(frame.payload), message_schema(frame.columns & PAYLOAD_COLUMNS))
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(frame, str(error)) from error
    if inner.num_rows != frame.count:
        raise _unreadable(frame, f"it has {inner.num_rows} rows, its header says {frame.count}")
    return inner


def within(run: Sequence[StoredFrame], first: int = 0, end: int = OFFSET_MOST) -> range:
    """Offsets of frames that follow each other, those in [first, end)."""
    return range(max(first, run[0].first_offset), min(end, run[-1].first_offset + run[-1].count))


def _merged(run: Sequence[StoredFrame], queue: int, offsets: range) -> pa.RecordBatch:
    """`decode` of several frames."""
    skipped, count = offsets.start - run[0].first_offset, len(offsets)
    inner = pa.concat_batches(list(map(opened, run))).slice(skipped, count)
    times = np.repeat(np.array([frame.store_ts for frame in run]), [frame.count for frame in run])
    return tier_rows(_columns(inner), queue, offsets, times[skipped : skipped + count])


def _columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    return dict(zip(batch.schema.names, batch.columns, strict=True))


class Bodies(NamedTuple):
    """Rows of a frame that holds bodies alone. They stand for a batch until it is known what is to become of them:
    columns around them, and those taken apart again, cost a receive as much as all that JSON needs of the rows.

    `queue`: its number in the topic.
    """

    column: pa.BinaryArray
    queue: int
    offsets: range
    store_ts: int

    @property
    def num_rows(self) -> int:
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        """Of the bodies."""
        return int(data_of(self.column).size)

    def batch(self) -> pa.RecordBatch:
        """As TIER_SCHEMA."""
        return tier_rows({"body": self.column}, self.queue, self.offsets, self.store_ts)


def has_bodies_alone(frame: StoredFrame) -> bool:
    """Whether its rows are to be had as `Bodies`: not those of a compressed frame, which is inflated once and kept."""
    return not frame.columns & (PAYLOAD_COLUMNS | ~KNOWN_COLUMNS) and frame.codec == CODEC_NONE


def bodies(frame: StoredFrame, queue: int, first: int, end: int) -> Bodies:
    """Those of [first, end) of a frame that `has_bodies_alone`. Raises Internal(corrupt_range)."""
    offsets = within([frame], first, end)
    return Bodies(rows_at(opened(frame).column(0), frame, offsets), queue, offsets, frame.store_ts)


def tier_rows(
    inner: dict[str, pa.Array], queue: int, offsets: range, store_ts: int | npt.NDArray[np.int64]
) -> pa.RecordBatch:
    """Columns of a frame's rows, or of those of several, in TIER_SCHEMA; `store_ts`: of all of them, or i64[rows]."""
    count = len(offsets)
    times = store_ts.to_bytes(8, "little", signed=True) * count if isinstance(store_ts, int) else store_ts
    columns = inner | {
        "queue": _filled(pa.int32(), count, queue.to_bytes(4, "little", signed=True) * count),
        "offset": _filled(pa.int64(), count, np.arange(offsets.start, offsets.stop, dtype=np.int64)),
        "store_ts": _filled(TIMESTAMP, count, times),
    }
    nulls = _nulls(count) if count <= FEW_ROWS else [null.slice(0, count) for null in _nulls(_rounded(count))]
    return pa.RecordBatch.from_arrays(
        [columns.get(name, null) for name, null in zip(TIER_SCHEMA.names, nulls, strict=True)], schema=TIER_SCHEMA
    )


def _filled(type_: pa.DataType, count: int, values: bytes | npt.NDArray[np.int64]) -> pa.Array:
    return pa.Array.from_buffers(type_, count, [None, pa.py_buffer(values)])


def _rounded(count: int) -> int:
    """Up to a power of two: the columns of that length, of which a frame's are the beginning, serve many frames."""
    return 1 << (count - 1).bit_length()


@lru_cache(FEW_ROWS + 16)
def _nulls(count: int) -> list[pa.Array]:
    """What a column that a frame does not have is for its rows."""
    return [pa.nulls(count, type_) for type_ in TIER_SCHEMA.types]


def _unreadable(frame: StoredFrame, why: str) -> Internal:
    end = frame.first_offset + frame.count
    detail = f"offsets {frame.first_offset} to {end - 1} of queue {frame.queue_id} cannot be read: {why}"
    return Internal("corrupt_range", detail, queue_id=frame.queue_id, first=frame.first_offset, end=end)


class _Entry(NamedTuple):
    batch: pa.RecordBatch
    bytes: int
    position: int


class FrameCache:
    """Decoded frames by (store group, queue id, first offset), least recently used out first, bounded in bytes."""

    def __init__(self, cache_bytes: int) -> None:
        self._limit = cache_bytes
        self._entries: OrderedDict[tuple[str, int, int], _Entry] = OrderedDict()
        self._starts: dict[tuple[str, int], list[int]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def open(
        self, group: str, frame: StoredFrame, queue: int, offsets: range | None = None, *, keep: bool = False
    ) -> pa.RecordBatch:
        """`frame` decoded, whole or at `offsets`. All of it is remembered when it was compressed, or when `keep` says
        that it will be wanted again."""
        found = self._entries.get((group, frame.queue_id, frame.first_offset))
        if found is not None and found.position == frame.position:
            self._entries.move_to_end((group, frame.queue_id, frame.first_offset))
            return rows_at(found.batch, frame, offsets)
        if frame.codec == CODEC_NONE and not keep:
            return decode(frame, queue, offsets)
        if frame.codec == CODEC_NONE:
            # A copy of its own: the buffer is a slice of a whole answer, which the entry would keep alive.
            frame = _copied(frame)
        batch = decode(frame, queue)
        self._put((group, frame.queue_id, frame.first_offset), batch, frame.position)
        return rows_at(batch, frame, offsets)

    def open_run(
        self,
        group: str,
        run: Sequence[StoredFrame],
        queue: int,
        offsets: range | None = None,
        *,
        keep: bool = False,
    ) -> pa.RecordBatch:
        """`open` of one of `runs`. Of several frames, which are small, nothing is remembered."""
        if len(run) == 1:
            return self.open(group, run[0], queue, offsets, keep=keep)
        return _merged(run, queue, within(run) if offsets is None else offsets)

    def find(self, group: str, queue_id: int, offset: int) -> pa.RecordBatch | None:
        """The remembered frame that holds `offset`."""
        starts = self._starts.get((group, queue_id))
        if not starts:
            return None
        at = bisect_right(starts, offset) - 1
        if at < 0:
            return None
        key = (group, queue_id, starts[at])
        batch = self._entries[key].batch
        if offset >= starts[at] + batch.num_rows:
            return None
        self._entries.move_to_end(key)
        return batch

    def _put(self, key: tuple[str, int, int], batch: pa.RecordBatch, position: int) -> None:
        if key in self._entries:
            self._drop(key)
        size = batch.get_total_buffer_size()
        if size > self._limit:
            return
        self._entries[key] = _Entry(batch, size, position)
        insort(self._starts.setdefault(key[:2], []), key[2])
        self.bytes += size
        while self.bytes > self._limit:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[str, int, int]) -> None:
        self.bytes -= self._entries.pop(key).bytes
        starts = self._starts[key[:2]]
        starts.remove(key[2])
        if not starts:
            del self._starts[key[:2]]


def rows_at(rows: Rows, frame: StoredFrame, offsets: range | None) -> Rows:
    """Of all rows of `frame` those at `offsets`."""
    return rows if offsets is None else rows.slice(offsets.start - frame.first_offset, len(offsets))


def _copied(frame: StoredFrame) -> StoredFrame:
    return StoredFrame(
        queue_id=frame.queue_id, position=frame.position, first_offset=frame.first_offset, count=frame.count,
        columns=frame.columns, codec=frame.codec, store_ts=frame.store_ts, payload_size=frame.payload_size,
        sidecar=frame.sidecar, payload=pa.py_buffer(frame.payload.to_pybytes()),
    )  # fmt: skip
