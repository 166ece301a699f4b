"""GET /v1/topics/{topic}/groups/{group}/lag: how far behind a group is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pyarrow as pa
from aiohttp import web

from millpond.core.errors import MillpondError
from millpond.core.http.call import answer
from millpond.core.http.routing import Route
from millpond.core.limits import RECEIVE_BYTES
from millpond.core.names import check_name
from millpond.metadata.client import GroupInfo, QueueInfo, TopicInfo
from millpond.proxy.grants import group_ref
from millpond.proxy.parts import ProxyCall
from millpond.proxy.queue_lists import queue_ref
from millpond.proxy.times import by_store
from millpond.store.client import LagRequest, QueueLag


class QueueBehind(msgspec.Struct, frozen=True):
    """committed: the first message not settled. in_flight: handed out or waiting to be handed out again.

    lag: messages not settled, that is `in_flight` and all that was never handed out: one long lease is one message
    behind. oldest_age_ms: of the message at `committed`; null when there is none, or when it cannot be had right now.
    skipped: expired before they were handed out.
    """

    queue: int
    start_offset: int
    committed: int
    end_offset: int
    lag: int
    in_flight: int
    oldest_age_ms: int | None
    skipped: int


class LagAnswer(msgspec.Struct, frozen=True):
    """`total`: sum of all `lag`."""

    queues: list[QueueBehind]
    total: int


async def lag(call: ProxyCall) -> web.StreamResponse:
    topic = await call.parts.catalog.topic(call.principal.tenant, check_name("topic", call.params["topic"]))
    group, _ = await call.parts.catalog.group(topic, check_name("group", call.params["group"]))
    some = await asyncio.gather(
        *(_of_store(call, topic, group, name, queues) for name, queues in by_store(topic.queues).items())
    )
    queues = sorted((one for part in some for one in part), key=lambda one: one.queue)
    return answer(LagAnswer(queues, sum(one.lag for one in queues)))


async def _of_store(
    call: ProxyCall, topic: TopicInfo, group: GroupInfo, name: str, queues: Sequence[QueueInfo]
) -> list[QueueBehind]:
    request = LagRequest(group_ref(topic, group), [queue_ref(topic, queue) for queue in queues], group.start)
    result = await call.parts.stores.group(name).lag(request)
    by_id = {queue.queue_id: queue for queue in queues}
    ages = await asyncio.gather(
        *(_oldest_age_ms(call, topic, by_id[one.queue_id], one, result.now_ts) for one in result.queues)
    )
    return [
        QueueBehind(
            queue=by_id[one.queue_id].queue,
            start_offset=one.start_offset,
            committed=one.committed,
            end_offset=one.end_offset,
            lag=max(0, one.end_offset - one.head) + one.in_flight,
            in_flight=one.in_flight,
            oldest_age_ms=age_ms,
            skipped=one.skipped,
        )
        for one, age_ms in zip(result.queues, ages, strict=True)
    ]


async def _oldest_age_ms(call: ProxyCall, topic: TopicInfo, queue: QueueInfo, one: QueueLag, now_ts: int) -> int | None:
    """The age of the oldest unsettled message; one that is no longer local is looked up in the tier."""
    if one.committed >= one.end_offset:
        return None
    ts = one.oldest_ts
    if ts < 0:
        try:
            found = await call.parts.reader.read(topic, queue, one.committed, 1, RECEIVE_BYTES)
        except MillpondError:
            return None  # its age is a detail: the other figures are worth more than an error
        if not found.batches:
            return None
        ts = found.batches[0].column("store_ts").cast(pa.int64())[0].as_py()
    return max(0, now_ts - ts)


ROUTES = [
    Route(
        method="GET",
        path="/v1/topics/{topic}/groups/{group}/lag",
        handler=lag,
        summary="How far behind a group is",
        answer=LagAnswer,
        scope="consume",
        tag="groups",
    )
]
