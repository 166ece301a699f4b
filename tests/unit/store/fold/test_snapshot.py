"""Snapshots: what the loop notes at one moment is what a thread makes of it later."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.core.frame import ProducerPart, Sidecar
from millpond.store.client import GroupRef, QueueRef
from millpond.store.fold import operations as ops
from millpond.store.fold import snapshot
from millpond.store.fold.cursor import Action
from millpond.store.fold.fold import Fold
from millpond.store.fold.snapshot import AT_ONCE, parted, table_of

GROUP = GroupRef(1, 2, 3)
QUEUES = [QueueRef(1, 2, number, number) for number in range(3)]


def append(fold: Fold, queue: QueueRef, store_ts: int, sequence: int) -> None:
    """A frame of two messages with dedup ids, as the next part of its producer's session."""
    state = fold.queues.get(queue.queue_id)
    assert state is not None
    part = ProducerPart("p", sequence - 1, sequence, sequence, 0, 2)
    hashes = np.frombuffer(np.array([store_ts, sequence, store_ts, ~sequence], "<i8").tobytes(), "V16")
    none = np.zeros(2, np.uint32)
    sidecar = Sidecar(none, none, None, hashes, none, [part])
    fold.messages(queue.queue_id, state.next_offset, 2, store_ts, sidecar)


def filled() -> Fold:
    fold = Fold()
    for queue in QUEUES:
        fold.perform(ops.QueueOpen(queue, 0))
        for number in range(4):
            append(fold, queue, 1_000_000 + 9_000 * (4 * queue.queue_id + number), number)
        cursor = fold.cursors.open(GROUP, queue, 0)
        cursor.grant(np.arange(6), 10, 6)
    return fold


def test_what_comes_after_a_snapshot_is_not_in_its_tables() -> None:
    """Appends, grants, acks, nacks, a trim, and a topic and a session that end, all before the tables are made."""
    fold = filled()
    expected = fold.snapshot()()
    noted = fold.snapshot()
    actions: list[tuple[Action, Action]] = [("ack", "nack"), ("nack", "ack"), ("release", "ack")]
    for queue, (first, second) in zip(QUEUES, actions, strict=True):
        append(fold, queue, 1_099_500 + queue.queue_id, 4)  # as the newest that it has seen, within ten seconds
        cursor = fold.cursors.by_key[3, queue.queue_id]
        cursor.settle(1, 1, np.arange(1, 3), first, 0)
        cursor.settle(1, 1, np.arange(4, 6), second, 0)
        cursor.grant(np.array([0, 7]), 90, 8)
    fold.perform(ops.QueueTrim(0, 3))
    fold.perform(ops.ProducerClose(1, "p"))
    fold.perform(ops.QueueDrop(2))
    assert noted() == expected
    assert fold.snapshot()() != expected


@pytest.mark.parametrize("rows", [0, 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE])
def test_others_are_given_way_to_between_pieces(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Nothing is left out, and nobody waits for the interpreter for longer than one piece takes."""
    turns: list[int] = []
    monkeypatch.setattr(snapshot, "give_way", lambda: turns.append(1))
    numbers = list(range(rows))
    pieces = list(parted(numbers))
    assert [number for piece in pieces for number in piece] == numbers
    assert max(map(len, pieces)) <= AT_ONCE
    assert len(turns) == len(pieces) - 1


@pytest.mark.parametrize("rows", [0, 1, AT_ONCE + 1])
def test_a_table_of_rows(rows: int) -> None:
    """Each column has its number of every row, in order."""
    table = table_of(range(rows), ("number", "square"), lambda number: (number, number * number))
    assert table.to_pydict() == {"number": list(range(rows)), "square": [number**2 for number in range(rows)]}
