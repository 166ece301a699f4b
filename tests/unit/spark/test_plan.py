"""Plans into stretches and partitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.spark.plan import HistoryPlan, PlanObject, PlanQueue, PlanRange, Stretch, partitions, stretches


def plan(queues: list[PlanQueue], *ranges: tuple[int, int, int]) -> HistoryPlan:
    objects = [PlanObject("file:///x", 1_000, 10, [PlanRange(q, f, e, e - f, 0, 0)]) for q, f, e in ranges]
    return HistoryPlan("t", 1, 1, objects, queues)


def spans(found: list[Stretch]) -> list[tuple[int, int, int]]:
    return [(stretch.queue, stretch.first, stretch.end) for stretch in found]


def test_untimed_covers_everything() -> None:
    """Without a time a queue is one stretch from its start to its end, whatever the objects."""
    found = stretches(plan([PlanQueue(0, 5, 50, 80)], (0, 0, 30), (0, 30, 50)))
    assert spans(found) == [(0, 5, 80)]


def test_timed_leaves_out_what_was_pruned() -> None:
    """With a time, tiered offsets that no planned object holds are left out; the hot rest stays."""
    found = stretches(plan([PlanQueue(0, 0, 50, 80)], (0, 10, 20), (0, 20, 30)), timed=True)
    assert spans(found) == [(0, 10, 30), (0, 50, 80)]


def test_bounds() -> None:
    """Bounds choose queues and offsets and never reach beyond what there is."""
    queues = [PlanQueue(0, 5, 50, 80), PlanQueue(1, 0, 0, 10), PlanQueue(2, 0, 0, 10)]
    assert spans(stretches(plan(queues), {0: (0, 60), 2: (4, 99)})) == [(0, 5, 60), (2, 4, 10)]


def test_expired_offsets_inside_an_object() -> None:
    """An object that reaches below the queue's start is read from the start on."""
    found = stretches(plan([PlanQueue(0, 15, 30, 30)], (0, 10, 30)), {0: (0, 99)}, timed=True)
    assert spans(found) == [(0, 15, 30)]


def test_overlapping_objects_are_read_once() -> None:
    """An object that reaches past tiered_to does not make its offsets twice."""
    found = stretches(plan([PlanQueue(0, 0, 30, 60)], (0, 0, 30), (0, 30, 40)), timed=True)
    assert spans(found) == [(0, 0, 60)]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5_000), st.integers(0, 10**9)), max_size=8),
    st.integers(1, 10**8),
)
def test_partitions_cover_exactly(pieces: list[tuple[int, int, int]], bytes_most: int) -> None:
    """Partitions hold every offset of the stretches once, in order, none empty."""
    stretched = [Stretch(number, first, first + rows, size) for number, (first, rows, size) in enumerate(pieces)]
    cut = partitions(stretched, bytes_most)
    assert all(piece.first < piece.end for piece in cut)
    for stretch in stretched:
        own = [piece for piece in cut if piece.queue == stretch.queue]
        assert [own[0].first, *(piece.end for piece in own)] == [*(p.first for p in own), stretch.end]
        assert own[0].first == stretch.first
