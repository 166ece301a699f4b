"""Messages by key: frames the store's index names, and rows of the tier below them, newest first.

Hashes and statistics only preselect; the key itself decides. A message may be in both (sealed and not yet
recycled): it counts once. A search is bounded (FIND_FRAMES, FIND_OBJECTS); where it had to stop is its `horizon`,
and what is not newer than that is left to the next page, so that pages together miss nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.hashing import hash_bytes
from millpond.core.limits import FIND_FRAMES, FIND_OBJECTS
from millpond.core.schema import TIER_SCHEMA
from millpond.metadata.client import QueueInfo, TierObject, TopicInfo
from millpond.proxy.manifest_views import reference
from millpond.proxy.read_range import RangeReader, one_batch
from millpond.proxy.times import by_store, ends_of
from millpond.store.client import FindRequest, QueueEnds

NOWHERE = -1


class Place(NamedTuple):
    """Where a page ended: rows after it have a lesser `ts`, or an equal one and a greater (queue, offset)."""

    ts: int
    queue: int
    offset: int


class Search(NamedTuple):
    """Times in ms of the store's clock: from_ts <= time < to_ts. `after`: what the page before ended with."""

    key: bytes
    from_ts: int
    to_ts: int
    limit: int
    after: Place | None


class Found(NamedTuple):
    """`rows`: TIER_SCHEMA, newest first. `rest`: where the next page begins, None when this is the last."""

    rows: pa.RecordBatch
    rest: Place | None


class _Source(NamedTuple):
    """Some matching rows, and the time down to which they are all there are (NOWHERE: to the beginning)."""

    batches: list[pa.RecordBatch]
    horizon: int


async def by_key(reader: RangeReader, topic: TopicInfo, search: Search) -> Found:
    """One page of messages with this key. Raises Unavailable, Internal (corrupt_range, tier_corrupt)."""
    to_ts = search.to_ts if search.after is None else min(search.to_ts, search.after.ts + 1)
    search = search._replace(to_ts=to_ts)
    hot = await asyncio.gather(*(_hot(reader, name, queues, search) for name, queues in by_store(topic.queues).items()))
    # The ends are asked for after the hot search: what was recycled in between is then looked for in the tier.
    ends = await ends_of(reader, topic.queues)
    horizon = max(source.horizon for source in hot)
    batches = [batch for source in hot for batch in source.batches]
    cold = await _cold(reader, topic, search, ends, [_times(batch) for batch in batches])
    horizon = max(horizon, cold.horizon)
    batches += cold.batches
    return _page(batches, search, horizon, ends, topic)


async def _hot(reader: RangeReader, name: str, queues: Sequence[QueueInfo], search: Search) -> _Source:
    """Rows of one store: frames newest first."""
    numbers = {queue.queue_id: queue.queue for queue in queues}
    request = FindRequest(list(numbers), hash_bytes(search.key), search.from_ts, search.to_ts, FIND_FRAMES)
    frames = await reader.stores.group(name).find(request)
    batches = []
    for frame in frames:
        batch = reader.frames.open(name, frame, numbers[frame.queue_id])
        batches.append(batch.filter(pc.equal(batch.column("key"), pa.scalar(search.key, pa.binary()))))
    horizon = frames[-1].store_ts if len(frames) >= FIND_FRAMES else NOWHERE
    # Frames of one millisecond that fill a whole search cannot be told apart by time: go on below them.
    return _Source(batches, horizon - 1 if horizon >= search.to_ts - 1 else horizon)


async def _cold(
    reader: RangeReader,
    topic: TopicInfo,
    search: Search,
    ends: dict[int, QueueEnds],
    times: list[npt.NDArray[np.int64]],
) -> _Source:
    """Rows that are no longer local, objects with the newest messages first, until a page is full of newer ones.

    `times`: of the rows found so far. Cold rows of one queue may be newer than hot ones of another. It never stops
    above the last millisecond searched, so that the next page begins below this one.
    """
    below = {queue_id: one.local_offset for queue_id, one in ends.items() if one.local_offset > one.start_offset}
    if not below:
        return _Source([], NOWHERE)
    view = await reader.metadata.tier_view(topic.topic_id, list(below))
    wanted = [(_newest(obj), obj, queues) for obj in view.objects if (queues := _queues_of(obj, search, below))]
    wanted.sort(key=lambda one: -one[0])
    batches: list[pa.RecordBatch] = []
    for number, (newest, obj, queues) in enumerate(wanted):
        newer = sum(int((some > newest).sum()) for some in times)
        if newest < search.to_ts - 1 and (number >= FIND_OBJECTS or newer > search.limit):
            return _Source(batches, newest)
        batch = one_batch(await reader.tier.find_key(reference(obj), queues, search.key))
        batches.append(batch)
        times.append(_times(batch))
    return _Source(batches, NOWHERE)


def _times(rows: pa.RecordBatch | pa.Table) -> npt.NDArray[np.int64]:
    ts: npt.NDArray[np.int64] = rows.column("store_ts").cast(pa.int64()).to_numpy()
    return ts


def _queues_of(obj: TierObject, search: Search, below: dict[int, int]) -> list[int]:
    """Numbers of the queues for which this object may hold a wanted row that is no longer local."""
    return [
        one.queue
        for one in obj.ranges
        if one.first < below.get(one.queue_id, 0)
        and one.max_store_ts >= search.from_ts
        and one.min_store_ts < search.to_ts
    ]


def _newest(obj: TierObject) -> int:
    return max(one.max_store_ts for one in obj.ranges)


def _page(
    batches: list[pa.RecordBatch], search: Search, horizon: int, ends: dict[int, QueueEnds], topic: TopicInfo
) -> Found:
    """Sort, drop repeats and what is not asked for, cut at the limit and at the horizon."""
    table = pa.Table.from_batches(batches, TIER_SCHEMA) if batches else TIER_SCHEMA.empty_table()
    ts = _times(table)
    queue, offset = table.column("queue").to_numpy(), table.column("offset").to_numpy()
    order = np.lexsort((offset, queue, -ts))
    ts, queue, offset = ts[order], queue[order], offset[order]
    keep = (ts >= search.from_ts) & (ts < search.to_ts) & (ts > horizon)
    keep[1:] &= (queue[1:] != queue[:-1]) | (offset[1:] != offset[:-1])
    starts = {one.queue: ends[one.queue_id].start_offset for one in topic.queues}
    keep &= offset >= np.array([starts[number] for number in queue.tolist()], np.int64)
    if search.after is not None:
        last = search.after
        keep &= (ts < last.ts) | (queue > last.queue) | ((queue == last.queue) & (offset > last.offset))
    chosen = np.flatnonzero(keep)
    rest: Place | None = Place(horizon, NOWHERE, NOWHERE) if horizon > max(NOWHERE, search.from_ts - 1) else None
    if len(chosen) > search.limit:
        chosen = chosen[: search.limit]
        at = chosen[-1]
        rest = Place(int(ts[at]), int(queue[at]), int(offset[at]))
    return Found(one_batch(table.take(pa.array(order[chosen]))), rest)
