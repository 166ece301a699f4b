"""Produce requests in JSON: `{messages: [{body | body_base64, key?, tag?, ...}], producer?}`.

What is malformed (not JSON, an unknown field, a wrong type, no body or two) refuses the whole request; limits are
checked later and belong to their message.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated

import msgspec
import numpy as np

from millpond.core.errors import BadRequest, TooLarge
from millpond.core.http.call import Body, Input, decode_json
from millpond.core.limits import BATCH_MESSAGES
from millpond.proxy.codec import json_bodies
from millpond.proxy.incoming import Incoming, Request, Session, Single, gather

MEDIA_TYPE = "application/json"

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class MessageIn(Input, frozen=True, gc=False):
    """A message as JSON: `body` is text, `body_base64` any bytes; exactly one of them."""

    body: str | None = None
    body_base64: bytes | None = None
    key: str | None = None
    tag: str | None = None
    properties: dict[str, str] | None = None
    born_ts: Int64 | None = None
    dedup_id: str | None = None
    queue: Int32 | None = None

    def __post_init__(self) -> None:
        """Runs while decoding, so that a body of a million tiny messages never becomes a million objects."""
        budget.spend()
        if (self.body is None) == (self.body_base64 is None):
            raise ValueError("Expected one of body and body_base64")


class ProduceIn(Input, frozen=True):
    messages: list[MessageIn]
    producer: Session | None = None


class _BodyAlone(Input, frozen=True, gc=False):
    body: str


class _BodiesAlone(Input, frozen=True):
    """What most requests of many messages are: no field of theirs is looked at but the body."""

    messages: list[_BodyAlone]
    producer: Session | None = None


_ALONE_FROM_BYTES = 4_096  # a small request is mostly one message, for which there is little to be spared
_ALONE_OBJECTS = 16 * BATCH_MESSAGES  # that may be made before they are counted: 5 MB
_ALONE_LEAST_BYTES = len('{"body":""},')


class Budget:
    """Counts the messages of the request being decoded; decoding is one synchronous call."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = 0

    def fill(self) -> None:
        self.left = BATCH_MESSAGES

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"Expected at most {BATCH_MESSAGES} messages")


budget = Budget()


def decode(body: Body) -> Request:
    """Raises BadRequest (malformed_body, unknown_field, invalid_request) and TooLarge (batch_too_large)."""
    alone = _bodies_alone(body)
    if alone is not None:
        return alone
    budget.fill()
    try:
        request = decode_json(body, ProduceIn)
    except BadRequest:
        check_budget()
        raise
    messages = request.messages
    if len(messages) == 1 and request.producer is None:
        one = messages[0]
        body_in = one.body_base64 if one.body is None else one.body
        assert body_in is not None
        return Request(
            Single(body_in, one.key, one.tag, one.properties, one.born_ts, one.dedup_id, one.queue), None, None
        )
    return Request(None, _columns(messages), request.producer)


def _bodies_alone(body: Body) -> Request | None:
    """A request whose messages have a body and nothing else. None: it is something else, or wrong."""
    if len(body) < _ALONE_FROM_BYTES:
        return None
    batch = json_bodies.bodies(body)
    if batch is not None:
        return Request(None, batch, None)
    if _objects_most(body) > _ALONE_OBJECTS:
        return None
    try:
        request = decode_json(body, _BodiesAlone)
    except BadRequest:
        return None
    bodies = tuple(map(_body, request.messages))
    if not 1 <= len(bodies) <= BATCH_MESSAGES:
        return None
    if len(bodies) == 1 and request.producer is None:
        return Request(Single(bodies[0]), None, None)
    return Request(None, gather(bodies), request.producer)


def _objects_most(body: Body) -> int:
    """More messages than this it does not have."""
    by_size = len(body) // _ALONE_LEAST_BYTES
    if by_size <= _ALONE_OBJECTS:
        return by_size
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord("{")))


def check_budget() -> None:
    """Too many messages is a matter of size, not of form. Raises TooLarge."""
    if budget.left < 0:
        raise TooLarge("batch_too_large", f"messages: more than {BATCH_MESSAGES}", limit=BATCH_MESSAGES)


def no_messages() -> BadRequest:
    return BadRequest.field("messages", f"1 to {BATCH_MESSAGES} messages")


_body = attrgetter("body")
_binary = attrgetter("body_base64")
_others = attrgetter("body", "key", "tag", "properties", "born_ts", "dedup_id", "queue")


def _columns(messages: list[MessageIn]) -> Incoming:
    if not messages:
        raise no_messages()
    bodies, *others = zip(*map(_others, messages), strict=True)
    if bodies.count(None):
        binary = map(_binary, messages)
        bodies = tuple(other if text is None else text for text, other in zip(bodies, binary, strict=True))
    return gather(bodies, *others)
