"""Where every message of this disk stands: closed segments by their `.idx` files, the open one in memory.

Lookups are async: what is in memory, or in the page cache, is answered on the event loop at once; what is not is read
in a thread. A segment that was closed but whose `.idx` is not written yet (`closing`) still answers from memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import compress, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.core.threads import Threads
from millpond.store.closed_index import Added, ClosedIndexes, Ints, Slice, Table
from millpond.store.disk import Disk
from millpond.store.index import ENTRY, HAS_KEYS, OpenIndex

_ENTRIES_AT_ONCE = 32_768  # of a closed index, 640 KiB: a few tenths of a millisecond of the loop's time
_LARGE = 512  # rows of a frame that is passed over rather than looked through


class FrameSpot(NamedTuple):
    """A frame's place, and the offsets of it that were asked for: [first, end)."""

    position: int
    length: int
    first: int
    end: int


class Directory:
    """All indexes of a store."""

    def __init__(self, disk: Disk, segment_bytes: int, rebuild: Callable[[int], OpenIndex]) -> None:
        self._segment_bytes = segment_bytes
        self._closed = ClosedIndexes(disk, rebuild)
        self._closing: dict[int, OpenIndex] = {}  # full, and not written yet
        self._threads = Threads(1, "millpond-index")
        self._writing = Threads(1, "millpond-index-write")  # a second or more for a large one: no reader waits for it
        self.open = OpenIndex(0)

    # -- life of a segment's index ---------------------------------------------------------------------------

    def load(self, bases: list[int]) -> None:
        """Open the indexes of these closed segments, rebuilding those that are missing or damaged. Blocks."""
        self._closed.load(bases)

    def roll(self, base: int) -> None:
        """The open segment is full: a new index for the one at `base`; the old one still answers."""
        self._closing[self.open.base] = self.open
        self.open = OpenIndex(base)

    def closing(self) -> list[OpenIndex]:
        """Indexes of full segments that are not written yet, oldest first."""
        return list(self._closing.values())

    async def close_segment(self, index: OpenIndex) -> None:
        """Write the `.idx` of a full segment, and answer from it from then on. In a hurry when others wait to be
        written as well. Raises OSError."""
        self._adopt(await self._writing.run(self._write, index, len(self._closing) > 1))

    def close_segment_now(self, index: OpenIndex) -> None:
        """The same during a start. Blocks."""
        self._adopt(self._write(index, hurry=True))

    def _write(self, index: OpenIndex, hurry: bool) -> Added:
        self._closed.write(index, hurry=hurry)
        return self._closed.add(index.base)

    def _adopt(self, added: Added) -> None:
        self._closed.install(added)
        self._closing.pop(added.base, None)

    def forget(self, base: int) -> None:
        """The segment at `base` leaves this disk: nothing of it is found any more."""
        self._closed.forget(base)

    async def remove_file(self, base: int) -> None:
        await self._threads.run(self._closed.remove_file, base)

    def stop(self) -> None:
        for threads in (self._threads, self._writing):
            threads.close()

    # -- lookups ---------------------------------------------------------------------------------------------

    async def entries(self, queue_id: int, offset: int, most: int) -> Table:
        """Entries of consecutive offsets from `offset` on: at least one when it is on this disk, at most `most`."""
        pieces: list[Table] = []
        got = 0
        while got < most:
            piece = self._in_memory(queue_id, offset + got, most - got)
            if not len(piece):
                wanted = self._closed.locate(queue_id, offset + got, most - got)
                if wanted is None:
                    break
                piece = await self._read(wanted)
                if not len(piece):
                    break
            pieces.append(piece)
            got += len(piece)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, ENTRY)

    def _in_memory(self, queue_id: int, offset: int, most: int) -> Table:
        for index in self._memory():
            piece = index.entries(queue_id, offset, most)
            if len(piece):
                return piece
        return np.empty(0, ENTRY)

    async def _read(self, wanted: Slice) -> Table:
        cached = self._closed.read_cached(wanted)
        if cached is not None:
            return cached
        return await self._threads.run(self._closed.read, wanted)

    def last_entry_now(self, queue_id: int, offset: int) -> Table:
        """The entry of one offset during a start, or none. Blocks."""
        piece = self._in_memory(queue_id, offset, 1)
        wanted = self._closed.locate(queue_id, offset, 1) if not len(piece) else None
        return self._closed.read(wanted) if wanted is not None else piece

    def _memory(self) -> list[OpenIndex]:
        return [self.open, *self._closing.values()]

    async def spots(self, queue_id: int, offset: int, most: int) -> list[FrameSpot]:
        """Frames of consecutive offsets [offset, offset + most), in order of offset."""
        found: list[FrameSpot] = []
        end = offset + most
        while offset < end:
            some = self.spots_in_memory(queue_id, offset, end - offset)
            if not some:
                wanted = self._closed.locate(queue_id, offset, min(_ENTRIES_AT_ONCE, end - offset))
                if wanted is None:
                    break
                some = spots_of(await self._read(wanted), offset)
                if not some:
                    break
                if wanted.length == _ENTRIES_AT_ONCE:
                    await asyncio.sleep(0)  # others have a turn: there may be a million entries of a few frames
            if found and found[-1].position == some[0].position:
                some[0] = some[0]._replace(first=found.pop().first)
            found += some
            offset = found[-1].end
        return found

    def spots_in_memory(self, queue_id: int, offset: int, most: int) -> list[FrameSpot]:
        """The first of them, when `offset` is in an index that is in memory."""
        for index in self._memory():
            spots = index.spots(queue_id, offset, most)
            if spots:
                return [FrameSpot(*spot) for spot in spots]
        return []

    async def first_from_position(self, queue_id: int, position: int) -> int | None:
        """The least offset of a queue whose frame stands at `position` or later; None when there is none."""
        candidates: list[int] = []
        low, high = self._closed.rows_of(queue_id)
        bases = self._closed.runs.base[low:high]
        for row in low + np.flatnonzero(bases + self._segment_bytes > position):
            wanted = self._closed.whole_run(int(row))
            found = _first_at(await self._read(wanted), wanted.offset, position)
            if found is not None:
                candidates.append(found)
                break
        in_memory = [index.first_from_position(queue_id, position) for index in self._memory()]
        return min((found for found in (*candidates, *in_memory) if found is not None), default=None)

    async def key_spots(self, queue_ids: list[int], key_hash: int) -> list[tuple[int, int]]:
        """(position, length) of all frames of these queues that hold a row of this key hash, oldest first."""
        wanted = set(queue_ids)
        spots = {spot for index in self._memory() for spot in index.key_positions(wanted, key_hash)}
        runs = self._closed.runs
        rows = np.flatnonzero(np.isin(runs.queue, queue_ids) & (runs.flags & HAS_KEYS != 0))
        for one in [self._closed.whole_run(int(row)) for row in rows]:
            entries = await self._read(one)
            hits = entries[entries["key_hash"] == key_hash]
            spots.update(zip(hits["position"].tolist(), hits["length"].tolist(), strict=True))
        return sorted(spots)

    # -- times -----------------------------------------------------------------------------------------------

    def time_floor(self, ts: int) -> int:
        """A position with nothing stamped `ts` or later before it: where a search for that millisecond starts."""
        floor = 0
        for times in (*self._closed.all_times(), *(index.times for index in self._memory())):
            if len(times) and int(times["ts"][0]) < ts:
                at = int(np.searchsorted(times["ts"], ts, "left")) - 1
                floor = max(floor, int(times["position"][at]))
        return floor

    def stamp_before(self, queue_id: int, offset: int) -> int | None:
        """A store timestamp from before a message: the first one of its segment; None when it is not here."""
        for index in self._memory():
            if len(index.entries(queue_id, offset, 1)):
                return index.first_ts
        wanted = self._closed.locate(queue_id, offset, 1)
        times = self._closed.times_in(wanted.base) if wanted is not None else None
        return int(times["ts"][0]) if times is not None and len(times) else None

    # -- sizes -----------------------------------------------------------------------------------------------

    def bytes_of(self, queue_id: int, from_offset: int) -> int:
        """Uncompressed payload bytes from an offset on, an estimate: a run that it cuts counts by its share."""
        first, count, size = self._pieces(queue_id, from_offset)
        return int((size * np.clip((first + count - from_offset) / count, 0, 1)).sum())

    def offset_of_bytes(self, queue_id: int, keep_bytes: int) -> int:
        """The least local offset whose messages and all later ones hold at most `keep_bytes`; whole frames or runs.
        0 when all of them do."""
        first, count, size = self._pieces(queue_id)
        newest_first = np.argsort(-first, kind="stable")
        first, count, size = first[newest_first], count[newest_first], size[newest_first]
        kept = int(np.cumsum(size).searchsorted(keep_bytes, "right"))
        if kept == len(first):
            return 0
        return max(int(first[kept - 1]) if kept else 0, int(first[kept] + count[kept]))

    def _pieces(self, queue_id: int, offset: int = 0) -> tuple[Ints, Ints, Ints]:
        """First offsets, messages and payload bytes of the runs and frames of a queue that may hold `offset` or later
        ones."""
        low, high = self._closed.rows_of(queue_id)
        runs = self._closed.runs
        closed = runs.first[low:high], runs.messages[low:high], runs.bytes[low:high]
        parts = [closed, *(index.frames_from(queue_id, offset) for index in self._memory())]
        first, count, size = (np.concatenate(column) for column in zip(*parts, strict=True))
        return first, count, size

    def runs_in(self, base: int) -> Table:
        """The runs of one closed segment: what must be tiered before it may be recycled."""
        return self._closed.runs_in(base)

    def is_closed(self, base: int) -> bool:
        return base in self._closed

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
        runs, memory = self._closed.runs, self._memory()
        columns = [
            np.concatenate([closed, *(index.column(name) for index in memory)])
            for name, closed in (
                ("queue", runs.queue),
                ("first", runs.first),
                ("count", runs.messages),
                ("bytes", runs.bytes),
            )
        ]
        order = np.lexsort((columns[1], columns[0]))
        queue, first, count, size = (column[order] for column in columns)
        return queue, first, count, size


