"""GET /v1/topics/{topic}/messages/{id} and GET /v1/topics/{topic}/messages?key=: find messages."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from millpond.core.errors import BadRequest, NotFound, OffsetOutOfRange
from millpond.core.http.call import Input, answer
from millpond.core.http.routing import Route
from millpond.core.http.whole import pieces
from millpond.core.limits import FIND_MESSAGES, KEY_BYTES, RECEIVE_BYTES, RECEIVE_MESSAGES, TIMESTAMP_MS_MOST
from millpond.core.names import check_name
from millpond.metadata.client import TopicInfo
from millpond.proxy import message_id, tags
from millpond.proxy.codec import answers
from millpond.proxy.codec.answers import MessageOut, Rows
from millpond.proxy.parts import ProxyCall
from millpond.proxy.routes.receive import in_range
from millpond.proxy.searching import Found, Place, Search, by_key

_TOKEN = re.compile(r"(\d{1,15})\.(-1|\d{1,9})\.(-1|\d{1,18})", re.ASCII)


class FindQuery(Input, frozen=True):
    """`from` <= store time in ms < `to`. `page_token`: the `next_page_token` of the page before."""

    key: str
    from_: int = msgspec.field(default=0, name="from")
    to: int = TIMESTAMP_MS_MOST
    limit: int = FIND_MESSAGES
    page_token: str | None = None


class FindAnswer(msgspec.Struct, frozen=True):
    """Newest first. A page may be empty and still have a `next_page_token`: the search goes on there."""

    messages: list[MessageOut]
    next_page_token: str | None


async def find_by_id(call: ProxyCall) -> web.StreamResponse:
    text = call.params["id"]
    topic = await call.parts.catalog.topic(call.principal.tenant, check_name("topic", call.params["topic"]))
    parsed = message_id.parse(text)
    queue = next((one for one in topic.queues if parsed is not None and one.queue_id == parsed.queue_id), None)
    if parsed is None or queue is None or message_id.prefix(queue, parsed.offset) + str(parsed.offset) != text:
        raise _unknown(text)
    try:
        found = await call.parts.reader.read(topic, queue, parsed.offset, 1, RECEIVE_BYTES)
    except OffsetOutOfRange as error:
        raise _unknown(text) from error
    if not found.batches:
        raise _unknown(text)
    rows = Rows(found.batches[0], message_id.prefix(queue, parsed.offset))
    return answer(answers.messages(topic.name, rows)[0])


def _unknown(text: str) -> NotFound:
    return NotFound("message_not_found", f"there is no message {text[:80]!r} in this topic")


async def find_by_key(call: ProxyCall) -> web.StreamResponse:
    media_type = call.accepts(*answers.MEDIA_TYPES)
    query = call.query(FindQuery)
    key = tags.encoded(query.key, "key")
    in_range("key", len(key), 1, KEY_BYTES)
    in_range("from", query.from_, 0, TIMESTAMP_MS_MOST)
    in_range("to", query.to, query.from_, TIMESTAMP_MS_MOST)
    in_range("limit", query.limit, 1, RECEIVE_MESSAGES)
    topic = await call.parts.catalog.topic(call.principal.tenant, check_name("topic", call.params["topic"]))
    search = Search(key, query.from_, query.to, query.limit, _place(query.page_token))
    found = await by_key(call.parts.reader, topic, search)
    token = None if found.rest is None else ".".join(map(str, found.rest))
    beside: dict[str, Any] = {"next_page_token": token}
    body = await answers.encode(media_type, topic.name, _by_queue(topic, found), beside)
    return pieces(call.request, body, media_type)


def _place(token: str | None) -> Place | None:
    if token is None:
        return None
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise BadRequest.field("page_token", "a next_page_token of this search", token)
    return Place(*map(int, found.groups()))


def _by_queue(topic: TopicInfo, found: Found) -> list[Rows]:
    """Runs of rows of one queue, in the order found."""
    numbers = found.rows.column("queue").to_numpy()
    if not len(numbers):
        return []
    queues = {queue.queue: queue for queue in topic.queues}
    bounds = np.concatenate(([0], np.flatnonzero(np.diff(numbers)) + 1, [len(numbers)])).tolist()
    rows = []
    for first, end in pairwise(bounds):
        batch = found.rows.slice(first, end - first)
        rows.append(Rows(batch, message_id.prefix(queues[int(numbers[first])], batch.column("offset")[0].as_py())))
    return rows


ROUTES = [
    Route(
        method="GET",
        path="/v1/topics/{topic}/messages/{id}",
        handler=find_by_id,
        summary="One message by its id",
        answer=MessageOut,
        scope="consume",
        tag="read",
    ),
    Route(
        method="GET",
        path="/v1/topics/{topic}/messages",
        handler=find_by_key,
        summary="Messages by key",
        description="Newest first, from the store's index and from the tier.",
        query=FindQuery,
        answer={answers.JSON: FindAnswer, answers.MSGPACK: FindAnswer, answers.ARROW: None},
        scope="consume",
        tag="read",
    ),
]
