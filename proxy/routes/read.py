"""GET /v1/topics/{topic}/queues/{queue}/messages: read a queue by offset, time or tail, without a group."""

from __future__ import annotations

import msgspec
from aiohttp import web

from millpond.core.errors import BadRequest, NotFound
from millpond.core.http.call import Input
from millpond.core.http.routing import Route
from millpond.core.http.whole import pieces
from millpond.core.limits import (
    OFFSET_MOST,
    QUEUES_PER_TOPIC,
    READ_MESSAGES,
    RECEIVE_BYTES,
    RECEIVE_BYTES_MOST,
    TIMESTAMP_MS_MOST,
    WAIT_MS,
)
from millpond.core.names import check_name
from millpond.metadata.client import QueueInfo, TopicInfo
from millpond.proxy import message_id, tags
from millpond.proxy.codec import answers
from millpond.proxy.codec.answers import MessageOut, Rows
from millpond.proxy.parts import ProxyCall
from millpond.proxy.routes.receive import in_range
from millpond.proxy.times import ClockName, ends_of, offsets_at

DEFAULT_LIMIT = 100


class ReadQuery(Input, frozen=True):
    """Exactly one of `offset`, `time` (ms; the first message at or after it by `clock`), `tail` (the last so many).
    `filter` is a tag expression."""

    offset: int | None = None
    time: int | None = None
    tail: int | None = None
    clock: ClockName = "store"
    limit: int | None = None
    max_bytes: int = RECEIVE_BYTES
    wait_ms: int = 0
    filter: str | None = None


class ReadAnswer(msgspec.Struct, frozen=True):
    """Read on at `next_offset`. `start_offset`: the first kept; `end_offset`: where the next message will stand. With a
    filter an empty answer may have made progress."""

    messages: list[MessageOut]
    start_offset: int
    next_offset: int
    end_offset: int


def queue_of(topic: TopicInfo, text: str) -> QueueInfo:
    """The queue of this number. Raises NotFound(queue_not_found), BadRequest when it is no number."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadRequest.field("queue", f"a number from 0 to {QUEUES_PER_TOPIC - 1}", text)
    for queue in topic.queues:
        if queue.queue == int(text):
            return queue
    raise NotFound("queue_not_found", f"topic {topic.name!r} has no queue {int(text)}")


async def read(call: ProxyCall) -> web.StreamResponse:
    media_type = call.accepts(*answers.MEDIA_TYPES)
    query = call.query(ReadQuery)
    limit = _check(query)
    tag = tags.parse(query.filter, "filter")
    topic = await call.parts.catalog.topic(call.principal.tenant, check_name("topic", call.params["topic"]))
    queue = queue_of(topic, call.params["queue"])
    offset = await _offset(call, query, topic, queue)
    found = await call.parts.reader.read(topic, queue, offset, limit, query.max_bytes, query.wait_ms, tag, call.pause)
    beside = {
        "start_offset": found.ends.start_offset,
        "next_offset": found.next_offset,
        "end_offset": max(found.ends.end_offset, found.next_offset),
    }
    rows = [Rows(batch, message_id.prefix(queue, offset)) for batch in found.batches if batch.num_rows]
    call.parts.counters.add("read_messages_total", sum(one.batch.num_rows for one in rows))
    body = await answers.encode(media_type, topic.name, rows, beside, call.pause)
    return pieces(call.request, body, media_type)


def _check(query: ReadQuery) -> int:
    """The number of messages wanted. Raises BadRequest naming the bad parameter."""
    if sum(one is not None for one in (query.offset, query.time, query.tail)) != 1:
        raise BadRequest.field("offset", "exactly one of offset, time, tail")
    if query.offset is not None:
        in_range("offset", query.offset, 0, OFFSET_MOST)
    if query.time is not None:
        in_range("time", query.time, 0, TIMESTAMP_MS_MOST)
    if query.tail is not None:
        in_range("tail", query.tail, 1, READ_MESSAGES)
    if query.clock != "store" and query.time is None:
        raise BadRequest.field("clock", "to stand beside time", query.clock)
    in_range("wait_ms", query.wait_ms, 0, WAIT_MS)
    in_range("max_bytes", query.max_bytes, 1, RECEIVE_BYTES_MOST)
    default = DEFAULT_LIMIT if query.tail is None else query.tail
    return in_range("limit", default if query.limit is None else query.limit, 1, READ_MESSAGES)


async def _offset(call: ProxyCall, query: ReadQuery, topic: TopicInfo, queue: QueueInfo) -> int:
    """Where reading begins."""
    if query.offset is not None:
        return query.offset
    if query.time is not None:
        return (await offsets_at(call.parts.reader, topic, [queue], query.time, query.clock))[queue.queue_id]
    assert query.tail is not None
    ends = (await ends_of(call.parts.reader, [queue]))[queue.queue_id]
    return max(ends.start_offset, ends.end_offset - query.tail)


ROUTES = [
    Route(
        method="GET",
        path="/v1/topics/{topic}/queues/{queue}/messages",
        handler=read,
        summary="Read a queue",
        description="Messages of one queue from an offset, a time or the tail on, from the store or from the tier. An"
        " offset below the first kept is 410 offset_expired, one beyond the end 416 offset_out_of_range.",
        query=ReadQuery,
        answer={answers.JSON: ReadAnswer, answers.MSGPACK: ReadAnswer, answers.ARROW: None},
        scope="consume",
        waits=True,
        bulk=True,
        tag="read",
    )
]
