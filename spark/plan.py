"""A plan: which offsets of a topic a read covers, and which tier objects hold them.

`GET /v1/topics/{topic}/history` answers it. A plan fixes offset ranges, never objects: an object may be compacted
away before it is read. Objects only prune: a stretch of the tier that no planned object covers has no message of
the asked time.

    queue 0   start_offset           tiered_to      end_offset
              |  object A  | (pruned) |  object B | hot ... |
    stretches  [----------]            [-------------------]
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

import msgspec

from millpond.core.limits import SPARK_PARTITION_BYTES, SPARK_PARTITION_ROWS
from millpond.spark.http import HttpClient, path_of

ClockName = Literal["store", "born"]

HOT_MESSAGE_BYTES = 256  # what a message that is not tiered yet is taken for when partitions are cut


class PlanRange(msgspec.Struct, frozen=True):
    """Offsets [first, end) of one queue in one object; both clocks in ms."""

    queue: int
    first: int
    end: int
    rows: int
    min_store_ts: int
    max_store_ts: int
    min_born_ts: int | None = None
    max_born_ts: int | None = None


class PlanObject(msgspec.Struct, frozen=True):
    url: str
    bytes: int
    footer_bytes: int
    ranges: list[PlanRange]


class PlanQueue(msgspec.Struct, frozen=True):
    """start_offset: first not deleted; tiered_to: the tier holds all below it; end_offset: confirmed end."""

    queue: int
    start_offset: int
    tiered_to: int
    end_offset: int


class HistoryPlan(msgspec.Struct, frozen=True):
    topic: str
    topic_id: int
    tier_version: int
    objects: list[PlanObject]
    queues: list[PlanQueue]


class Stretch(msgspec.Struct, frozen=True):
    """Offsets [first, end) of one queue that may hold asked messages, and about how many bytes they are."""

    queue: int
    first: int
    end: int
    bytes: int


def fetch_plan(
    client: HttpClient, topic: str, from_ms: int | None = None, to_ms: int | None = None, clock: ClockName = "store"
) -> HistoryPlan:
    """Plan `from_ms` <= clock value < `to_ms`. Raises NotFound(topic_not_found), Unreachable."""
    query = {"from": from_ms, "to": to_ms, "clock": clock}
    return client.get(path_of("topics", topic, "history"), HistoryPlan, query)


def stretches(
    plan: HistoryPlan, bounds: dict[int, tuple[int, int]] | None = None, *, timed: bool = False
) -> list[Stretch]:
    """What must be read, per queue in order: planned object ranges and the hot rest, cut to what there is.

    `bounds`: queue -> [first, end), only these queues and offsets. `timed`: the plan was asked for a time, so what
    no object covers was pruned; else the objects tell sizes only.
    """
    held: dict[int, list[Stretch]] = {}
    for obj in plan.objects:
        rows = sum(part.rows for part in obj.ranges) or 1
        for part in obj.ranges:
            size = obj.bytes * part.rows // rows
            held.setdefault(part.queue, []).append(Stretch(part.queue, part.first, part.end, size))
    found: list[Stretch] = []
    for queue in plan.queues:
        if bounds is not None and queue.queue not in bounds:
            continue
        low, high = (queue.start_offset, queue.end_offset) if bounds is None else bounds[queue.queue]
        low, high = max(low, queue.start_offset), min(high, queue.end_offset)
        cold = sorted(held.get(queue.queue, []), key=lambda stretch: stretch.first)
        if not timed:
            cold = list(_filled(cold, queue))
        hot = max(0, queue.end_offset - queue.tiered_to)
        whole = [*cold, Stretch(queue.queue, queue.tiered_to, queue.end_offset, hot * HOT_MESSAGE_BYTES)]
        found += _joined(clipped for stretch in whole if (clipped := _clip(stretch, low, high)) is not None)
    return found


def partitions(stretched: Iterable[Stretch], bytes_most: int = SPARK_PARTITION_BYTES) -> list[Stretch]:
    """Cut stretches into pieces of about `bytes_most` and at most SPARK_PARTITION_ROWS messages."""
    pieces: list[Stretch] = []
    for stretch in stretched:
        rows = stretch.end - stretch.first
        count = min(rows, max(1, -(-stretch.bytes // bytes_most), -(-rows // SPARK_PARTITION_ROWS)))
        edges = [stretch.first + rows * number // count for number in range(count + 1)]
        size = stretch.bytes // count
        pieces += [Stretch(stretch.queue, first, end, size) for first, end in pairwise(edges)]
    return pieces


def _filled(cold: list[Stretch], queue: PlanQueue) -> Iterable[Stretch]:
    """`cold` with its holes closed: without a time nothing was pruned, so a hole only has no known size."""
    at = queue.start_offset
    for stretch in cold:
        if stretch.first > at:
            yield Stretch(queue.queue, at, stretch.first, (stretch.first - at) * HOT_MESSAGE_BYTES)
        yield stretch
        at = max(at, stretch.end)
    if at < queue.tiered_to:
        yield Stretch(queue.queue, at, queue.tiered_to, (queue.tiered_to - at) * HOT_MESSAGE_BYTES)


def _clip(stretch: Stretch, low: int, high: int) -> Stretch | None:
    first, end = max(stretch.first, low), min(stretch.end, high)
    if first >= end:
        return None
    size = stretch.bytes * (end - first) // (stretch.end - stretch.first)
    return Stretch(stretch.queue, first, end, size)


def _joined(stretched: Iterable[Stretch]) -> list[Stretch]:
    """Neighbours as one; what overlaps (an object sealed while the plan was made) is read once."""
    joined: list[Stretch] = []
    for stretch in stretched:
        last = joined[-1] if joined else None
        if last is not None and stretch.first <= last.end:
            joined[-1] = Stretch(last.queue, last.first, max(last.end, stretch.end), last.bytes + stretch.bytes)
        else:
            joined.append(stretch)
    return joined
