"""`Message`, as it is sent, and what one may hold: checked one by one, so that a bad one cannot spoil a batch."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from millpond.core import limits
from millpond.core.errors import BadRequest, TooLarge


class Message(msgspec.Struct, frozen=True):
    """A message to send. `born_ts`: milliseconds since 1970 UTC, the producer's own time."""

    body: bytes | str
    key: bytes | str | None = None
    tag: str | None = None
    properties: Mapping[str, str] | None = None
    born_ts: int | None = None


def as_bytes(field: str, value: object) -> bytes:
    """`value` as bytes: text in UTF-8. Raises BadRequest for anything else."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        raise BadRequest.field(field, "bytes or str", type(value).__name__)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest.field(field, "text that UTF-8 can carry", value) from error


def checked_key(key: bytes | str) -> bytes:
    value = as_bytes("key", key)
    if len(value) > limits.KEY_BYTES:
        raise TooLarge("message_too_large", f"a key has at most {limits.KEY_BYTES} bytes")
    return value


def checked_tag(tag: str) -> str:
    if not isinstance(tag, str):
        raise BadRequest.field("tag", "str", type(tag).__name__)
    if len(tag) * 4 > limits.TAG_BYTES and len(as_bytes("tag", tag)) > limits.TAG_BYTES:
        raise TooLarge("message_too_large", f"a tag has at most {limits.TAG_BYTES} bytes")
    return tag


def checked_properties(properties: Mapping[str, str]) -> tuple[list[tuple[str, str]], int]:
    """The items, and their bytes."""
    items = list(properties.items())
    size = 0
    for name, value in items:
        if not isinstance(name, str) or not isinstance(value, str):
            raise BadRequest.field("properties", "str to str", f"{type(name).__name__} to {type(value).__name__}")
        size += len(as_bytes("properties", name)) + len(as_bytes("properties", value))
    if size > limits.PROPERTIES_BYTES:
        raise TooLarge("message_too_large", f"properties have at most {limits.PROPERTIES_BYTES} bytes")
    return items, size


def checked_time(born_ts: int) -> int:
    if not isinstance(born_ts, int) or not 0 <= born_ts <= limits.TIMESTAMP_MS_MOST:
        raise BadRequest.field("born_ts", f"milliseconds, 0 to {limits.TIMESTAMP_MS_MOST}", born_ts)
    return born_ts
