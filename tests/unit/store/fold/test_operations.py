"""The bytes of state operations: pinned, and refused when they are not ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.store.client import GroupRef, QueueRef
from millpond.store.fold import operations as ops
from millpond.store.fold.operations import CursorDelta, Operation, Rows

GOLDEN = Path(__file__).parents[3] / "golden" / "state_operations.v1.hex"


def rows_of(rows: list[tuple[int, int, int, int, int]]) -> Rows:
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    types = (np.int64, np.int64, np.int64, np.uint32, np.uint8)
    return Rows._make(np.array(column, dtype) for column, dtype in zip(columns, types, strict=True))


def delta(rows: list[tuple[int, int, int, int, int]], removed: list[int], reset: bool = False) -> CursorDelta:
    return CursorDelta(
        GroupRef(1, 2, 3), QueueRef(1, 2, 40, 0), 5, 1_000, 77, 9, 123_456_789, 10, 20, reset,
        rows_of(rows), np.array(removed, np.int64),
    )  # fmt: skip


EVERY_KIND: list[Operation] = [
    delta([(10, 7, 99, 1, 1), (11, 7, 99, 1, 1), (12, 7, 99, 2, 1), (20, 8, 50, 1, 2)], [3, 4, 5, 9]),
    delta([], [], reset=True),
    ops.QueueOpen(QueueRef(1, 2, 41, 1), 100),
    ops.QueueTrim(41, 60),
    ops.QueueDrop(41),
    ops.GroupDrop(GroupRef(1, 2, 3)),
    ops.ProducerClose(41, "replay.früh.41"),
]


def comparable(operation: Operation) -> object:
    if isinstance(operation, CursorDelta):
        return [value.tolist() if isinstance(value, np.ndarray) else
                [column.tolist() for column in value] if isinstance(value, Rows) else value
                for value in operation]  # fmt: skip
    return operation


def test_golden_bytes() -> None:
    """Every kind of operation is written as it was in version 1, and read back from those bytes."""
    payload = b"".join(ops.encode(operation) for operation in EVERY_KIND)
    golden = bytes.fromhex(GOLDEN.read_text())
    assert payload == golden
    decoded = list(ops.decode(golden, len(EVERY_KIND)))
    assert [comparable(one) for one in decoded] == [comparable(one) for one in EVERY_KIND]


ROW = st.tuples(
    st.integers(0, 30), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2**32 - 1), st.integers(1, 2)
)  # fmt: skip


@given(st.lists(ROW, unique_by=lambda row: row[0]), st.sets(st.integers(0, 40)), st.booleans())
def test_round_trip(rows: list[tuple[int, int, int, int, int]], removed: set[int], reset: bool) -> None:
    """Any rows and removals come back as they went."""
    one = delta(sorted(rows), sorted(removed), reset)
    payload = ops.encode(one)
    assert len(payload) % 8 == 0
    (back,) = ops.decode(payload, 1)
    assert comparable(back) == comparable(one)


def test_a_contiguous_grant_is_one_run() -> None:
    """A grant of a thousand messages takes no more bytes than one of a single message."""
    thousand = delta([(offset, 7, 99, 1, 1) for offset in range(1000)], [])
    assert len(ops.encode(thousand)) == len(ops.encode(delta([(0, 7, 99, 1, 1)], [])))


@pytest.mark.parametrize(("at", "value"), [(0, 7), (2, 2)])
def test_newer_formats_are_refused(at: int, value: int) -> None:
    """An unknown kind or version is refused with an error that names the newer format."""
    payload = bytearray(ops.encode(ops.QueueDrop(4)))
    payload[at] = value
    with pytest.raises(ops.NewerFormat, match="newer format"):
        list(ops.decode(bytes(payload), 1))


@pytest.mark.parametrize("operation", EVERY_KIND, ids=lambda one: type(one).__name__)
def test_cut_payloads_are_refused(operation: Operation) -> None:
    """A payload cut at any byte, or with more behind it, is an error, never a wrong operation."""
    payload = ops.encode(operation)
    for length in range(len(payload)):
        with pytest.raises(ValueError, match=r"cut short|does not fit"):
            list(ops.decode(payload[:length], 1))
    with pytest.raises(ValueError, match="after the last"):
        list(ops.decode(payload + bytes(8), 1))
