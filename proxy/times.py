"""From a millisecond to an offset: the store for what is local, manifest and tier for what is older."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from millpond.core.limits import TIMESTAMP_MS_MOST
from millpond.metadata.client import ObjectRange, QueueInfo, TopicInfo
from millpond.proxy.manifest_views import reference
from millpond.proxy.read_range import RangeReader
from millpond.store.client import QueueEnds, TimeRequest

ClockName = Literal["store", "born"]
TIME_EXPECTED = f"milliseconds since 1970, 0 to {TIMESTAMP_MS_MOST}"


def by_store(queues: Sequence[QueueInfo]) -> dict[str, list[QueueInfo]]:
    """Queues by the group that takes their next message, in a stable order."""
    groups: dict[str, list[QueueInfo]] = defaultdict(list)
    for queue in queues:
        groups[queue.spans[-1].store_group].append(queue)
    return dict(groups)


async def ends_of(reader: RangeReader, queues: Sequence[QueueInfo]) -> dict[int, QueueEnds]:
    """Queue id -> ends, from as few calls as there are stores."""
    groups = by_store(queues)
    answers = await asyncio.gather(
        *(reader.stores.group(name).queues([queue.queue_id for queue in some]) for name, some in groups.items())
    )
    return {ends.queue_id: ends for some in answers for ends in some}


async def offsets_at(
    reader: RangeReader, topic: TopicInfo, queues: Sequence[QueueInfo], ts: int, clock: ClockName
) -> dict[int, int]:
    """Queue id -> first offset whose clock value is >= `ts`; the confirmed end when all are older.

    By `store` that is a boundary: all later ones are at least as new. By `born` it promises nothing about later ones.
    """
    ends = await ends_of(reader, queues)
    found: dict[int, int] = {}
    cold: list[QueueInfo] = []
    for name, some in by_store(queues).items():
        result = await reader.stores.group(name).offsets_at(TimeRequest([q.queue_id for q in some], ts, clock))
        for queue, offset, local in zip(some, result.offsets, result.local, strict=True):
            found[queue.queue_id] = offset
            if not local:
                cold.append(queue)
    older = await asyncio.gather(
        *(_cold_offset(reader, topic, queue, ts, clock, ends[queue.queue_id]) for queue in cold)
    )
    for queue, earlier in zip(cold, older, strict=True):
        if earlier is not None:
            found[queue.queue_id] = min(earlier, found[queue.queue_id])
    for queue in queues:
        found[queue.queue_id] = max(found[queue.queue_id], ends[queue.queue_id].start_offset)
    return found


async def _cold_offset(
    reader: RangeReader, topic: TopicInfo, queue: QueueInfo, ts: int, clock: ClockName, ends: QueueEnds
) -> int | None:
    """The first offset in the tier with clock value >= `ts`, or None. Objects are told apart by their least and
    greatest times, so it is in the first whose greatest reaches `ts`, and only that one is opened."""
    view = await reader.metadata.tier_view(topic.topic_id, [queue.queue_id], ends.start_offset)
    ranges = [(one, obj) for obj in view.objects for one in obj.ranges if one.queue_id == queue.queue_id]
    ranges.sort(key=lambda pair: pair[0].first)
    for one, obj in ranges:
        if _latest(one, clock) >= ts:
            found = await reader.tier.first_at(reference(obj), queue.queue, ts, clock)
            if found is not None:
                return found
    return None


def _latest(one: ObjectRange, clock: ClockName) -> int:
    if clock == "store":
        return one.max_store_ts
    return -1 if one.max_born_ts is None else one.max_born_ts
