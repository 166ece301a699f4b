"""History of a topic: the plan that Spark and others read by, sealing on demand, and producer sessions."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from aiohttp import web

from millpond.core import limits
from millpond.core.errors import BadRequest, NotFound
from millpond.core.http.call import Input, answer, empty
from millpond.core.http.fields import Time
from millpond.core.http.routing import Route
from millpond.metadata.client import ObjectRange, QueueInfo, TierObject, TopicInfo
from millpond.proxy.parts import Parts, ProxyCall
from millpond.proxy.routes.topics import QueueState, queue_states, stores_of, topic_of
from millpond.proxy.times import by_store
from millpond.store.client import ProducerState

SEAL_MS = 120_000  # sealing on demand writes whole objects: longer than other calls

ClockName = Literal["store", "born"]


class HistoryQuery(Input, frozen=True, forbid_unknown_fields=True, rename={"from_ms": "from", "to_ms": "to"}):
    """`from` <= clock value < `to`, in ms; what is left out is open. `clock`: the store's, or the producer's own."""

    from_ms: Time | None = None
    to_ms: Time | None = None
    clock: ClockName = "store"


class PlanRange(msgspec.Struct, frozen=True):
    """What an object holds of one queue: offsets [first, end), all of them; both clocks in ms."""

    queue: int
    first: int
    end: int
    rows: int
    min_store_ts: int
    max_store_ts: int
    min_born_ts: int | None
    max_born_ts: int | None


class PlanObject(msgspec.Struct, frozen=True):
    """One Parquet object at `url`; `sha256` in hex."""

    url: str
    bytes: int
    footer_bytes: int
    sha256: str
    ranges: list[PlanRange]


class HistoryPlan(msgspec.Struct, frozen=True):
    """Objects that may hold messages of the asked time, and each queue's ends: below `start_offset` messages are
    deleted, [tiered_to, end_offset) is not in the tier yet. A plan fixes offsets, not objects: one that is gone when
    it is read was compacted, so ask again."""

    topic: str
    topic_id: int
    tier_version: int
    objects: list[PlanObject]
    queues: list[QueueState]


class FlushedQueue(msgspec.Struct, frozen=True):
    queue: int
    tiered_to: int


class Flushed(msgspec.Struct, frozen=True):
    queues: list[FlushedQueue]


class SessionQueue(msgspec.Struct, frozen=True):
    """`last`: the session's last accepted sequence number in this queue, at `last_ts`."""

    queue: int
    last: int
    last_ts: int


class Session(msgspec.Struct, frozen=True):
    producer: str
    queues: list[SessionQueue]


async def get_history(call: ProxyCall) -> web.StreamResponse:
    query = call.query(HistoryQuery)
    topic = await topic_of(call)
    parts = call.parts
    view = await parts.metadata.tier_view(topic.topic_id)  # before the ends: tiered_to never passes them
    queues = await queue_states(parts, topic, view.tiered_to)
    starts = {queue.queue: queue.start_offset for queue in queues}
    prefix = parts.objects.url.rstrip("/")
    planned = [_planned(obj, prefix, starts, query) for obj in view.objects]
    objects = [obj for obj in planned if obj.ranges]
    return answer(HistoryPlan(topic.name, topic.topic_id, view.version, objects, queues))


def _planned(obj: TierObject, prefix: str, starts: dict[int, int], query: HistoryQuery) -> PlanObject:
    """`obj` with those of its ranges that are not deleted and may hold messages of the asked time."""
    ranges = [
        PlanRange(r.queue, r.first, r.end, r.rows, r.min_store_ts, r.max_store_ts, r.min_born_ts, r.max_born_ts)
        for r in obj.ranges
        if r.end > starts.get(r.queue, 0) and _overlaps(r, query)
    ]
    return PlanObject(f"{prefix}/{obj.path}", obj.bytes, obj.footer_bytes, obj.sha256, ranges)


def _overlaps(held: ObjectRange, query: HistoryQuery) -> bool:
    if query.from_ms is None and query.to_ms is None:
        return True
    least, most = held.min_store_ts, held.max_store_ts
    if query.clock == "born":
        if held.min_born_ts is None or held.max_born_ts is None:
            return False  # no message of it says when it was born
        least, most = held.min_born_ts, held.max_born_ts
    after = query.from_ms is None or most >= query.from_ms
    return after and (query.to_ms is None or least < query.to_ms)


async def flush(call: ProxyCall) -> web.StreamResponse:
    """Seal now: everything confirmed when this call arrived is in the tier when it answers."""
    topic = await topic_of(call)
    sealed = await asyncio.gather(*(store.seal(topic.topic_id, SEAL_MS) for store in stores_of(call.parts, topic)))
    reached = {queue_id: offset for one in sealed for queue_id, offset in one.items()}
    return answer(Flushed([FlushedQueue(q.queue, reached.get(q.queue_id, 0)) for q in topic.queues]))


async def get_producer(call: ProxyCall) -> web.StreamResponse:
    producer = _producer_id(call)
    topic = await topic_of(call)
    states = await _sessions(call.parts, topic, producer)
    if not states:
        raise NotFound("producer_not_found", f"no session {producer!r} in topic {topic.name!r}")
    queues = [
        SessionQueue(queue.queue, state.last, state.last_ts)
        for queue in topic.queues
        if (state := states.get(queue.queue_id)) is not None
    ]
    return answer(Session(producer, queues))


async def delete_producer(call: ProxyCall) -> web.StreamResponse:
    """Close the session: its numbers are forgotten. Idempotent."""
    producer = _producer_id(call)
    topic = await topic_of(call)
    stores = call.parts.stores
    await asyncio.gather(
        *(stores.group(name).close_producer(_ids(queues), producer) for name, queues in by_store(topic.queues).items())
    )
    return empty()


async def _sessions(parts: Parts, topic: TopicInfo, producer: str) -> dict[int, ProducerState]:
    found = await asyncio.gather(
        *(parts.stores.group(name).producers(_ids(queues), producer) for name, queues in by_store(topic.queues).items())
    )
    return {state.queue_id: state for states in found for state in states}


def _ids(queues: list[QueueInfo]) -> list[int]:
    return [queue.queue_id for queue in queues]


def _producer_id(call: ProxyCall) -> str:
    producer = call.params["producer"]
    if len(producer.encode()) > limits.PRODUCER_ID_BYTES or not producer.isprintable():
        raise BadRequest.field("producer", f"at most {limits.PRODUCER_ID_BYTES} bytes of printable text", producer)
    return producer


_PRODUCER = "/v1/topics/{topic}/producers/{producer}"
ROUTES = [
    Route(
        method="GET",
        path="/v1/topics/{topic}/history",
        handler=get_history,
        summary="Plan a read of the topic's history",
        query=HistoryQuery,
        answer=HistoryPlan,
        scope="consume",
    ),
    Route(
        method="POST",
        path="/v1/topics/{topic}/flush",
        handler=flush,
        summary="Seal everything confirmed to the tier now",
        answer=Flushed,
        scope="any",
    ),
    Route(
        method="GET",
        path=_PRODUCER,
        handler=get_producer,
        summary="Where a producer session stands",
        answer=Session,
        scope="produce",
    ),
    Route(
        method="DELETE",
        path=_PRODUCER,
        handler=delete_producer,
        summary="Close a producer session",
        statuses=(204,),
        scope="produce",
    ),
]
