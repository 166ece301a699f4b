"""Produce requests as an Arrow stream: columns in any order, all but `body` optional.

    body binary, key binary, tag utf8, properties map<utf8, utf8>, born_ts timestamp(ms), origin utf8,
    dedup_id utf8, queue int32

Large and view types of the same kind are cast, as is text where bytes are due; a column of type null is as if it
were not there. Every other column and type is refused by name. One batch whose columns stand in the order of
`message_schema` keeps its bytes: `Incoming.payload` is its message in the stream, compressed or not.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa
from pyarrow import types

from millpond.core.arrow import (
    DECODED_BYTES,
    END_OF_STREAM,
    MEDIA_TYPE,
    PREFIX,
    BatchMessage,
    Scanned,
    only_bodies,
    scan,
)
from millpond.core.errors import BadRequest, FieldError, TooLarge
from millpond.core.frame import CODEC_NONE
from millpond.core.http.call import Body
from millpond.core.limits import BATCH_BYTES, BATCH_MESSAGES, KIB
from millpond.core.schema import PROPERTIES_TYPE, TIMESTAMP, columns_of, message_schema
from millpond.proxy.codec import few
from millpond.proxy.incoming import Incoming

__all__ = ["MEDIA_TYPE", "decode"]

_TEXT = {pa.string(), pa.large_string(), pa.string_view()}
_BYTES = {pa.binary(), pa.large_binary(), pa.binary_view()} | _TEXT
_VIEWS = {pa.string_view(), pa.binary_view()}
_MESSAGE_COLUMNS = ("key", "tag", "properties", "born_ts", "origin", "body")
_TARGETS = {
    "key": pa.binary(),
    "tag": pa.string(),
    "properties": PROPERTIES_TYPE,
    "born_ts": TIMESTAMP,
    "origin": pa.string(),
    "body": pa.binary(),
    "dedup_id": pa.string(),
    "queue": pa.int32(),
}
_KNOWN_SCHEMAS = 256  # remembered, the last used; each of at most
_KNOWN_BYTES = 4 * KIB
_DELAYS = {"delay_level", "delay_ms", "deliver_at"}
_ENDS = (END_OF_STREAM, b"")
_bodies_alone: set[bytes] = set()  # schema messages of valid requests, as many as _KNOWN_SCHEMAS


def decode(body: Body) -> Incoming:
    """Raises BadRequest (malformed_body; invalid_request or unknown_field naming the column) and TooLarge."""
    found = _few(body)
    if found is not None:
        return found
    scanned = scan(body)
    standing = _standing(scanned.schema_message) if len(scanned.schema_message) <= _KNOWN_BYTES else None
    if standing is None:
        _check_schema(scanned.schema)
    elif not standing[0]:
        _note_bodies_alone(scanned.schema_message)
    if not scanned.rows:
        raise BadRequest.field("body", f"1 to {BATCH_MESSAGES} messages")
    if standing is not None and len(scanned.messages) == 1 and not scanned.messages[0].dictionary:
        return _as_it_is(scanned, *standing)
    batches = scanned.batches()
    names = scanned.schema.names
    _check_views(batches)
    columns = {name: _column(name, [batch.column(at) for batch in batches]) for at, name in enumerate(names)}
    used = {name: column for name, column in columns.items() if column is not None}
    if used["body"].null_count:
        raise BadRequest.field("body", "no nulls")
    bitmap = columns_of(set(used))
    schema = message_schema(bitmap)
    batch = pa.RecordBatch.from_arrays([used[name] for name in schema.names], schema=schema)
    message = scanned.messages[0]
    incoming = Incoming(batch, bitmap, used.get("dedup_id"), used.get("queue"), codec=message.codec)
    if len(batches) == 1 and _stands(scanned.schema, schema):
        incoming.payload, incoming.payload_size = _payload(scanned, message)
    return incoming


def _few(body: Body) -> Incoming | None:
    """Few bodies alone under a schema that was seen before, which need not be decoded; None for all else."""
    if not PREFIX.size <= len(body) <= few.BYTES:
        return None
    start = PREFIX.size + max(0, PREFIX.unpack_from(body, 0)[1])
    if bytes(body[:start]) not in _bodies_alone:
        return None
    found = only_bodies(body, start)
    if found is None or body[found.end :] not in _ENDS:
        return None
    payload = pa.py_buffer(body)[start : found.end]
    return Incoming(None, 0, payload=payload, payload_size=payload.size, bounds=found.bounds)


def _note_bodies_alone(schema_message: bytes) -> None:
    if len(_bodies_alone) >= _KNOWN_SCHEMAS:
        _bodies_alone.clear()
    _bodies_alone.add(schema_message)


@lru_cache(_KNOWN_SCHEMAS)
def _standing(schema_message: bytes) -> tuple[int, pa.Schema] | None:
    """Columns and schema of the log that batches of this sent schema stand in as they are; None when they do not."""
    schema = pa.ipc.read_schema(pa.py_buffer(schema_message))
    _check_schema(schema)
    names = set(schema.names)
    bitmap = columns_of(names)
    target = message_schema(bitmap)
    return (bitmap, target) if names <= set(_MESSAGE_COLUMNS) and _stands(schema, target) else None


def _as_it_is(scanned: Scanned, bitmap: int, schema: pa.Schema) -> Incoming:
    """One batch in the log's own layout: what every client of ours sends."""
    batch = scanned.only_batch(schema)
    if batch.column(batch.num_columns - 1).null_count:
        raise BadRequest.field("body", "no nulls")
    message = scanned.messages[0]
    incoming = Incoming(batch, bitmap, codec=message.codec)
    incoming.payload, incoming.payload_size = _payload(scanned, message)
    return incoming


