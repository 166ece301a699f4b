"""One group's progress in one queue: `Cursor`.

`head`: everything below it was handed out once (or skipped by the filter); the unsettled table (`unsettled`)
names what of it is still to be acknowledged. `generation` rises with every seek and makes older leases void.

A mutation remembers which offsets it touched, and `take_delta` gives one operation with the final state of the
scalars and of those rows. Where a whole run was granted or settled, the run is what is remembered, and written.
Nothing here reads a clock: due times are arguments.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.store.client import SETTLE_STATUSES, GroupRef, QueueRef
from millpond.store.fold.operations import (
    CursorDelta,
    GroupDrop,
    Ints,
    Rows,
    encode,
    encode_run,
    encode_runs,
    spread,
)
from millpond.store.fold.unsettled import DEAD, LEASED, NEVER, NO_ROWS, WAITING, Mask, Unsettled, Where

OK, ALREADY, REDELIVERED, VOID, UNKNOWN = range(len(SETTLE_STATUSES))
assert SETTLE_STATUSES == ("ok", "already", "redelivered", "void", "unknown")

Action = Literal["ack", "nack", "extend", "skip", "release"]
Statuses = npt.NDArray[np.uint8]
Key = tuple[int, int]
"""(group id, queue id)"""

_NOTHING: Ints = np.empty(0, np.int64)


class LastSeek(NamedTuple):
    """The last seek of a cursor, so that a repeat is told what the first one did. `id_hash` 0: none yet."""

    id_hash: int = 0
    from_offset: int = 0
    to_offset: int = 0


class Cursor:
    """One group's progress in one queue."""

    __slots__ = (
        "_dirty", "_reset", "_touched", "generation", "group", "head", "last_seek", "next_lease", "queue", "skipped",
        "table",
    )  # fmt: skip

    def __init__(self, group: GroupRef, queue: QueueRef, head: int, dirty: dict[Key, Cursor | Deleted]) -> None:
        """`dirty`: where this cursor enters itself with its first mutation after a delta was taken."""
        self.group = group
        self.queue = queue
        self.generation = 1
        self.head = head
        self.next_lease = 1
        self.skipped = 0
        self.last_seek = LastSeek()
        self.table = Unsettled()
        self._dirty = dirty
        self._touched: list[Ints | range] = []  # a range: one run, all of it leased alike, or all of it settled
        self._reset = False

    @property
    def key(self) -> Key:
        return self.group.group_id, self.queue.queue_id

    @property
    def committed(self) -> int:
        """Everything below it is settled."""
        first = self.table.first
        return self.head if first is None else first

    @property
    def in_flight(self) -> int:
        return self.table.live

    def in_flight_from(self, offset: int) -> int:
        """How many of these are not below `offset`."""
        return int(np.count_nonzero(self.table.columns.state[self.table.span(offset, self.head)] != DEAD))

    @property
    def earliest_due(self) -> int:
        """No row that `due_rows` has not found yet is due before this; NEVER when there is none."""
        return self.table.earliest_due

    def mark(self) -> None:
        """A scalar was changed, or will be in this turn: the next gathering takes this cursor along."""
        self._dirty[self.key] = self

    def detach(self) -> None:
        """It was dropped: what whoever still holds it does to it is not gathered."""
        self._dirty = {}

    def _touch(self, offsets: Ints | range) -> None:
        self._touched.append(offsets)
        self._dirty[self.key] = self

    # -- handing out ------------------------------------------------------------------------------------------

    def grant(self, offsets: Ints, due: int, head: int) -> tuple[int, npt.NDArray[np.uint32]]:
        """Lease these ascending offsets until `due` and move the head up to `head`.

        Those below the present head must stand in the table: they are handed out again, with one attempt more.
        The others are new. Returns the lease number and the attempt of each (1: first delivery).
        """
        assert head >= self.head
        lease = self.next_lease
        self.next_lease += 1
        old = int(offsets.searchsorted(self.head))
        attempts = np.ones(len(offsets), np.uint32)
        if old:
            attempts[:old] = self._grant_again(offsets[:old], lease, due)
        if old < len(offsets):
            assert offsets[-1] < head
            self.table.append(offsets[old:], lease, due, 1)
        self.head = head
        self._touch(offsets if old else _run(offsets))
        return lease, attempts

    def _grant_again(self, offsets: Ints, lease: int, due: int) -> npt.NDArray[np.uint32]:
        where, found = self.table.locate(offsets)
        assert found.all(), "only unsettled rows are handed out again"
        return self.table.lease_again(where, lease, due)

    def advance(self, head: int) -> None:
        """Nothing below `head` is to be handed out: the filter has skipped it."""
        if head > self.head:
            self.head = head
            self.mark()

    def due_rows(self, now: int, limit: int) -> Ints:
        """Offsets, ascending, of up to `limit` rows that may be handed out again. Changes nothing."""
        return self.table.due(now, limit)

    def still_due(self, offsets: Ints, now: int) -> Mask:
        """Which of these ascending offsets are unsettled and due."""
        where, found = self.table.locate(offsets)
        if found.any():
            found = found & (self.table.columns.due[where] <= now)
        return found

    def has_due(self, now: int) -> bool:
        return len(self.table.due(now, 1)) > 0

    def still_leased(self, lease: int, offsets: Ints, now: int) -> tuple[Mask, int]:
        """Which of these ascending offsets the lease holds and has not ended for, and when it ends for the first."""
        where, found = self.table.locate(offsets)
        if not found.any():
            return found, now
        columns = self.table.columns
        held = found & (columns.lease[where] == lease) & (columns.state[where] == LEASED) & (columns.due[where] > now)
        return held, int(columns.due[where][held].min(initial=NEVER))

    # -- settling ---------------------------------------------------------------------------------------------

    def settle(self, lease: int, generation: int, offsets: Ints, action: Action, due: int) -> Statuses:
        """Settle these offsets of a lease; one status for each. `due`: for nack, extend and release.

        A lease that has ended and was not handed out again is still good. A row that was nacked may still be
        acknowledged; to nack or extend it once more is `already`.
        """
        refusal = self._refusal(lease, generation)
        if refusal is not None:
            return np.full(len(offsets), refusal, np.uint8)
        if len(offsets) > 1 and not (offsets[1:] > offsets[:-1]).all():
            offsets, inverse = np.unique(offsets, return_inverse=True)
            return self.settle(lease, generation, offsets, action, due)[inverse]
        where, found = self.table.locate(offsets)
        if not found.any():
            return self._absent(offsets)
        mine = found & (self.table.columns.lease[where] == lease)
        if mine.all():
            able = self._able(where, action)
            self._settle_rows(where, offsets, able, action, due)
            return np.where(able, OK, ALREADY).astype(np.uint8)
        statuses = self._absent(offsets)
        statuses[found] = REDELIVERED
        positions = _positions(where)[mine]
        able = self._able(positions, action)
        self._settle_rows(positions, offsets[mine], able, action, due)
        statuses[mine] = np.where(able, OK, ALREADY)
        return statuses

    def settle_ranges(self, lease: int, generation: int, ranges: Ints, action: Action, due: int) -> tuple[int, int]:
        """Settle all of a lease's rows inside `ranges` (i64[2k]: first, end, first, end, ..; end not included).

        Returns one status for the whole (ok when any row was settled) and how many rows were.
        """
        refusal = self._refusal(lease, generation)
        if refusal is not None:
            return refusal, 0
        if not len(ranges):
            return OK, 0
        where = self._in_ranges(ranges)
        columns = self.table.columns
        mine = columns.lease[where] == lease
        rows: Where = where if mine.all() else _positions(where)[mine]
        able = self._able(rows, action)
        count = int(np.count_nonzero(able))
        if count:
            self._settle_rows(rows, columns.offset[rows], able, action, due)
            return OK, count
        if len(able):
            return ALREADY, 0
        if (columns.state[where] != DEAD).any():
            return REDELIVERED, 0
        return (ALREADY if ranges[0] < self.head else UNKNOWN), 0

    def _refusal(self, lease: int, generation: int) -> int | None:
        if generation != self.generation:
            return VOID if generation < self.generation else UNKNOWN
        return None if 0 < lease < self.next_lease else UNKNOWN

    def _absent(self, offsets: Ints) -> Statuses:
        return np.where((offsets >= 0) & (offsets < self.head), ALREADY, UNKNOWN).astype(np.uint8)

    def _able(self, where: Where, action: Action) -> Mask:
        """Which of this lease's rows the action still applies to."""
        states = self.table.columns.state[where]
        able: Mask = states != DEAD if action in {"ack", "skip"} else states == LEASED
        return able

    def _in_ranges(self, ranges: Ints) -> Where:
        if len(ranges) == 2:
            return self.table.span(int(ranges[0]), max(int(ranges[0]), int(ranges[1])))
        firsts, ends = ranges[0::2], ranges[1::2]
        spans = [self.table.span(int(firsts.min()), int(ends.max()))]
        column = self.table.columns.offset[spans[0]]
        starts, stops = column.searchsorted(firsts), column.searchsorted(ends)
        positions = spread(starts, np.maximum(stops - starts, 0)) + spans[0].start
        return positions if (ranges[1:] >= ranges[:-1]).all() else np.unique(positions)

    def _settle_rows(self, where: Where, offsets: Ints, able: Mask, action: Action, due: int) -> None:
        if not able.all():
            where, offsets = _positions(where)[able], offsets[able]
        if not len(offsets):
            return
        done = action in {"ack", "skip"}
        self._touch(_run(offsets) if done else np.array(offsets))
        if done:
            self.table.remove(where)
        elif action == "extend":
            self.table.change(where, due, LEASED)
        else:  # a release was never delivered: the next delivery has the same attempt
            self.table.change(where, due, WAITING, attempts=-1 if action == "release" else 0)

    # -- moving -----------------------------------------------------------------------------------------------

    def seek(self, to: int, keep_retries: bool, seek: LastSeek) -> None:
        """Hand out from `to` on. Leases so far are void; rows below `to` stay to be retried when `keep_retries`."""
        kept = self.table.rows()
        self.table.clear()
        self._touched.clear()
        self._reset = True
        self.generation += 1
        self.head = to
        self.last_seek = seek
        self.mark()
        if keep_retries:
            below = kept.offset < to
            if below.any():
                rows = Rows._make(column[below] for column in kept)
                self.table.upsert(rows)
                self._touch(rows.offset)

    def trim(self, start_offset: int) -> None:
        """Messages below `start_offset` are deleted: what was never handed out of them is counted as skipped."""
        if self.table.first is not None and self.table.first < start_offset:
            where = self.table.span(0, start_offset)
            positions = _positions(where)[self.table.columns.state[where] != DEAD]
            self._touch(np.array(self.table.columns.offset[positions]))
            self.table.remove(positions)
        if self.head < start_offset:
            self.skipped += start_offset - self.head
            self.head = start_offset
            self.mark()

    # -- persistence ------------------------------------------------------------------------------------------

    def take_delta(self) -> bytes:
        """What has changed since the last one, as one operation."""
        encoded = self._one_run() or self._known_runs() or encode(self._delta(*self._touched_rows()))
        self._touched.clear()
        self._reset = False
        return encoded

    def _delta(self, rows: Rows = NO_ROWS, removed: Ints = _NOTHING) -> CursorDelta:
        return CursorDelta(
            self.group, self.queue, self.generation, self.head, self.next_lease, self.skipped, *self.last_seek,
            self._reset, rows, removed,
        )  # fmt: skip

    def _one_run(self) -> bytes | None:
        """The operation, when one run was touched, once: 12 us without arrays, 21 with them, which pay from four on."""
        run = self._touched[0] if len(self._touched) == 1 else None
        return encode_run(self._delta(), run, self.table.row(run.start)) if isinstance(run, range) else None

    def _known_runs(self) -> bytes | None:
        """The operation, when only whole runs were touched, each once: nobody looks at their rows one by one."""
        runs = sorted((one for one in self._touched if isinstance(one, range)), key=lambda run: run.start)
        if not runs or len(runs) < len(self._touched):
            return None
        if any(run.stop > behind.start for run, behind in pairwise(runs)):
            return None
        firsts = np.array([run.start for run in runs], np.int64)
        counts = np.array([len(run) for run in runs], np.uint32)
        where, found = self.table.locate(firsts)
        delta = self._delta(self.table.at(_positions(where)[found]), firsts[~found])
        return encode_runs(delta, counts[found], counts[~found])

    def _touched_rows(self) -> tuple[Rows, Ints]:
        """The touched rows that are unsettled, and the offsets of those that no longer are."""
        offsets = self._touched_offsets()
        where, found = self.table.locate(offsets)
        if found.all():
            return self.table.at(where), _NOTHING
        return self.table.at(_positions(where)[found]), offsets[~found]

    def _touched_offsets(self) -> Ints:
        if not self._touched:
            return _NOTHING
        pieces = [np.arange(one.start, one.stop) if isinstance(one, range) else one for one in self._touched]
        if len(pieces) == 1:
            return pieces[0]
        touched = np.concatenate(pieces)
        touched.sort(kind="stable")  # merges what is sorted already: much quicker than np.unique
        fresh = np.ones(len(touched), np.bool_)
        np.not_equal(touched[1:], touched[:-1], out=fresh[1:])
        return touched[fresh]

    def apply(self, delta: CursorDelta) -> None:
        self.generation = delta.generation
        self.head = delta.head
        self.next_lease = delta.next_lease
        self.skipped = delta.skipped
        self.last_seek = LastSeek(delta.seek_hash, delta.seek_from, delta.seek_to)
        if delta.reset:
            self.table.clear()
        if len(delta.removed):
            where, found = self.table.locate(delta.removed)
            if found.any():
                self.table.remove(_positions(where)[found])
        self.table.upsert(delta.rows)


def _positions(where: Where) -> Ints:
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where


def _run(offsets: Ints) -> Ints | range:
    """Ascending offsets as a range when they are consecutive, else a copy."""
    first, last = int(offsets[0]), int(offsets[-1])
    return range(first, last + 1) if last - first == len(offsets) - 1 else np.array(offsets)


class Deleted:
    """Stands among the dirty cursors for a group that was deleted."""

    __slots__ = ("_group",)

    def __init__(self, group: GroupRef) -> None:
        self._group = group

    def take_delta(self) -> bytes:
        return encode(GroupDrop(self._group))
