"""Produce requests in msgpack: the shape of the JSON ones, with `body` and `key` as bin (not str)."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any

import msgspec

from millpond.core.errors import BadRequest
from millpond.core.http.call import Body, Input, bad_field
from millpond.proxy.codec.json import Int32, Int64, budget, check_budget, no_messages
from millpond.proxy.incoming import Request, Session, Single, gather

MEDIA_TYPE = "application/msgpack"


class MessageIn(Input, frozen=True, gc=False):
    body: bytes
    key: bytes | None = None
    tag: str | None = None
    properties: dict[str, str] | None = None
    born_ts: Int64 | None = None
    dedup_id: str | None = None
    queue: Int32 | None = None

    def __post_init__(self) -> None:
        budget.spend()


class ProduceIn(Input, frozen=True):
    messages: list[MessageIn]
    producer: Session | None = None


_fields = attrgetter("body", "key", "tag", "properties", "born_ts", "dedup_id", "queue")


@cache
def _decoder() -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(ProduceIn)


def decode(body: Body) -> Request:
    """Raises BadRequest (malformed_body, unknown_field, invalid_request) and TooLarge (batch_too_large)."""
    budget.fill()
    try:
        request: ProduceIn = _decoder().decode(body)
    except msgspec.ValidationError as error:
        check_budget()
        raise bad_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
        raise BadRequest("malformed_body", f"the body is not msgpack: {error}") from error
    messages = request.messages
    if not messages:
        raise no_messages()
    if len(messages) == 1 and request.producer is None:
        return Request(Single(*_fields(messages[0])), None, None)
    return Request(None, gather(*zip(*map(_fields, messages), strict=True)), request.producer)