def _first_at(entries: Table, first: int, position: int) -> int | None:
    hits = np.flatnonzero(entries["position"] >= position)
    return first + int(hits[0]) if len(hits) else None


def spots_of(
    entries: Table, offset: int, most: int | None = None, wanted: npt.NDArray[np.bool_] | None = None
) -> list[FrameSpot]:
    """The frames behind entries of consecutive offsets from `offset` on, `most` at most; with `wanted` (bool[entries])
    those that hold a wanted one."""
    if not len(entries):
        return []
    positions, lengths = entries["position"], entries["length"]
    heads = _heads(positions)
    ranges: Iterable[tuple[int, int]] = zip(heads, [*heads[1:], len(entries)], strict=True)
    if wanted is not None:
        ranges = compress(ranges, np.logical_or.reduceat(wanted, heads))
    return [
        FrameSpot(int(positions[head]), int(lengths[head]), offset + head, offset + end)
        for head, end in islice(ranges, most)
    ]


def _heads(positions: Ints) -> list[int]:
    """Where another position begins. Equal ones stand together, so of large frames only a few are looked at."""
    heads = [0]
    while heads[-1] + _LARGE < len(positions) and positions[heads[-1] + _LARGE] == positions[heads[-1]]:
        same, other = heads[-1] + _LARGE, len(positions)
        while same + 1 < other:
            middle = (same + other) // 2
            if positions[middle] == positions[heads[-1]]:
                same = middle
            else:
                other = middle
        if other == len(positions):
            return heads
        heads.append(other)
    first = heads[-1]
    return heads + (np.flatnonzero(positions[first + 1 :] != positions[first:-1]) + first + 1).tolist()