def _payload(scanned: Scanned, message: BatchMessage) -> tuple[pa.Buffer, int]:
    payload = pa.py_buffer(scanned.data)[message.start : message.end]
    return payload, payload.size if message.codec == CODEC_NONE else message.decoded_bytes


def _stands(sent: pa.Schema, schema: pa.Schema) -> bool:
    """Whether a batch of `sent` has the same bytes as one of `schema`: nullability and time zone are not in them."""
    return sent.names == schema.names and all(
        theirs == ours or (types.is_timestamp(theirs) and types.is_timestamp(ours)) or _is_properties(theirs)
        for theirs, ours in zip(sent.types, schema.types, strict=True)
    )


def _check_schema(schema: pa.Schema) -> None:
    names = schema.names
    for field in schema:
        if field.name in _DELAYS:
            raise BadRequest.field(field.name, "no such column: delayed delivery is not available")
        if field.name not in _TARGETS:
            known = FieldError(field.name[:80], "one of " + ", ".join(_TARGETS))
            raise BadRequest("unknown_field", f"{field.name[:80]!r} is not a column here", fields=[known])
        if names.count(field.name) > 1:
            raise BadRequest.field(field.name, "one such column")
        if not _takes(field.name, field.type):
            raise BadRequest.field(field.name, f"a column of type {_TARGETS[field.name]}", str(field.type)[:60])
    if "body" not in names:
        raise BadRequest.field("body", "a column of type binary")


def _takes(name: str, type_: pa.DataType) -> bool:
    if types.is_null(type_):
        return name != "body"
    match name:
        case "key" | "body":
            return type_ in _BYTES
        case "tag" | "origin" | "dedup_id":
            return type_ in _TEXT
        case "properties":
            return _is_properties(type_)
        case "born_ts":
            return bool(types.is_timestamp(type_)) and type_.unit == "ms"
        case _:
            return bool(type_ == pa.int32())


def _is_properties(type_: pa.DataType) -> bool:
    return bool(types.is_map(type_) and type_.key_type == pa.string() and type_.item_type == pa.string())


def _check_views(batches: list[pa.RecordBatch]) -> None:
    """Views may all point at the same bytes; count them before a cast gives each its own."""
    total = sum(_view_bytes(column) for batch in batches for column in batch.columns if column.type in _VIEWS)
    if total > DECODED_BYTES:
        raise TooLarge("batch_too_large", f"more than {BATCH_BYTES} bytes once copied", limit_bytes=BATCH_BYTES)


def _view_bytes(column: pa.Array) -> int:
    if not len(column):
        return 0
    sizes = np.frombuffer(column.buffers()[1], np.int32, 4 * len(column), 16 * column.offset)[::4]
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return int(sizes[valid].sum(dtype=np.int64))


def _column(name: str, chunks: list[pa.Array]) -> pa.Array | None:
    """One array of the target type; None for a column of nulls by type."""
    target = _TARGETS[name]
    if types.is_null(chunks[0].type):
        return None
    try:
        cast = [chunk if chunk.type == target else _cast(chunk, target) for chunk in chunks]
        return cast[0] if len(cast) == 1 else pa.concat_arrays(cast)
    except pa.ArrowException as error:
        raise BadRequest.field(name, f"a column of type {target} ({error})") from error


def _cast(chunk: pa.Array, target: pa.DataType) -> pa.Array:
    if target == PROPERTIES_TYPE:  # same layout under other field names: only the type object differs
        offsets = pa.Array.from_buffers(pa.int32(), len(chunk) + 1, [None, chunk.buffers()[1]], offset=chunk.offset)
        return pa.MapArray.from_arrays(
            offsets, chunk.keys, chunk.items, type=PROPERTIES_TYPE, mask=chunk.is_null() if chunk.null_count else None
        )
    return chunk.cast(target)
