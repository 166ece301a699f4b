"""Cursors: the progress of groups, one `Cursor` for each (group, queue).

`head`: everything below it was handed out once (or skipped by the filter); the unsettled table (`unsettled`)
names what of it is still to be acknowledged. `generation` rises with every seek and makes older leases void.

Persisted as *absolute deltas*: a mutation remembers which offsets it touched; `take_deltas` gives, for every
cursor touched since, one operation with the final state of its scalars and of those rows (`operations` draws the
bytes). So all grants and settles gathered between two frames are one operation for each (group, queue), and
applying an operation twice changes nothing. Nothing here reads a clock: due times are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.store.client import SETTLE_STATUSES, GroupRef, QueueRef
from millpond.store.fold.operations import (
    CursorDelta,
    GroupDrop,
    Ints,
    Operation,
    QueueDrop,
    QueueTrim,
    Rows,
    decode,
    encode,
    encode_runs,
    spread,
)
from millpond.store.fold.unsettled import DEAD, LEASED, NEVER, WAITING, Mask, Unsettled, Where

OK, ALREADY, REDELIVERED, VOID, UNKNOWN = range(len(SETTLE_STATUSES))
assert SETTLE_STATUSES == ("ok", "already", "redelivered", "void", "unknown")

Action = Literal["ack", "nack", "extend", "skip", "release"]
Statuses = npt.NDArray[np.uint8]
Key = tuple[int, int]
"""(group id, queue id)"""

_NO_QUEUE = -1
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

    def __init__(self, group: GroupRef, queue: QueueRef, head: int, dirty: dict[Key, Cursor | _Deleted]) -> None:
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

    @property
    def earliest_due(self) -> int:
        """No row that `due_rows` has not found yet is due before this; NEVER when there is none."""
        return self.table.earliest_due

    def mark(self) -> None:
        """A scalar was changed, or will be in this turn: the next gathering takes this cursor along."""
        self._dirty[self.key] = self

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
        columns = self.table.columns
        columns.attempt[where] += np.uint32(1)
        columns.lease[where] = lease
        self.table.change(where, due, LEASED)
        return np.array(columns.attempt[where])

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
        else:
            if action == "release":  # was never delivered: the next delivery has the same attempt
                self.table.columns.attempt[where] -= np.uint32(1)
            self.table.change(where, due, WAITING)

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
        encoded = self._known_runs() or encode(self._delta(*self._touched_rows()))
        self._touched.clear()
        self._reset = False
        return encoded

    def _delta(self, rows: Rows, removed: Ints) -> CursorDelta:
        return CursorDelta(
            self.group, self.queue, self.generation, self.head, self.next_lease, self.skipped, *self.last_seek,
            self._reset, rows, removed,
        )  # fmt: skip

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


class _Deleted:
    """Stands among the dirty cursors for a group that was deleted."""

    __slots__ = ("_group",)

    def __init__(self, group: GroupRef) -> None:
        self._group = group

    def take_delta(self) -> bytes:
        return encode(GroupDrop(self._group))


class Cursors:
    """All cursors of a store. `dirty`: those with changes that no operation holds yet."""

    def __init__(self) -> None:
        self.by_key: dict[Key, Cursor] = {}
        self._of_queue: dict[int, dict[int, Cursor]] = {}  # queue id -> group id -> cursor
        self.dirty: dict[Key, Cursor | _Deleted] = {}

    def __len__(self) -> int:
        return len(self.by_key)

    def get(self, group_id: int, queue_id: int) -> Cursor | None:
        return self.by_key.get((group_id, queue_id))

    def open(self, group: GroupRef, queue: QueueRef, head: int) -> Cursor:
        """A new cursor of a group, which hands out from `head` on."""
        cursor = self._add(group, queue, head)
        cursor.mark()
        return cursor

    def _add(self, group: GroupRef, queue: QueueRef, head: int) -> Cursor:
        cursor = Cursor(group, queue, head, self.dirty)
        assert cursor.key not in self.by_key
        self.by_key[cursor.key] = cursor
        self._of_queue.setdefault(queue.queue_id, {})[group.group_id] = cursor
        return cursor

    def delete_group(self, group: GroupRef) -> None:
        """Forget a group's cursors, and say so with the next deltas, before those of a group opened anew."""
        self.drop_group(group)
        self.dirty[group.group_id, _NO_QUEUE] = _Deleted(group)

    def drop_group(self, group: GroupRef) -> None:
        """Forget a group's cursors. The log says so already."""
        self._drop(key for key in self.by_key if key[0] == group.group_id)

    def drop_queue(self, queue_id: int) -> None:
        """Forget the cursors in a queue. The caller writes QUEUE_DROP."""
        self._drop([(group_id, queue_id) for group_id in self._of_queue.get(queue_id, ())])

    def trim_queue(self, queue_id: int, start_offset: int) -> None:
        """Move the cursors of a queue up to its first kept offset. The caller writes QUEUE_TRIM."""
        for cursor in self._of_queue.get(queue_id, {}).values():
            cursor.trim(start_offset)

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in list(keys):
            del self.by_key[key]
            self.dirty.pop(key, None)
            group_id, queue_id = key
            of_queue = self._of_queue[queue_id]
            del of_queue[group_id]
            if not of_queue:
                del self._of_queue[queue_id]

    # -- persistence ------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """Whether there is anything for `take_deltas` to take."""
        return bool(self.dirty)

    def take_deltas(self) -> tuple[bytes, int]:
        """The payload of one state frame, and how many operations it holds; empty and 0 when nothing changed."""
        operations = [changed.take_delta() for changed in self.dirty.values()]
        self.dirty.clear()
        return b"".join(operations), len(operations)

    def apply(self, payload: bytes | memoryview, operations: int) -> list[Operation]:
        """Fold a state frame. Returns the operations that others must fold too (all but CURSOR and GROUP_DROP).

        Raises NewerFormat, ValueError.
        """
        others: list[Operation] = []
        for operation in decode(payload, operations):
            match operation:
                case CursorDelta():
                    self.apply_delta(operation)
                case GroupDrop(group):
                    self.drop_group(group)
                case QueueDrop(queue_id):
                    self.drop_queue(queue_id)
                case QueueTrim(queue_id, start_offset):
                    self.trim_queue(queue_id, start_offset)
                case _:
                    pass
            if not isinstance(operation, CursorDelta | GroupDrop):
                others.append(operation)
        return others

    def apply_delta(self, delta: CursorDelta) -> None:
        """Idempotent."""
        cursor = self.get(delta.group.group_id, delta.queue.queue_id)
        if cursor is None:
            cursor = self._add(delta.group, delta.queue, delta.head)
        cursor.apply(delta)

    # -- snapshot ---------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, pa.Table]:
        """A copy of all columns: one row for each cursor, and one for each unsettled row (`cursor`: its number)."""
        cursors = list(self.by_key.values())
        scalars = np.array([_scalars(cursor) for cursor in cursors], np.int64).reshape(-1, len(_SCALARS))
        busy = [(number, cursor.table.rows()) for number, cursor in enumerate(cursors) if cursor.in_flight]
        counts = [len(rows.offset) for _, rows in busy]
        numbers = np.repeat(np.array([number for number, _ in busy], np.int64), counts)
        columns = {"cursor": numbers}
        for name, empty in _ROWS.items():
            columns[name] = np.concatenate([empty, *(getattr(rows, name) for _, rows in busy)])
        return {
            "cursors": pa.table({name: scalars[:, at].copy() for at, name in enumerate(_SCALARS)}),
            "cursors.rows": pa.table(columns),
        }

    def load(self, tables: dict[str, pa.Table]) -> None:
        """Into an empty instance, what `snapshot` gave."""
        assert not self.by_key
        cursors = [self._loaded(*row.values()) for row in tables["cursors"].to_pylist()]
        rows = {name: column.to_numpy() for name, column in zip(
            tables["cursors.rows"].column_names, tables["cursors.rows"].columns, strict=True)}  # fmt: skip
        bounds = rows["cursor"].searchsorted(np.arange(len(cursors) + 1))
        busy = np.flatnonzero(np.diff(bounds))
        for number in busy.tolist():
            where = slice(bounds[number], bounds[number + 1])
            cursors[number].table.upsert(Rows._make(np.array(rows[name][where]) for name in _ROWS))

    def _loaded(
        self, tenant: int, topic: int, group: int, queue_id: int, queue: int, generation: int, head: int,
        next_lease: int, skipped: int, seek_hash: int, seek_from: int, seek_to: int,
    ) -> Cursor:  # fmt: skip
        cursor = self._add(GroupRef(tenant, topic, group), QueueRef(tenant, topic, queue_id, queue), head)
        cursor.generation, cursor.next_lease, cursor.skipped = generation, next_lease, skipped
        cursor.last_seek = LastSeek(seek_hash, seek_from, seek_to)
        return cursor


_ROWS = {name: np.empty(0, dtype) for name, dtype in zip(
    Rows._fields, (np.int64, np.int64, np.int64, np.uint32, np.uint8), strict=True)}  # fmt: skip
_SCALARS = (
    "tenant_id", "topic_id", "group_id", "queue_id", "queue", "generation", "head", "next_lease", "skipped",
    "seek_hash", "seek_from", "seek_to",
)  # fmt: skip


def _scalars(cursor: Cursor) -> tuple[int, ...]:
    group, queue = cursor.group, cursor.queue
    return (
        group.tenant_id, group.topic_id, group.group_id, queue.queue_id, queue.queue, cursor.generation, cursor.head,
        cursor.next_lease, cursor.skipped, *cursor.last_seek,
    )  # fmt: skip
