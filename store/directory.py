"""Where every message of this disk stands: closed segments' indexes by one sorted table, and the open one.

The runs of all `.idx` files form one table in memory, sorted by (queue, first offset): an offset is found by
two bisects, and start-up reads 40 bytes for each (queue, segment), whatever the number of messages. The entries
themselves stay on the disk and are read when needed; a segment's entries are checked against their checksum
the first time they are used.

A missing or damaged `.idx` is rebuilt from its segment's frames (`rebuild`, given by the engine).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from millpond.store import index as idx
from millpond.store.disk import Disk, File
from millpond.store.index import ENTRY, HAS_KEYS, RUN, ClosedIndex, OpenIndex

Ints = npt.NDArray[np.int64]


class _Closed(NamedTuple):
    tables: ClosedIndex
    file: File


class FrameSpot(NamedTuple):
    """A frame's place, and the offsets of it that were asked for: [first, end)."""

    position: int
    length: int
    first: int
    end: int


class Directory:
    """All indexes of a store. Lookups run on the event loop; `close_segment` and `load` block on files."""

    def __init__(self, disk: Disk, segment_bytes: int, rebuild: Callable[[int], OpenIndex]) -> None:
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._rebuild = rebuild
        self._closed: dict[int, _Closed] = {}  # segment base -> index
        self._checked: set[int] = set()
        self._closing: dict[int, OpenIndex] = {}  # being written; still answers
        self._table = np.empty(0, RUN)
        self._bases = np.empty(0, np.int64)
        self.open = OpenIndex(0)

    # -- life of a segment's index -------------------------------------------------------------------------

    def load(self, bases: list[int]) -> None:
        """Open the indexes of these closed segments, rebuilding those that are missing or damaged."""
        for base in bases:
            self._closed[base] = self._load_one(base)
        self._sort()

    def _load_one(self, base: int) -> _Closed:
        name = idx.index_name(base)
        try:
            file = self._disk.open(name)
        except FileNotFoundError:
            return self._rebuilt(base)
        try:
            head = idx.decode_head(file.read(0, idx.HEAD_BYTES))
            if head.base != base:
                raise ValueError("index of another segment")
            tables = idx.entries_position(head.entries)
            return _Closed(idx.decode_tables(head, file.read(tables, file.size() - tables)), file)
        except ValueError:
            file.close()
            return self._rebuilt(base)

    def _rebuilt(self, base: int) -> _Closed:
        self._disk.write_whole(idx.index_name(base), self._rebuild(base).close())
        file = self._disk.open(idx.index_name(base))
        head = idx.decode_head(file.read(0, idx.HEAD_BYTES))
        tables = idx.entries_position(head.entries)
        return _Closed(idx.decode_tables(head, file.read(tables, file.size() - tables)), file)

    def roll(self, base: int) -> OpenIndex:
        """The open segment is full: a new index for the one at `base`. Returns the old one, which still answers."""
        old = self.open
        self._closing[old.base] = old
        self.open = OpenIndex(base)
        return old

    def closing(self) -> list[OpenIndex]:
        """Indexes of full segments that are not written yet, oldest first."""
        return list(self._closing.values())

    def write_closed(self, old: OpenIndex) -> None:
        """Write the `.idx` of a rolled segment (blocking; in a thread)."""
        self._disk.write_whole(idx.index_name(old.base), old.close())

    def adopt_closed(self, old: OpenIndex) -> None:
        """`write_closed` is done: answer from the file from now on."""
        self._closed[old.base] = self._load_one(old.base)
        self._closing.pop(old.base, None)
        self._sort()

    def drop(self, base: int) -> None:
        """The segment at `base` leaves this disk."""
        closed = self._closed.pop(base, None)
        self._checked.discard(base)
        if closed is not None:
            closed.file.close()
            self._sort()
        self._disk.remove(idx.index_name(base))

    def _sort(self) -> None:
        tables = [closed.tables.runs for closed in self._closed.values()]
        bases = [np.full(len(closed.tables.runs), base, np.int64) for base, closed in self._closed.items()]
        table = np.concatenate(tables) if tables else np.empty(0, RUN)
        base_column = np.concatenate(bases) if bases else np.empty(0, np.int64)
        order = np.lexsort((base_column, table["first"], table["queue"]))
        self._table, self._bases = table[order], base_column[order]

    # -- lookups -------------------------------------------------------------------------------------------

    def entries(self, queue_id: int, offset: int, most: int) -> npt.NDArray[np.void]:
        """Entries of consecutive offsets from `offset` on: at least one when it is on this disk, at most `most`.

        Stops where a run of one segment ends only if the next offset is nowhere: otherwise goes on with the next.
        """
        pieces: list[npt.NDArray[np.void]] = []
        got = 0
        while got < most:
            piece = self._one_run(queue_id, offset + got, most - got)
            if not len(piece):
                break
            pieces.append(piece)
            got += len(piece)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, ENTRY)

    def _one_run(self, queue_id: int, offset: int, most: int) -> npt.NDArray[np.void]:
        for open_index in (self.open, *self._closing.values()):
            piece = open_index.entries(queue_id, offset, most)
            if len(piece):
                return piece
        low, high = self._rows_of(queue_id)
        at = low + int(np.searchsorted(self._table["first"][low:high], offset, "right")) - 1
        if at < low:
            return np.empty(0, ENTRY)
        run = self._table[at]
        skip = offset - int(run["first"])
        count = int(run["count"])
        if skip >= count:
            return np.empty(0, ENTRY)
        return self._read_entries(int(self._bases[at]), int(run["start"]) + skip, min(count - skip, most))

    def _rows_of(self, queue_id: int) -> tuple[int, int]:
        queues = self._table["queue"]
        return int(np.searchsorted(queues, queue_id, "left")), int(np.searchsorted(queues, queue_id, "right"))

    def _read_entries(self, base: int, start: int, count: int) -> npt.NDArray[np.void]:
        if base not in self._checked:
            self._check_entries(base)
        closed = self._closed[base]
        data = closed.file.read(idx.entries_position(start), count * ENTRY.itemsize)
        return np.frombuffer(data, ENTRY)

    def _check_entries(self, base: int) -> None:
        closed = self._closed[base]
        head = closed.tables.head
        data = closed.file.read(idx.HEAD_BYTES, head.entries * ENTRY.itemsize)
        if len(data) != head.entries * ENTRY.itemsize or google_crc32c.value(data) != head.entries_crc:
            closed.file.close()
            self._closed[base] = self._rebuilt(base)
            self._sort()
        self._checked.add(base)

    def survey(self, queue_ids: Ints, tiered_to: Ints) -> tuple[Ints, Ints]:
        """For each queue: its local offset, and the payload bytes from `tiered_to[i]` on, an estimate.

        The local offset is the least one from which everything up to `tiered_to` is on this disk; `tiered_to` when
        nothing is. What lies above `tiered_to` was never given up, so it is here, or lost.
        """
        queue, first, count, size = self._all_runs()
        local, unsealed = tiered_to.copy(), np.zeros(len(queue_ids), np.int64)
        if not len(queue) or not len(queue_ids):
            return local, unsealed
        sorted_ids = np.argsort(queue_ids)
        at = np.searchsorted(queue_ids, queue, sorter=sorted_ids).clip(max=len(queue_ids) - 1)
        number = sorted_ids[at]
        known = queue_ids[number] == queue
        number, queue, first, count, size = (column[known] for column in (number, queue, first, count, size))
        end, needed = first + count, tiered_to[number]
        opens = np.ones(len(queue), bool)
        opens[1:] = (queue[1:] != queue[:-1]) | (first[1:] > end[:-1])
        chain = np.flatnonzero(opens)[np.cumsum(opens) - 1]  # the row where each row's unbroken run begins
        holds = (first <= needed) & (needed <= end)
        np.minimum.at(local, number[holds], first[chain[holds]])
        share = np.clip((end - needed) / np.maximum(count, 1), 0, 1)
        np.add.at(unsealed, number, (size * share).astype(np.int64))
        return local, unsealed

    def _all_runs(self) -> tuple[Ints, Ints, Ints, Ints]:
        """(queue, first, count, bytes) of all runs and frames, sorted by (queue, first)."""
        names = ("queue", "first", "count", "bytes")
        columns = [
            np.concatenate([self._table[name].astype(np.int64), *(index.column(name) for index in self._memory())])
            for name in names
        ]
        order = np.lexsort((columns[1], columns[0]))
        queue, first, count, size = (column[order] for column in columns)
        return queue, first, count, size

    def _memory(self) -> list[OpenIndex]:
        return [self.open, *self._closing.values()]

    def spots(self, queue_id: int, offset: int, most: int) -> list[FrameSpot]:
        """Frames of consecutive offsets [offset, offset + most), in order of offset."""
        return spots_of(self.entries(queue_id, offset, most), offset)

    def bytes_of(self, queue_id: int, from_offset: int) -> int:
        """Uncompressed payload bytes from an offset on, an estimate: whole runs, a run cut by its share."""
        low, high = self._rows_of(queue_id)
        rows = self._table[low:high]
        counts, firsts = rows["count"].astype(np.int64), rows["first"].astype(np.int64)
        share = np.clip((firsts + counts - from_offset) / np.maximum(counts, 1), 0, 1)
        return int((rows["bytes"] * share).sum())

    def offset_of_bytes(self, queue_id: int, keep_bytes: int) -> int:
        """The least local offset whose messages and all later ones hold at most `keep_bytes`; whole frames or runs."""
        low, high = self._rows_of(queue_id)
        rows = [(int(row["first"]), int(row["count"]), int(row["bytes"])) for row in self._table[low:high]]
        rows += [frame for index in self._memory() for frame in index.frames_of(queue_id)]
        start = 0
        for first, count, size in sorted(rows, reverse=True):
            if size > keep_bytes:
                return max(start, first + count)
            keep_bytes -= size
            start = first
        return 0

    def runs_in(self, base: int) -> npt.NDArray[np.void]:
        """The runs of one closed segment: what must be tiered before it may be recycled."""
        closed = self._closed.get(base)
        return closed.tables.runs if closed is not None else np.empty(0, RUN)

    def is_closed(self, base: int) -> bool:
        return base in self._closed

    def time_floor(self, ts: int) -> int:
        """A position with nothing stamped `ts` or later before it: where a search for that millisecond starts."""
        floor = 0
        for times in self._times():
            if len(times) and int(times["ts"][0]) < ts:
                at = int(np.searchsorted(times["ts"], ts, "left")) - 1
                floor = max(floor, int(times["position"][at]))
        return floor

    def stamp_before(self, position: int) -> int | None:
        """A store timestamp from shortly before `position`: at most 256 KiB of log lie between."""
        base = position - position % self._segment_bytes
        closed = self._closed.get(base)
        memory = [index.times for index in self._memory() if index.base == base]
        times = closed.tables.times if closed is not None else memory[0] if memory else np.empty(0, idx.TIME)
        at = int(np.searchsorted(times["position"], position, "right")) - 1
        return int(times["ts"][at]) if at >= 0 else None

    def _times(self) -> list[npt.NDArray[Any]]:
        return [closed.tables.times for closed in self._closed.values()] + [index.times for index in self._memory()]

    def last_ts_of(self, base: int) -> int | None:
        closed = self._closed.get(base)
        return closed.tables.head.last_ts if closed is not None else None

    def entries_from_position(self, queue_id: int, position: int) -> int | None:
        """The least offset of a queue whose frame stands at `position` or later; None when there is none."""
        best: int | None = None
        low, high = self._rows_of(queue_id)
        for at in range(low, high):
            run, base = self._table[at], int(self._bases[at])
            if base + self._segment_bytes <= position or (best is not None and int(run["first"]) >= best):
                continue
            entries = self._read_entries(base, int(run["start"]), int(run["count"]))
            hits = np.flatnonzero(entries["position"] >= position)
            if len(hits):
                found = int(run["first"]) + int(hits[0])
                best = found if best is None else min(best, found)
                break
        for open_index in self._memory():
            for first, end in open_index.runs_of(queue_id):
                entries = open_index.entries(queue_id, first, end - first)
                hits = np.flatnonzero(entries["position"] >= position)
                if len(hits):
                    found = first + int(hits[0])
                    best = found if best is None else min(best, found)
                    break
        return best

    def key_spots(self, queue_ids: list[int], key_hash: int) -> list[tuple[int, int]]:
        """(position, length) of all frames of these queues that hold a row of this key hash, oldest first."""
        wanted = set(queue_ids)
        spots = [spot for index in self._memory() for spot in index.key_positions(wanted, key_hash)]
        mine = np.flatnonzero(np.isin(self._table["queue"], queue_ids) & (self._table["flags"] & HAS_KEYS != 0))
        for at in mine:
            run = self._table[at]
            entries = self._read_entries(int(self._bases[at]), int(run["start"]), int(run["count"]))
            hits = entries[entries["key_hash"] == key_hash]
            positions, first_hits = np.unique(hits["position"], return_index=True)
            lengths = hits["length"][first_hits]
            spots += list(zip(positions.tolist(), lengths.tolist(), strict=True))
        return sorted(set(spots))


def spots_of(entries: npt.NDArray[np.void], offset: int) -> list[FrameSpot]:
    """The frames behind entries of consecutive offsets from `offset` on."""
    if not len(entries):
        return []
    positions = entries["position"]
    heads = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1])))
    ends = [*heads[1:].tolist(), len(entries)]
    return [
        FrameSpot(int(positions[head]), int(entries["length"][head]), offset + int(head), offset + end)
        for head, end in zip(heads.tolist(), ends, strict=True)
    ]
