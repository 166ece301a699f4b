"""Deduplication windows: what they find, forget and hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import TooManyRequests
from millpond.store.client import Duplicate, QueueRef
from millpond.store.fold import dedup as module
from millpond.store.fold.dedup import Dedup

Q = QueueRef(1, 2, 40, 0)
WINDOW_MS = 60_000


def hashes(*numbers: int) -> np.ndarray:
    """Each number's hash; those equal modulo 100 share the first half."""
    pairs = np.array([[number % 100, number] for number in numbers], "<u8").reshape(-1, 2)
    return np.ascontiguousarray(pairs).view("V16").reshape(-1)


def checks(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)


def test_a_repeat_answers_the_first() -> None:
    """A repeated id answers offset and time of the first, and whether the body was another."""
    dedup = Dedup()
    dedup.record(Q, hashes(1, 2, 3), checks(11, 12, 13), 500, 1_000_000)
    found = dedup.probe(Q, hashes(9, 3, 101, 1), checks(0, 13, 0, 99), 1_000_001, WINDOW_MS)
    assert found == [Duplicate(1, 502, 1_000_000), Duplicate(3, 500, 1_000_000, mismatch=True)]


def test_ids_count_within_a_queue_and_a_topic() -> None:
    """The same id in another queue, or another topic, is another one."""
    dedup = Dedup()
    dedup.record(Q, hashes(1), checks(1), 500, 1_000_000)
    for other in (QueueRef(1, 2, 41, 1), QueueRef(1, 3, 50, 0)):
        assert dedup.probe(other, hashes(1), checks(1), 1_000_000, WINDOW_MS) == []


def test_the_window_counts_by_the_entrys_own_time() -> None:
    """An entry answers for exactly the window that the append names, whatever bucket it is in."""
    dedup = Dedup()
    dedup.record(Q, hashes(1), checks(1), 500, 1_000_001)
    assert dedup.probe(Q, hashes(1), checks(1), 1_060_000, WINDOW_MS) != []
    assert dedup.probe(Q, hashes(1), checks(1), 1_060_001, WINDOW_MS) == []
    dedup.probe(Q, hashes(1), checks(1), 1_080_001, WINDOW_MS)
    assert dedup.entries(1) == 0


def test_the_window_of_a_tenant_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's full window refuses more, until entries fall out of it; other tenants go on."""
    monkeypatch.setattr(module, "DEDUP_ENTRIES", 3)
    dedup = Dedup()
    dedup.record(Q, hashes(1, 2), checks(1, 2), 500, 1_000_000)
    assert dedup.probe(Q, hashes(1, 3), checks(1, 3), 1_000_000, WINDOW_MS) != []
    with pytest.raises(TooManyRequests):
        dedup.probe(Q, hashes(3, 4), checks(3, 4), 1_000_000, WINDOW_MS)
    dedup.probe(QueueRef(9, 8, 7, 0), hashes(3, 4), checks(3, 4), 1_000_000, WINDOW_MS)
    dedup.probe(Q, hashes(3, 4), checks(3, 4), 1_080_000, WINDOW_MS)


def test_small_appends_make_few_runs() -> None:
    """Ten thousand single appends within one bucket leave a handful of sorted runs."""
    dedup = Dedup()
    for number in range(3_000):
        dedup.record(Q, hashes(number), checks(number), number, 1_000_000)
    (bucket,) = dedup._topics[2].buckets.values()
    assert len(bucket.runs) <= 12
    found = dedup.probe(Q, hashes(*range(3_000)), checks(*range(3_000)), 1_000_000, WINDOW_MS)
    assert [duplicate.offset for duplicate in found] == list(range(3_000))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.lists(st.integers(0, 300), unique=True, max_size=8)), max_size=25))
def test_equals_a_dict(steps: list[tuple[int, list[int]]]) -> None:
    """Any appends over time answer as a plain dict would, also when loaded from a snapshot in between."""
    dedup, reference = Dedup(), dict[int, tuple[int, int]]()
    now, offset = 1_000_000, 0
    for wait_ms, numbers in steps:
        now += wait_ms
        found = dedup.probe(Q, hashes(*numbers), checks(*numbers), now, WINDOW_MS)
        expected = [
            Duplicate(row, *reference[number])
            for row, number in enumerate(numbers)
            if number in reference and reference[number][1] > now - WINDOW_MS
        ]
        assert found == expected
        fresh = [number for row, number in enumerate(numbers) if row not in {one.row for one in found}]
        dedup.record(Q, hashes(*fresh), checks(*fresh), offset, now)
        for number in fresh:
            reference[number] = (offset, now)
            offset += 1
        if wait_ms % 3 == 0:
            tables = dedup.snapshot()()
            dedup = Dedup()
            dedup.load(tables)
            assert {name: table for name, table in dedup.snapshot()().items()} == tables


def test_closed_buckets_are_shared_by_snapshots() -> None:
    """The table of a bucket that time has left is built once, and kept while the bucket is."""
    dedup = Dedup()
    dedup.record(Q, hashes(1), checks(1), 0, 1_000_000)
    dedup.record(Q, hashes(2), checks(2), 1, 1_010_000)
    first, second = dedup.snapshot()(), dedup.snapshot()()
    assert first["dedup.100"] is second["dedup.100"]
    assert first["dedup.101"] is not second["dedup.101"]
    for now in (1_010_001, 1_075_000):  # the first tells the window
        dedup.probe(Q, hashes(3), checks(3), now, WINDOW_MS)
    assert list(dedup.snapshot()()) == ["dedup", "dedup.101"]
    assert list(dedup._closed) == [101]


def test_a_bucket_of_a_topic_that_is_gone_is_built_anew() -> None:
    """Also when the snapshot that was taken before makes its tables afterwards."""
    other = QueueRef(1, 3, 50, 0)
    dedup = Dedup()
    for one in (Q, other):
        dedup.record(one, hashes(1), checks(1), 0, 1_000_000)
    dedup.record(Q, hashes(2), checks(2), 1, 1_010_000)
    before = dedup.snapshot()
    dedup.drop_topic(3)
    assert before()["dedup.100"]["topic_id"].to_pylist() == [2, 3]
    assert dedup.snapshot()()["dedup.100"]["topic_id"].to_pylist() == [2]
