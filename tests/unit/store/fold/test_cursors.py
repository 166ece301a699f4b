"""The columns of a cursor against a reference of plain dicts, and their deltas and snapshots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.store.client import SETTLE_STATUSES, GroupRef, QueueRef
from millpond.store.fold.cursor import Action, Cursor, LastSeek
from millpond.store.fold.cursors import Cursors
from millpond.store.fold.snapshot import Snapshot
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
        st.sampled_from(["grant", "again", "settle", "ranges", "seek", "trim", "deltas", "advance"]),
        st.integers(0, 40),
        st.integers(1, 12),
        st.integers(0, 5),
        st.sampled_from(["ack", "ack", "ack", "nack", "extend", "skip", "release"]),
        st.booleans(),
    ),
    max_size=40,
)


class Pair:
    """A cursor and its reference, to which the same is done."""

    def __init__(self) -> None:
        self.cursors, self.second = Cursors(), Cursors()
        self.cursor, self.reference = self.cursors.open(GROUP, QUEUE, 5), Reference(5)
        self.now = 1000

    def grant(self, _at: int, count: int, back: int, _action: str, flag: bool) -> None:
        first, step = self.reference.head + back, 2 if flag else 1
        self._grant(list(range(first, first + count * step, step)), first + count * step + back)

    def again(self, _at: int, count: int, _back: int, _action: str, _flag: bool) -> None:
        due = {offset for offset, row in self.reference.rows.items() if row.due <= self.now}
        offsets = self.cursor.due_rows(self.now, count).tolist()
        assert offsets == sorted(offsets)
        assert set(offsets) <= due
        assert bool(offsets) == bool(due)
        if offsets:
            self._grant(offsets, self.reference.head)

    def _grant(self, offsets: list[int], head: int) -> None:
        _, attempts = self.cursor.grant(array(offsets), self.now + 50, head)
        assert attempts.tolist() == self.reference.grant(offsets, self.now + 50, head)

    def settle(self, at: int, count: int, back: int, action: Action, flag: bool) -> None:
        offsets = [at - 1 + step * (2 if flag else 1) for step in range(count)]
        if back == 5:
            offsets += offsets[::-1]
        lease = self.reference.next_lease - back
        generation = self.reference.generation - (back == 4) + (back == 3)
        statuses = self.cursor.settle(lease, generation, array(offsets), action, self.now + 20)
        expected = self.reference.settle(lease, generation, offsets, action, self.now + 20)
        assert [SETTLE_STATUSES[status] for status in statuses] == expected

    def ranges(self, at: int, count: int, back: int, action: Action, flag: bool) -> None:
        firsts = [at] if flag else [at, at + 2 * count, at + count // 2]
        ranges = [bound for first in firsts for bound in (first, first + count)]
        inside = sorted({offset for first in firsts for offset in range(first, first + count)})
        lease, generation = self.reference.next_lease - back, self.reference.generation
        expected = self.reference.settle(lease, generation, inside, action, self.now + 20)
        status, rows = self.cursor.settle_ranges(lease, generation, array(ranges), action, self.now + 20)
        assert rows == expected.count("ok")
        assert (SETTLE_STATUSES[status] == "ok") == (rows > 0)

    def seek(self, at: int, _count: int, _back: int, _action: str, flag: bool) -> None:
        self.reference.seek(at, flag)
        self.cursor.seek(at, flag, LastSeek(7, at, at))

    def trim(self, at: int, _count: int, _back: int, _action: str, _flag: bool) -> None:
        self.reference.trim(at)
        self.cursor.trim(at)

    def advance(self, _at: int, _count: int, back: int, _action: str, _flag: bool) -> None:
        self.reference.head += back
        self.cursor.advance(self.cursor.head + back)

    def deltas(self, *_: object) -> None:
        _carry_over(self.cursors, self.second)
        assert state_of(self.second.by_key[3, 40]) == state_of(self.cursor)

    def compare(self) -> None:
        cursor, reference = self.cursor, self.reference
        scalars = (reference.generation, reference.head, reference.next_lease, reference.skipped)
        assert state_of(cursor)[:5] == (*scalars, reference.rows)
        assert cursor.committed == min(reference.rows, default=reference.head)
        assert cursor.in_flight == len(reference.rows)
        later = (row.due for row in reference.rows.values() if row.due > self.now)
        assert cursor.earliest_due <= min(later, default=NEVER)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_columns_equal_the_reference(steps: list[tuple[str, int, int, int, str, bool]]) -> None:
    """Any sequence of operations leaves columns and plain dicts equal, here, in a second instance fed by deltas
    (each applied twice), and in one loaded from a snapshot; what one taken on the way holds stays as it was then."""
    pair = Pair()
    held: list[tuple[tuple[object, ...], Snapshot]] = []
    for kind, *arguments in steps:
        pair.now += 10
        getattr(pair, kind)(*arguments)
        pair.compare()
        if arguments[0] % 3 == 0:
            held += [(state_of(one.by_key[3, 40]), one.snapshot()) for one in (pair.cursors, pair.second) if len(one)]
    for state, snapshot in held:
        loaded = Cursors()
        loaded.load(snapshot())
        assert state_of(loaded.by_key[3, 40]) == state
    pair.deltas()
    loaded = Cursors()
    loaded.load(pair.cursors.snapshot()())
    assert state_of(loaded.by_key[3, 40]) == state_of(pair.cursor)
    assert not loaded.changed
    assert not pair.second.changed
    late = {offset for offset, row in pair.reference.rows.items() if row.due <= pair.now + 500}
    assert set(loaded.by_key[3, 40].due_rows(pair.now + 500, 10_000).tolist()) == late


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


def test_a_seek_empties_the_table_of_a_replica() -> None:
    """Rows that a seek drops go where its delta is applied too."""
    cursors, second = Cursors(), Cursors()
    cursor = cursors.open(GROUP, QUEUE, 0)
    cursor.grant(np.arange(5), 10, 5)
    _carry_over(cursors, second)
    cursor.seek(2, False, LastSeek(1, 0, 2))
    _carry_over(cursors, second)
    assert second.by_key[3, 40].in_flight == 0


def test_a_snapshot_of_a_replica_stays_as_it_is() -> None:
    """A delta of rows that it has changes none that a snapshot holds."""
    cursors, second = Cursors(), Cursors()
    cursor = cursors.open(GROUP, QUEUE, 0)
    lease, _ = cursor.grant(np.arange(5), 10, 5)
    _carry_over(cursors, second)
    before, snapshot = state_of(second.by_key[3, 40]), second.snapshot()
    cursor.settle(lease, 1, array([1, 2]), "nack", 90)
    _carry_over(cursors, second)
    loaded = Cursors()
    loaded.load(snapshot())
    assert state_of(loaded.by_key[3, 40]) == before


def test_a_release_counts_as_no_delivery() -> None:
    """What is released has one attempt less, and is handed out with the same number again."""
    cursor = Cursors().open(GROUP, QUEUE, 0)
    lease, _ = cursor.grant(np.arange(3), 10, 3)
    cursor.settle(lease, 1, array([1]), "release", 0)
    assert cursor.table.rows().attempt.tolist() == [1, 0, 1]
    assert cursor.grant(np.arange(3), 20, 3)[1].tolist() == [2, 1, 2]


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


def test_what_is_done_to_a_dropped_cursor_is_not_gathered() -> None:
    """By who still holds it: a receive that was under way. Neither alone, nor in place of the one that came after."""
    cursors, second = Cursors(), Cursors()
    old = cursors.open(GROUP, QUEUE, 5)
    cursors.take_deltas()
    cursors.drop_queue(QUEUE.queue_id)
    old.grant(np.arange(5, 7), 10, 7)
    assert not cursors.changed
    cursors.open(GROUP, QUEUE, 2)
    old.advance(9)
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
    loaded.load(cursors.snapshot()())
    assert {key: state_of(one) for key, one in loaded.by_key.items()} == {
        key: state_of(one) for key, one in cursors.by_key.items()
    }


def test_a_grant_and_the_ack_of_a_part_of_it_in_one_delta() -> None:
    """Runs that overlap are looked at row by row: what was granted and not acked stays."""
    cursors, second = Cursors(), Cursors()
    cursor = cursors.open(GROUP, QUEUE, 0)
    lease, _ = cursor.grant(np.arange(20), 10, 20)
    cursor.settle_ranges(lease, 1, array([0, 5]), "ack", 0)
    _carry_over(cursors, second)
    assert second.by_key[3, 40].table.rows().offset.tolist() == list(range(5, 20))


def test_rows_granted_again_keep_their_own_attempts() -> None:
    """A run that is handed out again is not alike in every row."""
    cursors, second = Cursors(), Cursors()
    cursor = cursors.open(GROUP, QUEUE, 0)
    for first in (0, 5):
        cursor.grant(np.arange(first, 10), 10, 10)
    cursor.take_delta()
    cursor.grant(np.arange(10), 20, 10)
    _carry_over(cursors, second)
    assert second.by_key[3, 40].table.rows().attempt.tolist() == [2] * 5 + [3] * 5


def test_whole_runs_are_one_run_each() -> None:
    """Thousands of rows that were granted and acked alike take the room of two runs, whoever encodes them."""
    cursors, second = Cursors(), Cursors()
    cursor = cursors.open(GROUP, QUEUE, 0)
    first, _ = cursor.grant(np.arange(10_000), 10, 10_000)
    _carry_over(cursors, second)
    cursor.grant(np.arange(10_000, 30_000), 20, 30_000)
    cursor.settle_ranges(first, 1, array([0, 10_000]), "ack", 0)
    payload, operations = cursors.take_deltas()
    second.apply(payload, operations)
    assert state_of(second.by_key[3, 40]) == state_of(cursor)
    assert len(payload) < 200


@pytest.mark.parametrize(("first", "end"), [(0, 3), (3, 5), (4, 10), (7, 8), (0, 10)])
def test_one_run_alone(first: int, end: int) -> None:
    """A grant, and the ack of a run of it, each alone in its delta, go where that is applied, seek and all."""
    cursors, second = Cursors(), Cursors()
    cursor = cursors.open(GROUP, QUEUE, 0)
    cursor.grant(np.arange(20), 50, 20)
    _carry_over(cursors, second)
    cursor.seek(0, False, LastSeek(7, 20, 0))
    lease, _ = cursor.grant(np.arange(10), 77, 10)
    _carry_over(cursors, second)
    assert second.by_key[3, 40].table.rows().offset.tolist() == list(range(10))
    cursor.settle_ranges(lease, 2, array([first, end]), "ack", 0)
    _carry_over(cursors, second)
    left = [offset for offset in range(10) if not first <= offset < end]
    assert second.by_key[3, 40].table.rows().offset.tolist() == left
    assert second.by_key[3, 40].in_flight == len(left)
