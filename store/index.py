"""The consume-queue index of one segment (rebuildable, from the sidecars of the segment's frames).

A closed segment's index stands beside it, `log/<first position>.idx`:

    offset size  field
         0    4  magic "MPX1"
         4    4  checksum of the head: bytes 8..64
         8    8  segment's first position
        16    4  entries            E
        20    4  directory rows     D
        24    4  times              T
        28    4  checksum of the entries
        32    4  checksum of directory and times
        36    4  zero
        40    8  first store timestamp, ms (-1: no messages)
        48    8  last store timestamp, ms
        56    8  zero
        64  20E  entries, by (queue id, offset):  position u64, length u32, tag_hash u32, key_hash u32
         .  40D  directory, by (queue id, first): queue id u64, first offset u64, start u32, count u32, bytes u64,
                                                  flags u64 (1: the run holds keys)
         .  16T  times, ascending:                store timestamp i64, position u64

A run is consecutive offsets of one queue: its entries are `entries[start : start + count]`, so an offset is one
bisect and one subtraction away. Ten thousand queues cost rows, not files, and the index dies with its segment.
All of it is checksummed, though it could be rebuilt: a flipped bit in a tag hash would hide a message from a
filter without a word. The open segment's index is `OpenIndex`, in memory, saved with each checkpoint.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.gathered import Buffer
from millpond.core.limits import KIB, MIB
from millpond.core.ranges import split
from millpond.store.fold.snapshot import Snapshot, Tables, table_of

Array = npt.NDArray[Any]

ENTRY = np.dtype([("position", "<u8"), ("length", "<u4"), ("tag_hash", "<u4"), ("key_hash", "<u4")])
RUN = np.dtype(
    [("queue", "<u8"), ("first", "<u8"), ("start", "<u4"), ("count", "<u4"), ("bytes", "<u8"), ("flags", "<u8")]
)
TIME = np.dtype([("ts", "<i8"), ("position", "<u8")])
assert (ENTRY.itemsize, RUN.itemsize, TIME.itemsize) == (20, 40, 16)

MAGIC = b"MPX1"
HEAD_BYTES = 64
HAS_KEYS = 1
TIME_STEP_BYTES = 256 * KIB  # of log between two remembered times: at most so much is looked through for a millisecond
_HEAD = struct.Struct("<QIIIII4xqq8x")
_LARGE_BYTES = MIB
_RESERVED_BYTES = 64 * MIB


class IndexHead(NamedTuple):
    base: int
    entries: int
    runs: int
    times: int
    entries_crc: int
    tables_crc: int
    first_ts: int
    last_ts: int


class ClosedIndex(NamedTuple):
    """A closed segment's index as loaded at start: everything but the entries."""

    head: IndexHead
    runs: npt.NDArray[np.void]
    times: npt.NDArray[np.void]


def index_name(base: int) -> str:
    return f"log/{base:020d}.idx"


def encode(
    base: int,
    entries: npt.NDArray[np.void],
    runs: npt.NDArray[np.void],
    times: npt.NDArray[np.void],
    ts_range: tuple[int, int],
) -> list[Buffer]:
    body, tables = pa.py_buffer(entries), runs.tobytes() + times.tobytes()
    head = _HEAD.pack(
        base, len(entries), len(runs), len(times), google_crc32c.value(body), google_crc32c.value(tables), *ts_range
    )
    return [MAGIC + google_crc32c.value(head).to_bytes(4, "little") + head, body, tables]


def decode_head(data: bytes) -> IndexHead:
    """Raises ValueError when these are not the first 64 bytes of an index."""
    if len(data) < HEAD_BYTES or data[:4] != MAGIC:
        raise ValueError("not an index")
    if google_crc32c.value(data[8:HEAD_BYTES]) != int.from_bytes(data[4:8], "little"):
        raise ValueError("index head damaged")
    base, entries, runs, times, entries_crc, tables_crc, first_ts, last_ts = _HEAD.unpack(data[8:HEAD_BYTES])
    return IndexHead(base, entries, runs, times, entries_crc, tables_crc, first_ts, last_ts)


def decode_tables(head: IndexHead, data: bytes) -> ClosedIndex:
    """`data`: what follows the entries. Raises ValueError on damage."""
    if len(data) != RUN.itemsize * head.runs + TIME.itemsize * head.times:
        raise ValueError("index cut short")
    if google_crc32c.value(data) != head.tables_crc:
        raise ValueError("index directory damaged")
    runs = np.frombuffer(data, RUN, head.runs)
    times = np.frombuffer(data, TIME, head.times, RUN.itemsize * head.runs)
    return ClosedIndex(head, runs, times)


