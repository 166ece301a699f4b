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


class Runs(NamedTuple):
    """The runs of all closed segments as columns (one array each, so that a bisect copies nothing), sorted by
    (queue, first). `base` says in which segment a run stands."""

    queue: Ints
    first: Ints
    start: Ints
    messages: Ints
    bytes: Ints
    flags: Ints
    base: Ints

    @staticmethod
    def of(base: int, table: Table) -> Runs:
        queue, first, start, messages, size, flags = (table[name].astype(np.int64) for name in RUN.names or ())
        return Runs(queue, first, start, messages, size, flags, np.full(len(table), base, np.int64))

    @staticmethod
    def merged(parts: list[Runs]) -> Runs:
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        queue, first, base = columns[0], columns[1], columns[-1]
        order = np.lexsort((base, first, queue))
        return Runs(*(column[order] for column in columns))

    def where(self, kept: npt.NDArray[np.bool_]) -> Runs:
        return Runs(*(column[kept] for column in self))


class Added(NamedTuple):
    """One more closed index, and all runs with its own among them; `ClosedIndexes.install` takes it."""

    base: int
    closed: Closed
    runs: Runs


class ClosedIndexes:
    def __init__(self, disk: Disk, rebuild: Callable[[int], OpenIndex]) -> None:
        self._disk = disk
        self._rebuild = rebuild
        self._closed: dict[int, Closed] = {}  # by segment base
        self._checked: set[int] = set()
        self.runs = Runs.of(0, np.empty(0, RUN))

    def __contains__(self, base: int) -> bool:
        return base in self._closed

    # -- files (blocks) --------------------------------------------------------------------------------------

    def load(self, bases: list[int]) -> None:
        """Open the indexes of these segments, at start."""
        self._closed = {base: self._open(base) for base in bases}
        self.runs = Runs.merged([self.runs, *(Runs.of(base, one.tables.runs) for base, one in self._closed.items())])

    def write(self, index: OpenIndex, *, hurry: bool) -> None:
        self._disk.write_whole(idx.index_name(index.base), index.close(), hurry=hurry)

    def add(self, base: int) -> Added:
        """Open one more, whose file was written."""
        closed = self._open(base)
        return Added(base, closed, Runs.merged([self.runs, Runs.of(base, closed.tables.runs)]))

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
        self.write(self._rebuild(base), hurry=True)  # a start or a reader waits for it
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
        self.runs = added.runs.where(np.isin(added.runs.base, list(self._closed)))

    def forget(self, base: int) -> None:
        """The segment at `base` leaves this disk."""
        closed = self._closed.pop(base, None)
        self._checked.discard(base)
        if closed is not None:
            closed.file.close()
            self.runs = self.runs.where(self.runs.base != base)

    def read_cached(self, wanted: Slice) -> Table | None:
        """The entries when they are checked and in memory already, else None."""
        closed = self._closed.get(wanted.base)
        if closed is None or wanted.base not in self._checked:
            return None
        position, length = idx.entries_position(wanted.start), wanted.length * ENTRY.itemsize
        data = closed.file.read_cached(position, length)
        return np.frombuffer(data, ENTRY) if data is not None else None

    def rows_of(self, queue_id: int) -> tuple[int, int]:
        """[low, high): a queue's rows in `runs`, by offset."""
        queue = self.runs.queue
        return int(queue.searchsorted(queue_id, "left")), int(queue.searchsorted(queue_id, "right"))

    def locate(self, queue_id: int, offset: int, most: int) -> Slice | None:
        """Where entries from `offset` on stand, as many as one run has, at most `most`; None when it is not here."""
        runs = self.runs
        low, high = self.rows_of(queue_id)
        at = low + int(runs.first[low:high].searchsorted(offset, "right")) - 1
        if at < low:
            return None
        skip = offset - int(runs.first[at])
        count = int(runs.messages[at])
        if skip >= count:
            return None
        return Slice(int(runs.base[at]), int(runs.start[at]) + skip, min(count - skip, most), offset)

    def whole_run(self, row: int) -> Slice:
        runs = self.runs
        return Slice(int(runs.base[row]), int(runs.start[row]), int(runs.messages[row]), int(runs.first[row]))

    def runs_in(self, base: int) -> Table:
        """The runs of one closed segment."""
        closed = self._closed.get(base)
        return closed.tables.runs if closed is not None else np.empty(0, RUN)

    def times_in(self, base: int) -> Table | None:
        closed = self._closed.get(base)
        return closed.tables.times if closed is not None else None

    def all_times(self) -> list[Table]:
        return [closed.tables.times for closed in self._closed.values()]
