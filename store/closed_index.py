"""The indexes of closed segments: one `.idx` file each, and all their runs as one sorted table in memory.

An offset is found by two bisects in the table; its entries are read from the file when needed. Start-up reads 40
bytes for each (queue, segment), whatever the number of messages. A segment's entries are compared with their
checksum the first time they are used.

A missing or damaged `.idx` is rebuilt from its segment's frames (`rebuild`, given by the engine). What says "blocks"
runs in a thread; everything else is memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from millpond.store import index as idx
from millpond.store.disk import Disk, File
from millpond.store.index import ENTRY, RUN, ClosedIndex, OpenIndex

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.void]


class Closed(NamedTuple):
    tables: ClosedIndex
    file: File


class Slice(NamedTuple):
    """Entries of consecutive offsets in one file: `length` of them from entry `start` on; the first is `offset`'s."""

    base: int
    start: int
    length: int
    offset: int


class Added(NamedTuple):
    """One more closed index, and the table with it in place; `ClosedIndexes.install` takes it."""

    base: int
    closed: Closed
    table: Table
    bases: Ints


class ClosedIndexes:
    def __init__(self, disk: Disk, rebuild: Callable[[int], OpenIndex]) -> None:
        self._disk = disk
        self._rebuild = rebuild
        self._closed: dict[int, Closed] = {}  # by segment base
        self._checked: set[int] = set()
        self.table: Table = np.empty(0, RUN)
        self.bases: Ints = np.empty(0, np.int64)

    def __contains__(self, base: int) -> bool:
        return base in self._closed

    # -- files (blocks) --------------------------------------------------------------------------------------

    def load(self, bases: list[int]) -> None:
        """Open the indexes of these segments, at start."""
        self._closed = {base: self._open(base) for base in bases}
        runs = [closed.tables.runs for closed in self._closed.values()]
        self.table, self.bases = _sorted(runs, list(self._closed))

    def write(self, index: OpenIndex) -> None:
        self._disk.write_whole(idx.index_name(index.base), index.close())

    def add(self, base: int) -> Added:
        """Open one more, whose file was written."""
        closed = self._open(base)
        column = np.full(len(closed.tables.runs), base, np.int64)
        table = np.concatenate([self.table, closed.tables.runs])
        order, bases = _order(table, np.concatenate([self.bases, column]))
        return Added(base, closed, table[order], bases)

    def remove_file(self, base: int) -> None:
        self._disk.remove(idx.index_name(base))

    def read(self, wanted: Slice) -> Table:
        """The entries; none when the segment has left the disk meanwhile."""
        closed = self._closed.get(wanted.base)
        if closed is None:
            return np.empty(0, ENTRY)
        if wanted.base not in self._checked:
            closed = self._check(wanted.base, closed)
        data = closed.file.read(idx.entries_position(wanted.start), wanted.length * ENTRY.itemsize)
        return np.frombuffer(data, ENTRY)

    def _open(self, base: int) -> Closed:
        try:
            file = self._disk.open(idx.index_name(base))
        except FileNotFoundError:
            return self._rebuilt(base)
        try:
            return self._parsed(base, file)
        except ValueError:
            file.close()
            return self._rebuilt(base)

    def _rebuilt(self, base: int) -> Closed:
        self.write(self._rebuild(base))
        return self._parsed(base, self._disk.open(idx.index_name(base)))

    @staticmethod
    def _parsed(base: int, file: File) -> Closed:
        head = idx.decode_head(file.read(0, idx.HEAD_BYTES))
        if head.base != base:
            raise ValueError("index of another segment")
        tables = idx.entries_position(head.entries)
        return Closed(idx.decode_tables(head, file.read(tables, file.size() - tables)), file)

    def _check(self, base: int, closed: Closed) -> Closed:
        head = closed.tables.head
        data = closed.file.read(idx.HEAD_BYTES, head.entries * ENTRY.itemsize)
        if len(data) != head.entries * ENTRY.itemsize or google_crc32c.value(data) != head.entries_crc:
            closed = self._rebuilt(base)  # the same runs: only entries were damaged
            self._closed[base] = closed
        self._checked.add(base)
        return closed

    # -- memory ----------------------------------------------------------------------------------------------

    def install(self, added: Added) -> None:
        """Answer from `added` from now on; what was forgotten while it was prepared stays forgotten."""
        self._closed[added.base] = added.closed
        kept = np.isin(added.bases, np.fromiter(self._closed, np.int64, len(self._closed)))
        self.table, self.bases = added.table[kept], added.bases[kept]

    def forget(self, base: int) -> None:
        """The segment at `base` leaves this disk."""
        closed = self._closed.pop(base, None)
        self._checked.discard(base)
        if closed is not None:
            closed.file.close()
            kept = self.bases != base
            self.table, self.bases = self.table[kept], self.bases[kept]

    def read_cached(self, wanted: Slice) -> Table | None:
        """The entries when they are checked and in memory already, else None."""
        closed = self._closed.get(wanted.base)
        if closed is None or wanted.base not in self._checked:
            return None
        position, length = idx.entries_position(wanted.start), wanted.length * ENTRY.itemsize
        data = closed.file.read_cached(position, length)
        return np.frombuffer(data, ENTRY) if data is not None else None

    def rows_of(self, queue_id: int) -> tuple[int, int]:
        """[low, high): a queue's rows in `table`, by offset."""
        queues = self.table["queue"]
        return int(np.searchsorted(queues, queue_id, "left")), int(np.searchsorted(queues, queue_id, "right"))

    def locate(self, queue_id: int, offset: int, most: int) -> Slice | None:
        """Where entries from `offset` on stand, as many as one run has, at most `most`; None when it is not here."""
        low, high = self.rows_of(queue_id)
        at = low + int(np.searchsorted(self.table["first"][low:high], offset, "right")) - 1
        if at < low:
            return None
        skip = offset - int(self.table["first"][at])
        count = int(self.table["count"][at])
        if skip >= count:
            return None
        start = int(self.table["start"][at]) + skip
        return Slice(int(self.bases[at]), start, min(count - skip, most), offset)

    def whole_run(self, row: int) -> Slice:
        run = self.table[row]
        return Slice(int(self.bases[row]), int(run["start"]), int(run["count"]), int(run["first"]))

    def runs_in(self, base: int) -> Table:
        """The runs of one closed segment."""
        closed = self._closed.get(base)
        return closed.tables.runs if closed is not None else np.empty(0, RUN)

    def times_in(self, base: int) -> Table | None:
        closed = self._closed.get(base)
        return closed.tables.times if closed is not None else None

    def all_times(self) -> list[Table]:
        return [closed.tables.times for closed in self._closed.values()]


def _sorted(runs: list[Table], bases: list[int]) -> tuple[Table, Ints]:
    if not runs:
        return np.empty(0, RUN), np.empty(0, np.int64)
    table = np.concatenate(runs)
    columns = [np.full(len(one), base, np.int64) for one, base in zip(runs, bases, strict=True)]
    order, sorted_bases = _order(table, np.concatenate(columns))
    return table[order], sorted_bases


def _order(table: Table, bases: Ints) -> tuple[Ints, Ints]:
    order = np.lexsort((bases, table["first"], table["queue"]))
    return order, bases[order]
