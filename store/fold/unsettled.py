"""The unsettled table: the offsets of one cursor that were handed out and not acknowledged, as columns.

    offset   i64   ascending, each below the cursor's head
    lease    i64   number of the lease it was last handed out under; -1 in a dead row
    due      i64   ms: when it may be handed out (again); NEVER in a dead row
    attempt  u32   deliveries counted so far
    state    u8    0 dead  1 leased  2 waiting (nacked or released)

A settled row only dies; its place is taken back when dead rows outnumber the living or stand at the front.
So settling a thousand of a hundred thousand rows touches a thousand rows. The columns are freed when empty.
A row whose lease has ended needs no sweep: it is one whose due time has passed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.store.fold.operations import Ints, Row, Rows

DEAD, LEASED, WAITING = 0, 1, 2
NEVER = np.iinfo(np.int64).max
_LEAST_ROWS = 16  # 10,000 queues with a row each cost 464 bytes each
_DEAD_ROWS = 1024  # not worth compacting below
_TYPES = (np.int64, np.int64, np.int64, np.uint32, np.uint8)
_MOST = np.iinfo(np.uint32).max

Mask = npt.NDArray[np.bool_]
Where = Ints | slice
"""Positions of rows: either an ascending array or a slice."""

_NOTHING: Ints = np.empty(0, np.int64)
NO_ROWS = Rows._make(np.empty(0, dtype) for dtype in _TYPES)


class Unsettled:
    """Positions are valid until the next `append`, `remove` or `upsert`."""

    __slots__ = ("_due_offsets", "_end", "_held", "_start", "columns", "earliest_due", "live")

    def __init__(self) -> None:
        self.columns = NO_ROWS
        self._held = False  # the rows that there are belong to a snapshot, too: they are copied before they change
        self._start = 0  # the first row that may live
        self._end = 0
        self.live = 0
        self.earliest_due = NEVER
        """Never later than the least due time of the rows that `due` has not found due yet."""
        self._due_offsets = _NOTHING  # found due by the last scan, by due time

    # -- finding rows -----------------------------------------------------------------------------------------

    @property
    def first(self) -> int | None:
        """The least offset, None when empty."""
        return int(self.columns.offset[self._start]) if self.live else None

    def locate(self, offsets: Ints) -> tuple[Where, Mask]:
        """Where ascending `offsets` stand, and which of them live. Positions of those that do not are arbitrary."""
        count = len(offsets)
        if not self.live or not count:
            return np.zeros(count, np.int64), np.zeros(count, np.bool_)
        column = self.columns.offset[self._start : self._end]
        at = int(column.searchsorted(offsets[0])) + self._start
        last = at + count - 1
        if (
            last < self._end
            and self.columns.offset[at] == offsets[0]
            and (count == 1 or (self.columns.offset[last] == offsets[-1] and offsets[-1] - offsets[0] == count - 1))
        ):
            where = slice(at, last + 1)  # consecutive offsets, all in the table: no search for each
            return where, self.columns.state[where] != DEAD
        positions = column.searchsorted(offsets)
        np.minimum(positions, len(column) - 1, out=positions)
        positions += self._start
        found = self.columns.offset[positions] == offsets
        found &= self.columns.state[positions] != DEAD
        return positions, found

    def row(self, offset: int) -> Row | None:
        """The living row of this offset."""
        columns = self.columns
        at = self._start + int(columns.offset[self._start : self._end].searchsorted(offset))
        if at == self._end or columns.offset[at] != offset or columns.state[at] == DEAD:
            return None
        return Row._make(column.item(at) for column in columns)

    def span(self, first: int, end: int) -> slice:
        """The rows of first <= offset < end, dead ones among them."""
        column = self.columns.offset[self._start : self._end]
        return slice(int(column.searchsorted(first)) + self._start, int(column.searchsorted(end)) + self._start)

    def due(self, now: int, limit: int) -> Ints:
        """Offsets, ascending, of up to `limit` rows that are due, those due longest first."""
        if now >= self.earliest_due:
            self._scan_due(now)
        while len(self._due_offsets):
            offsets = np.sort(self._due_offsets[:limit])
            where, found = self.locate(offsets)
            found &= self.columns.due[where] <= now
            if found.all():
                return offsets
            offsets = offsets[found]
            self._due_offsets = np.concatenate([offsets, self._due_offsets[limit:]])
            if len(offsets):
                return offsets
        self._due_offsets = _NOTHING
        return _NOTHING

    def _scan_due(self, now: int) -> None:
        due = self.columns.due[self._start : self._end]
        ripe = due <= now
        positions = np.flatnonzero(ripe)
        if len(positions) > 1:
            positions = positions[np.argsort(due[positions], kind="stable")]
        self._due_offsets = self.columns.offset[self._start : self._end][positions]
        self.earliest_due = int(due[~ripe].min(initial=NEVER))

    # -- changing rows ----------------------------------------------------------------------------------------

    def append(self, offsets: Ints, lease: int, due: int, attempts: npt.NDArray[np.uint32] | int) -> None:
        """Leased rows above all others."""
        count = len(offsets)
        self._reserve(count)
        rows = slice(self._end, self._end + count)
        columns = self.columns
        columns.offset[rows] = offsets
        columns.lease[rows] = lease
        columns.due[rows] = due
        columns.attempt[rows] = attempts
        columns.state[rows] = LEASED
        self._end += count
        self.live += count
        self.earliest_due = min(self.earliest_due, due)

    def lease_again(self, where: Where, lease: int, due: int) -> npt.NDArray[np.uint32]:
        """Under this lease now, with one attempt more; the attempts."""
        self.change(where, due, LEASED, attempts=1)
        self.columns.lease[where] = lease
        return np.array(self.columns.attempt[where])

    def change(self, where: Where, due: int, state: int, attempts: int = 0) -> None:
        """`attempts`: how many are added to each row's; a delivery that was none takes one away."""
        self._own()
        if attempts:
            self.columns.attempt[where] += np.uint32(attempts & _MOST)
        self.columns.due[where] = due
        self.columns.state[where] = state
        self.earliest_due = min(self.earliest_due, due)

    def remove(self, where: Where) -> None:
        """These rows, all living and each named once, are settled."""
        self.live -= where.stop - where.start if isinstance(where, slice) else len(where)
        if not self.live:
            self.clear()
            return
        self._own()
        columns = self.columns
        columns.state[where] = DEAD
        columns.lease[where] = -1
        columns.due[where] = NEVER
        if columns.state[self._start] == DEAD:
            self._pass_dead()
        dead = self._end - self._start - self.live
        if dead > _DEAD_ROWS and dead > self.live:
            self._hold(self.rows())

    def clear(self) -> None:
        self.columns, self._held = NO_ROWS, False
        self._start = self._end = self.live = 0
        self.earliest_due = NEVER
        self._due_offsets = _NOTHING

    def _pass_dead(self) -> None:
        """Move the start to the first living row, in growing steps: the dead are passed once."""
        step = 64
        while True:
            states = self.columns.state[self._start : self._start + step]
            at = int((states != DEAD).argmax())
            if states[at] != DEAD:
                self._start += at
                return
            self._start += len(states)
            step *= 4

    def _reserve(self, count: int) -> None:
        if self._end + count <= len(self.columns.offset):
            return
        used = slice(self._start, self._end)
        held = self._end - self._start
        room = max(_LEAST_ROWS, held + count + held // 2)
        grown = Rows._make(np.empty(room, dtype) for dtype in _TYPES)
        for column, old in zip(grown, self.columns, strict=True):
            column[:held] = old[used]
        self.columns, self._held = grown, False
        self._start, self._end = 0, held

    def _own(self) -> None:
        """Rows are about to change: not those of a snapshot. Positions stay."""
        if not self._held:
            return
        used = slice(self._start, self._end)
        own = Rows._make(np.empty_like(column) for column in self.columns)
        for column, old in zip(own, self.columns, strict=True):
            column[used] = old[used]
        self.columns, self._held = own, False

    # -- all rows ---------------------------------------------------------------------------------------------

    def held(self) -> Unsettled:
        """The same rows, which stay as they are whatever happens to these: what is appended stands behind them, and
        what changes is copied first."""
        self._held = True
        same = Unsettled()
        same.columns, same.live, same._start, same._end = self.columns, self.live, self._start, self._end
        return same

    def rows(self) -> Rows:
        """A copy of the living rows."""
        return self.at(self.living())

    def living(self) -> Where:
        """Where the living rows are."""
        if self.live == self._end - self._start:
            return slice(self._start, self._end)
        return np.flatnonzero(self.columns.state[self._start : self._end]) + self._start

    def at(self, where: Where) -> Rows:
        """A copy of the rows at these positions."""
        return Rows._make(np.array(column[where]) for column in self.columns)

    def upsert(self, rows: Rows) -> None:
        """Put these rows (ascending) in the place of those with the same offsets; the others are new."""
        if not len(rows.offset):
            return
        where, found = self.locate(rows.offset)
        if found.all():
            self._own()
            for column, new in zip(self.columns, rows, strict=True):
                column[where] = new
        else:
            self._merge(rows)
        self.earliest_due = min(self.earliest_due, int(rows.due.min()))

    def _merge(self, rows: Rows) -> None:
        kept = self.rows()
        keep: Any = ~np.isin(kept.offset, rows.offset, assume_unique=True)
        both = [np.concatenate([old[keep], new]) for old, new in zip(kept, rows, strict=True)]
        order = np.argsort(both[0], kind="stable")
        self._hold(Rows._make(column[order] for column in both))

    def _hold(self, rows: Rows) -> None:
        """Exactly these living rows. What was found due stays known by offset."""
        self.columns, self._held = rows, False
        self._start, self._end = 0, len(rows.offset)
        self.live = self._end
