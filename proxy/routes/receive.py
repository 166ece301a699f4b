"""POST /v1/topics/{topic}/groups/{group}/messages/receive: lease messages to one consumer."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from millpond.core.errors import BadRequest, Conflict
from millpond.core.http.call import Input, decode_json, media_type_of
from millpond.core.http.prompt import Prompt, PromptCall
from millpond.core.http.routing import Route
from millpond.core.http.whole import pieces
from millpond.core.limits import (
    LEASE_MS,
    LEASE_MS_LEAST,
    LEASE_MS_MOST,
    NAME_CHARS,
    RECEIVE_BYTES,
    RECEIVE_BYTES_MOST,
    RECEIVE_MESSAGES,
    RECEIVE_ROWS,
    WAIT_MS,
)
from millpond.core.names import check_name
from millpond.metadata.client import GroupInfo, TopicInfo
from millpond.proxy import tags
from millpond.proxy.codec import answers
from millpond.proxy.codec.answers import MessageOut
from millpond.proxy.grants import Receipt, Receiver, Wanted
from millpond.proxy.parts import Parts, ProxyCall
from millpond.proxy.polls import Pieces, Poll

_JSON_OR_NONE = {answers.JSON, ""}
_ASKED = "receive"  # in `PromptCall.seen`
_ASKED_BYTES = 256  # a longer body is read each time: each connection would keep its own


class TagSelection(Input, frozen=True):
    """`tag`: "a || b", or "*" for every message."""

    tag: str = "*"


class ReceiveBody(Input, frozen=True):
    """`filter` and `start` matter to a group that this receive creates; one that is there keeps its own, and another
    filter is 409 filter_differs. With `create` false none is created: 404 group_not_found. `attempt_id`: a repeat
    within a minute gets the same leases."""

    max_messages: int = 1
    wait_ms: int = 0
    lease_ms: int = LEASE_MS
    filter: TagSelection | None = None
    max_bytes: int = RECEIVE_BYTES
    attempt_id: str | None = None
    start: Literal["earliest", "latest"] = "latest"
    create: bool = True


class ReceiveAnswer(msgspec.Struct, frozen=True):
    """`reason`: why there are none (in_flight_full, paused), or why granted ones are missing (an error code; they
    were handed back). `created` and `start`: this call made the group, which begins there."""

    messages: list[MessageOut]
    receipts: list[Receipt]
    reason: str | None = None
    created: bool | None = None
    start: str | None = None


def in_range(field: str, value: int, least: int, most: int) -> int:
    """`value` itself, or BadRequest naming `field`."""
    if not least <= value <= most:
        raise BadRequest.field(field, f"{least} to {most}", value)
    return value


async def receive(call: ProxyCall) -> web.StreamResponse:
    media_type = call.accepts(*answers.MEDIA_TYPES)
    body = await call.json(ReceiveBody)
    named = _checked(body, media_type)
    topic = await call.parts.catalog.topic(call.principal.tenant, check_name("topic", call.params["topic"]))
    group, created = await _group(call, topic, body, named)
    receiver = Receiver(call.parts, _wanted(topic, group, body))
    started = {"created": True, "start": group.start} if created else {}
    encoded = await _serve(call.parts, media_type, started, receiver)
    transport = call.request.transport
    if transport is None or transport.is_closing():
        await receiver.held.release()  # nobody is there to take it
    return pieces(call.request, encoded, media_type)


def _checked(body: ReceiveBody, media_type: str) -> tags.TagFilter | None:
    """The filter that is named. Raises BadRequest naming the field."""
    most = RECEIVE_ROWS if media_type == answers.ARROW else RECEIVE_MESSAGES
    in_range("max_messages", body.max_messages, 1, most)
    in_range("wait_ms", body.wait_ms, 0, WAIT_MS)
    in_range("lease_ms", body.lease_ms, LEASE_MS_LEAST, LEASE_MS_MOST)
    in_range("max_bytes", body.max_bytes, 1, RECEIVE_BYTES_MOST)
    if body.attempt_id is not None:
        in_range("attempt_id", len(body.attempt_id), 1, NAME_CHARS)
        tags.encoded(body.attempt_id, "attempt_id")
    return None if body.filter is None else tags.parse(body.filter.tag)


class _Asked(NamedTuple):
    """What a request asks for, by its headers and its `raw` body, checked."""

    raw: bytes
    body: ReceiveBody
    named: tags.TagFilter | None
    media_type: str


def _asked(call: PromptCall[Parts]) -> _Asked | None:
    """A poll mostly comes again as it was: then it is not read again."""
    before: _Asked | None = call.seen.get(_ASKED)
    if before is not None and before.raw == call.body:
        return before
    headers = call.headers
    accept = headers.get("Accept", answers.JSON)
    media_type = answers.JSON if accept == "*/*" else accept
    if media_type not in answers.MEDIA_TYPES or not _is_json(call):
        return None
    raw = bytes(call.body)
    body = decode_json(raw or b"{}", ReceiveBody)
    asked = _Asked(raw, body, _checked(body, media_type), media_type)
    if len(raw) <= _ASKED_BYTES:
        call.seen[_ASKED] = asked
    return asked


def known(call: PromptCall[Parts]) -> tuple[TopicInfo, GroupInfo] | None:
    """Those of a call, with a body of JSON or none, that can be told without asking anybody."""
    return _known_group(call) if _is_json(call) else None


def _is_json(call: PromptCall[Parts]) -> bool:
    return media_type_of(call.headers) in _JSON_OR_NONE and "Content-Encoding" not in call.headers


def _known_group(call: PromptCall[Parts]) -> tuple[TopicInfo, GroupInfo] | None:
    return call.parts.catalog.known_group(call.principal.tenant, call.params["topic"], call.params["group"])


def prompt(call: PromptCall[Parts]) -> Prompt | None:
    """A receive of a group that is known. While it waits it has no task (`polls.py`)."""
    parts, asked = call.parts, _asked(call)
    if asked is None or (found := _known_group(call)) is None:
        return None
    topic, group = found
    _, body, named, media_type = asked
    if body.filter is not None and tags.parse(group.filter_tag) != named:
        return None
    receiver = Receiver(parts, _wanted(topic, group, body), parts.clock.monotonic())
    nothing = answers.nothing(media_type, topic.name)
    poll = Poll(receiver, nothing, partial(_serve, parts, media_type, {}), parts.releases)
    return Prompt(poll.future, _as_it_is, media_type, leave=poll.leave, lost=poll.lost)


def _as_it_is(encoded: Pieces) -> Pieces:
    return encoded


def _wanted(topic: TopicInfo, group: GroupInfo, body: ReceiveBody) -> Wanted:
    return Wanted(
        topic, group, tags.parse(group.filter_tag), body.max_messages, body.max_bytes, body.wait_ms, body.lease_ms,
        body.attempt_id,
    )  # fmt: skip


async def _serve(parts: Parts, media_type: str, started: dict[str, Any], receiver: Receiver) -> Pieces:
    """Run it, and encode what it got. What cannot be encoded, or is not wanted meanwhile, is handed back."""
    delivery = await receiver.run()
    beside: dict[str, Any] = {"receipts": delivery.receipts, **started}
    if delivery.reason is not None:
        beside["reason"] = delivery.reason
    try:
        encoded = await answers.encode(media_type, receiver.topic.name, delivery.rows, beside)
    except BaseException:
        await receiver.held.release()
        raise
    parts.counters.add("received_messages_total", delivery.count)
    return encoded


async def _group(
    call: ProxyCall, topic: TopicInfo, body: ReceiveBody, named: tags.TagFilter | None
) -> tuple[GroupInfo, bool]:
    """The group, made when it is not there and may be. Raises NotFound(group_not_found), Conflict(filter_differs) when
    another filter is named."""
    name = check_name("group", call.params["group"])
    filter_tag = None if named is None else named.text
    start = body.start if body.create else None
    group, created = await call.parts.catalog.group(topic, name, create=start, filter_tag=filter_tag)
    if body.filter is not None and tags.parse(group.filter_tag) != named:
        shown = "every message" if group.filter_tag is None else repr(group.filter_tag)
        raise Conflict("filter_differs", f"group {name!r} has another filter: {shown}", filter_tag=group.filter_tag)
    return group, created


ROUTES = [
    Route(
        method="POST",
        path="/v1/topics/{topic}/groups/{group}/messages/receive",
        handler=receive,
        summary="Receive messages",
        description="Leases up to `max_messages` (1,000; as Arrow 32,768) to this consumer for `lease_ms`, waiting up"
        " to `wait_ms` for the first. Each must be acked, nacked or extended before its lease ends, through any proxy.",
        body={answers.JSON: ReceiveBody},
        answer={answers.JSON: ReceiveAnswer, answers.MSGPACK: ReceiveAnswer, answers.ARROW: None},
        scope="consume",
        waits=True,
        prompt=prompt,
        tag="consume",
    )
]