def entries_position(start: int) -> int:
    return HEAD_BYTES + ENTRY.itemsize * start


def _grown(array: Array, used: int, size: int) -> Array:
    """`array` with room for `size` rows, and twice what it had; the first `used` are kept. From _LARGE_BYTES on it has
    room for about all that a segment may hold: rows that nobody has written to take no memory, copying takes time."""
    row_bytes = array.nbytes // len(array)
    size = max(size, 2 * len(array))
    if size * row_bytes > _LARGE_BYTES:
        size = max(size, _RESERVED_BYTES // row_bytes)
    grown = np.empty((size, *array.shape[1:]), array.dtype)
    grown[:used] = array[:used]
    return grown


class _Column:
    """A growable array of one type."""

    __slots__ = ("_array", "size")

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._array: Array = np.empty(1024, dtype)
        self.size = 0

    def extend(self, values: Array) -> None:
        end = self.size + len(values)
        if end > len(self._array):
            self._array = _grown(self._array, self.size, end)
        self._array[self.size : end] = values
        self.size = end

    @property
    def values(self) -> Array:
        return self._array[: self.size]


_FRAME_COLUMNS = ("queue", "first", "count", "position", "length", "bytes", "row", "keyed")
_ENTRIES_AT_ONCE = 1 << 18  # 2.4 million at once kept the interpreter from all others for 35 to 49 ms, these for 6
_ROWS_AT_ONCE = 4096  # 256 KiB stay in a core's cache: 4 ms for 262,000 rows, where column after column takes 29
_FRAME_NUMBERS = {name: number for number, name in enumerate(_FRAME_COLUMNS)}
_FRAME = struct.Struct(f"<{len(_FRAME_COLUMNS)}q")


class _Frames:
    """A growable table of `_FRAME_COLUMNS`. A frame is one row and one call, since every append adds one."""

    __slots__ = ("_bytes", "_table", "size")

    def __init__(self) -> None:
        self._hold(np.empty((1024, len(_FRAME_COLUMNS)), np.int64))
        self.size = 0

    def append(self, *values: int) -> None:
        self._reserve(self.size + 1)
        _FRAME.pack_into(self._bytes, _FRAME.size * self.size, *values)
        self.size += 1

    def extend(self, columns: dict[str, Array]) -> None:
        end = self.size + len(columns["queue"])
        self._reserve(end)
        for name, values in columns.items():
            self._table[self.size : end, _FRAME_NUMBERS[name]] = values
        self.size = end

    def __getitem__(self, name: str) -> Array:
        """One column, as a view."""
        return self._table[: self.size, _FRAME_NUMBERS[name]]

    @property
    def rows(self) -> Array:
        """All rows so far, as a view: rows do not change."""
        return self._table[: self.size]

    def _reserve(self, size: int) -> None:
        if size > len(self._table):
            self._hold(_grown(self._table, self.size, size))

    def _hold(self, table: Array) -> None:
        self._table = table
        self._bytes = table.data.cast("B")


def _columns_of(rows: Array) -> dict[str, Array]:
    """A copy of all columns, each in one piece."""
    columns = np.empty((len(_FRAME_COLUMNS), len(rows)), np.int64)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[start : start + _ROWS_AT_ONCE]
        columns[:, start : start + len(some)] = some.T
    return dict(zip(_FRAME_COLUMNS, columns, strict=True))


class OpenIndex:
    """Index of the segment that is being written: one row for each frame, hashes for each message.

    Frames of one queue come in order of offset, except `copied` ones, which may be older than all others.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self._frames = _Frames()
        self._tags = _Column(np.uint32)
        self._keys = _Column(np.uint32)
        self._times: list[tuple[int, int]] = []
        self._by_queue: dict[int, tuple[list[int], list[int]]] = {}  # queue -> first offsets, frame numbers; sorted
        self.first_ts = -1
        self.last_ts = -1

    def __len__(self) -> int:
        return self._frames.size

    def add(
        self,
        queue_id: int,
        first: int,
        count: int,
        position: int,
        length: int,
        payload_size: int,
        tags: npt.NDArray[np.uint32],
        keys: npt.NDArray[np.uint32],
    ) -> None:
        number = self._frames.size
        keyed = int(np.count_nonzero(keys) > 0)  # a third of what `any` takes
        self._frames.append(queue_id, first, count, position, length, payload_size, self._tags.size, keyed)
        self._tags.extend(tags)
        self._keys.extend(keys)
        known = self._by_queue.get(queue_id)
        if known is None:
            known = self._by_queue[queue_id] = [], []
        firsts, numbers = known
        if not firsts or first > firsts[-1]:
            firsts.append(first)
            numbers.append(number)
        else:
            at = bisect_right(firsts, first)
            firsts.insert(at, first)
            numbers.insert(at, number)

    def note_time(self, ts: int, position: int) -> None:
        """A frame (not a copied one) was stamped `ts` at `position`."""
        if self.first_ts < 0:
            self.first_ts = ts
        self.last_ts = ts
        if not self._times or position - self._times[-1][1] >= TIME_STEP_BYTES:
            self._times.append((ts, position))

    @property
    def times(self) -> npt.NDArray[np.void]:
        return np.array(self._times, TIME) if self._times else np.empty(0, TIME)

    def entries(self, queue_id: int, offset: int, most: int) -> npt.NDArray[np.void]:
        """Entries of consecutive offsets from `offset` on, at most `most`; none when it is not here."""
        known = self._by_queue.get(queue_id)
        if known is None:
            return np.empty(0, ENTRY)
        firsts, numbers = known
        at = bisect_right(firsts, offset) - 1
        if at < 0:
            return np.empty(0, ENTRY)
        frames, skip = self._frames, offset - firsts[at]
        count = int(frames["count"][numbers[at]])
        if skip >= count:
            return np.empty(0, ENTRY)
        if skip + most <= count:
            return self._frame_entries(numbers[at], skip, most)
        end = bisect_left(firsts, offset + most)
        found = self._consecutive(firsts[at:end], numbers[at:end])
        starts, counts = frames["row"][found], frames["count"][found]
        starts[0] += skip
        counts[0] -= skip
        counts[-1] -= max(0, int(counts.sum()) - most)
        rows = _spread(starts, counts)
        out = np.empty(len(rows), ENTRY)
        for name in ("position", "length"):
            out[name] = np.repeat(frames[name][found], counts)
        out["tag_hash"] = self._tags.values[rows]
        out["key_hash"] = self._keys.values[rows]
        return out

    def _frame_entries(self, number: int, skip: int, take: int) -> npt.NDArray[np.void]:
        """Of one frame: a quarter of what it takes to join several."""
        frames = self._frames
        row = int(frames["row"][number]) + skip
        out = np.empty(take, ENTRY)
        out["position"] = frames["position"][number]
        out["length"] = frames["length"][number]
        out["tag_hash"] = self._tags.values[row : row + take]
        out["key_hash"] = self._keys.values[row : row + take]
        return out

    def _consecutive(self, firsts: list[int], numbers: list[int]) -> npt.NDArray[np.int64]:
        """The first of these frames, as far as each begins where the one before ends."""
        first, found = np.array(firsts, np.int64), np.array(numbers, np.int64)
        gaps = np.flatnonzero(first[1:] != first[:-1] + self._frames["count"][found[:-1]])
        return found[: gaps[0] + 1] if len(gaps) else found

    def spots(self, queue_id: int, offset: int, most: int) -> list[tuple[int, int, int, int]]:
        """(position, length, first, end) of the frames of [offset, offset + most) from `offset` on, without a look at
        each message; none when it is not here."""
        known = self._by_queue.get(queue_id)
        if known is None:
            return []
        firsts, numbers = known
        at = bisect_right(firsts, offset) - 1
        found: list[tuple[int, int, int, int]] = []
        frames = self._frames
        next_offset, last = offset, offset + most
        while 0 <= at < len(firsts) and next_offset < last:
            number = numbers[at]
            frame_end = firsts[at] + int(frames["count"][number])
            if not firsts[at] <= next_offset < frame_end:
                break
            end = min(frame_end, last)
            spot = int(frames["position"][number]), int(frames["length"][number]), next_offset, end
            found.append(spot)
            next_offset = end
            at += 1
        return found

    def column(self, name: str) -> npt.NDArray[np.int64]:
        """One of `queue`, `first`, `count`, `bytes`: a value for each frame."""
        values: npt.NDArray[np.int64] = self._frames[name]
        return values

    def first_from_position(self, queue_id: int, position: int) -> int | None:
        """The least offset of a queue whose frame stands at `position` or later; None when there is none."""
        firsts, numbers = self._by_queue.get(queue_id, ([], []))
        found = np.flatnonzero(self._frames["position"][np.array(numbers, np.int64)] >= position)
        return firsts[int(found[0])] if len(found) else None

    def frames_from(self, queue_id: int, offset: int) -> tuple[Array, Array, Array]:
        """First offsets, messages and payload bytes of a queue's frames, from the one on that may hold `offset`."""
        firsts, numbers = self._by_queue.get(queue_id, ([], []))
        at = max(0, bisect_right(firsts, offset) - 1)
        found = np.array(numbers[at:], np.int64)
        return np.array(firsts[at:], np.int64), self._frames["count"][found], self._frames["bytes"][found]

    def key_positions(self, queue_ids: set[int], key_hash: int) -> list[tuple[int, int]]:
        """(position, length) of frames of these queues with a row of this key hash, by position."""
        rows = np.flatnonzero(self._keys.values == key_hash)
        if not len(rows):
            return []
        frames = self._frames
        numbers = np.unique(np.searchsorted(frames["row"], rows, "right") - 1)
        return [
            (int(frames["position"][number]), int(frames["length"][number]))
            for number in numbers
            if int(frames["queue"][number]) in queue_ids
        ]

    def close(self) -> list[Buffer]:
        """The `.idx` file of this segment. Does not read or change what readers use: may run in a thread."""
        frames = _columns_of(self._frames.rows)
        tags, keys = self._tags.values, self._keys.values
        order = np.lexsort((frames["position"], frames["first"], frames["queue"]))
        order = _without_repeats(frames, order)
        counts = frames["count"][order]
        entries = np.empty(int(counts.sum()), ENTRY)
        end = 0
        for first, after in split(counts, _ENTRIES_AT_ONCE):
            numbers, repeats = order[first:after], counts[first:after]
            rows = _spread(frames["row"][numbers], repeats)
            part = entries[end : end + len(rows)]
            part["position"] = np.repeat(frames["position"][numbers], repeats)
            part["length"] = np.repeat(frames["length"][numbers], repeats)
            part["tag_hash"] = tags[rows]
            part["key_hash"] = keys[rows]
            end += len(rows)
        runs = _runs(frames, order, counts)
        return encode(self.base, entries, runs, self.times, (self.first_ts, self.last_ts))

    def snapshot(self) -> Snapshot:
        """All columns: they only grow."""
        rows, tags, keys, times = self._frames.rows, self._tags.values, self._keys.values, self._times.copy()
        bounds = {"first_ts": [self.first_ts], "last_ts": [self.last_ts]}
        return lambda: {
            "index.frames": pa.table(_columns_of(rows)),
            "index.hashes": pa.table({"tag": tags, "key": keys}),
            "index.times": table_of(times, ("ts", "position")),
            "index.bounds": pa.table(bounds),
        }

    @staticmethod
    def load(base: int, tables: Tables) -> OpenIndex:
        index = OpenIndex(base)
        frames = tables["index.frames"]
        columns = {name: frames[name].to_numpy() for name in _FRAME_COLUMNS}
        index._frames.extend(columns)
        index._tags.extend(tables["index.hashes"]["tag"].to_numpy())
        index._keys.extend(tables["index.hashes"]["key"].to_numpy())
        times = tables["index.times"]
        index._times = list(zip(times["ts"].to_pylist(), times["position"].to_pylist(), strict=True))
        order = np.lexsort((columns["first"], columns["queue"]))
        queues = columns["queue"][order]
        bounds = np.flatnonzero(np.diff(queues, prepend=-1, append=-1))
        for start, end in pairwise(bounds.tolist()):
            numbers = order[start:end]
            index._by_queue[int(queues[start])] = (columns["first"][numbers].tolist(), numbers.tolist())
        bounds_row = tables["index.bounds"].to_pylist()[0]
        index.first_ts, index.last_ts = bounds_row["first_ts"], bounds_row["last_ts"]
        return index


def _without_repeats(frames: dict[str, Array], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Drop a frame whose first offset of the same queue stands there already (copied twice)."""
    queue, first = frames["queue"][order], frames["first"][order]
    keep = np.ones(len(order), bool)
    keep[1:] = (queue[1:] != queue[:-1]) | (first[1:] != first[:-1])
    return order[keep]


def _spread(starts: Array, counts: Array) -> npt.NDArray[np.int64]:
    """[s0, s0+1, .. s0+c0-1, s1, ..]: all rows of consecutive slices."""
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(total)


def _runs(frames: dict[str, Array], order: npt.NDArray[np.int64], counts: Array) -> npt.NDArray[np.void]:
    if not len(order):
        return np.empty(0, RUN)
    queue, first = frames["queue"][order], frames["first"][order]
    start = np.cumsum(counts) - counts
    opens = np.ones(len(order), bool)
    opens[1:] = (queue[1:] != queue[:-1]) | (first[1:] != first[:-1] + counts[:-1])
    heads = np.flatnonzero(opens)
    runs = np.zeros(len(heads), RUN)
    runs["queue"] = queue[heads]
    runs["first"] = first[heads]
    runs["start"] = start[heads]
    runs["count"] = np.add.reduceat(counts, heads)
    runs["bytes"] = np.add.reduceat(frames["bytes"][order], heads)
    runs["flags"] = np.maximum.reduceat(frames["keyed"][order], heads) * HAS_KEYS
    return runs
