"""The columns of a cursor against a reference of plain dicts, and their deltas and snapshots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.store.client import SETTLE_STATUSES, GroupRef, QueueRef
from millpond.store.fold.cursors import Cursor, Cursors, LastSeek
from millpond.store.fold.unsettled import NEVER

GROUP = GroupRef(1, 2, 3)
QUEUE = QueueRef(1, 2, 40, 0)


class Row(NamedTuple):
    lease: int
    due: int
    attempt: int
    state: int


class Reference:
    """What a cursor is, without columns."""

    def __init__(self, head: int) -> None:
        self.generation, self.head, self.next_lease, self.skipped = 1, head, 1, 0
        self.rows: dict[int, Row] = {}

    def grant(self, offsets: list[int], due: int, head: int) -> list[int]:
        for offset in offsets:
            attempt = self.rows[offset].attempt if offset in self.rows else 0
            self.rows[offset] = Row(self.next_lease, due, attempt + 1, 1)
        self.next_lease += 1
        self.head = head
        return [self.rows[offset].attempt for offset in offsets]

    def settle(self, lease: int, generation: int, offsets: list[int], action: str, due: int) -> list[str]:
        before = dict(self.rows)
        return [self._status(before, lease, generation, offset, action, due) for offset in offsets]

    def _status(self, before: dict[int, Row], lease: int, generation: int, offset: int, action: str, due: int) -> str:
        if generation != self.generation:
            return "void" if generation < self.generation else "unknown"
        if not 0 < lease < self.next_lease:
            return "unknown"
        row = before.get(offset)
        if row is None:
            return "already" if 0 <= offset < self.head else "unknown"
        if row.lease != lease:
            return "redelivered"
        if action in {"ack", "skip"}:
            self.rows.pop(offset, None)
            return "ok"
        if row.state != 1:
            return "already"
        state = 1 if action == "extend" else 2
        self.rows[offset] = Row(lease, due, row.attempt - (action == "release"), state)
        return "ok"

    def seek(self, to: int, keep: bool) -> None:
        self.generation += 1
        self.head = to
        self.rows = {offset: row for offset, row in self.rows.items() if keep and offset < to}

    def trim(self, start: int) -> None:
        self.rows = {offset: row for offset, row in self.rows.items() if offset >= start}
        self.skipped += max(0, start - self.head)
        self.head = max(self.head, start)


def state_of(cursor: Cursor) -> tuple[object, ...]:
    rows = cursor.table.rows()
    table = {
        int(offset): Row(*map(int, row))
        for offset, *row in zip(rows.offset, rows.lease, rows.due, rows.attempt, rows.state, strict=True)
    }
    return cursor.generation, cursor.head, cursor.next_lease, cursor.skipped, table, cursor.last_seek


def array(offsets: list[int]) -> np.ndarray:
    return np.array(offsets, np.int64)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grant", "again", "settle", "ranges", "seek", "trim", "delta", "advance"]),
        st.integers(0, 40),
        st.integers(1, 12),
        st.integers(0, 5),
        st.sampled_from(["ack", "ack", "ack", "nack", "extend", "skip", "release"]),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_columns_equal_the_reference(steps: list[tuple[str, int, int, int, str, bool]]) -> None:
    """Any sequence of operations leaves columns and plain dicts equal, here, in a second instance fed by deltas
    (each applied twice), and in one loaded from a snapshot."""
    cursors, second = Cursors(), Cursors()
    cursor, reference = cursors.open(GROUP, QUEUE, 5), Reference(5)
    now = 1000
    for kind, at, count, back, action, flag in steps:
        now += 10
        if kind == "grant":
            step = 2 if flag else 1
            offsets = list(range(reference.head + back, reference.head + back + count * step, step))
            head = offsets[-1] + 1 + back
            assert cursor.grant(array(offsets), now + 50, head)[1].tolist() == reference.grant(offsets, now + 50, head)
        elif kind == "again":
            due = {offset for offset, row in reference.rows.items() if row.due <= now}
            offsets = cursor.due_rows(now, count).tolist()
            assert offsets == sorted(offsets)
            assert set(offsets) <= due
            assert bool(offsets) == bool(due)
            if offsets:
                attempts = cursor.grant(array(offsets), now + 50, cursor.head)[1].tolist()
                assert attempts == reference.grant(offsets, now + 50, reference.head)
        elif kind == "settle":
            offsets = [at - 1 + step * (2 if flag else 1) for step in range(count)]
            if back == 5:
                offsets += offsets[::-1]
            arguments = (reference.next_lease - back, reference.generation - (back == 4) + (back == 3))
            statuses = cursor.settle(*arguments, array(offsets), action, now + 20)
            expected = reference.settle(*arguments, offsets, action, now + 20)
            assert [SETTLE_STATUSES[status] for status in statuses] == expected
        elif kind == "ranges":
            firsts = [at] if flag else [at, at + 2 * count, at + count // 2]
            ranges = [bound for first in firsts for bound in (first, first + count)]
            inside = sorted({offset for first in firsts for offset in range(first, first + count)})
            expected = reference.settle(reference.next_lease - back, reference.generation, inside, action, now + 20)
            status, rows = cursor.settle_ranges(
                reference.next_lease - back, cursor.generation, array(ranges), action, now + 20
            )
            assert rows == expected.count("ok")
            assert (SETTLE_STATUSES[status] == "ok") == (rows > 0)
        elif kind == "seek":
            reference.seek(at, flag)
            cursor.seek(at, flag, LastSeek(7, at, at))
        elif kind == "trim":
            reference.trim(at)
            cursor.trim(at)
        elif kind == "advance":
            reference.head += back
            cursor.advance(cursor.head + back)
        else:
            _carry_over(cursors, second)
            assert state_of(second.by_key[3, 40]) == state_of(cursor)
        assert state_of(cursor)[:5] == (
            reference.generation, reference.head, reference.next_lease, reference.skipped, reference.rows,
        )  # fmt: skip
        assert cursor.committed == min(reference.rows, default=reference.head)
        assert cursor.in_flight == len(reference.rows)
        assert cursor.earliest_due <= min((row.due for row in reference.rows.values() if row.due > now), default=NEVER)
    _carry_over(cursors, second)
    loaded = Cursors()
    loaded.load(cursors.snapshot())
    for other in (second, loaded):
        assert state_of(other.by_key[3, 40]) == state_of(cursor)
        assert not other.dirty
    late = {offset for offset, row in reference.rows.items() if row.due <= now + 500}
    assert set(loaded.by_key[3, 40].due_rows(now + 500, 10_000).tolist()) == late


def _carry_over(cursors: Cursors, second: Cursors) -> None:
    payload, operations = cursors.take_deltas()
    assert len(payload) % 8 == 0
    for _ in range(2):
        second.apply(payload, operations)
        if operations:
            assert state_of(second.by_key[3, 40]) == state_of(cursors.by_key[3, 40])


def test_gathered_changes_are_one_operation() -> None:
    """All grants and settles between two frames are one operation for each cursor."""
    cursors = Cursors()
    cursor = cursors.open(GROUP, QUEUE, 0)
    for offset in range(100):
        lease, _ = cursor.grant(array([offset]), 10, offset + 1)
        if offset % 2:
            cursor.settle(lease, 1, array([offset]), "ack", 0)
    assert cursors.take_deltas()[1] == 1
    assert cursors.take_deltas() == (b"", 0)


def test_a_large_table_keeps_every_row() -> None:
    """Growing, dying at the front and compacting loses and invents nothing."""
    cursor = Cursors().open(GROUP, QUEUE, 0)
    live: set[int] = set()
    for turn in range(60):
        first = cursor.head
        lease, _ = cursor.grant(np.arange(first, first + 1000), 10, first + 1000)
        live |= set(range(first, first + 1000))
        keep = first + turn * 7
        cursor.settle_ranges(lease, 1, array([first, keep, keep + 3, first + 1000]), "ack", 0)
        live -= set(range(first, keep)) | set(range(keep + 3, first + 1000))
        assert cursor.table.rows().offset.tolist() == sorted(live)
    cursor.settle(1, 1, array([0, 1, 2]), "ack", 0)
    assert cursor.committed == 1007


def test_dropped_cursors_are_not_gathered() -> None:
    """A group dropped and opened again in one turn is dropped first, then opened."""
    cursors, second = Cursors(), Cursors()
    cursors.open(GROUP, QUEUE, 5)
    second.apply(*cursors.take_deltas())
    cursors.by_key[3, 40].advance(9)
    cursors.delete_group(GROUP)
    cursors.open(GROUP, QUEUE, 2)
    second.apply(*cursors.take_deltas())
    assert second.by_key[3, 40].head == 2


@pytest.mark.parametrize("count", [0, 1, 3])
def test_snapshot_of_many_cursors(count: int) -> None:
    """A snapshot holds every cursor with its own rows."""
    cursors = Cursors()
    for queue_id in range(count):
        cursor = cursors.open(GROUP, QueueRef(1, 2, queue_id, queue_id), 0)
        if queue_id != 1:
            cursor.grant(np.arange(queue_id + 1), 10, 9)
    loaded = Cursors()
    loaded.load(cursors.snapshot())
    assert {key: state_of(one) for key, one in loaded.by_key.items()} == {
        key: state_of(one) for key, one in cursors.by_key.items()
    }
