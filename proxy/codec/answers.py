"""Messages out: rows of TIER_SCHEMA as JSON, msgpack or an Arrow stream.

    JSON    {"messages": [message, ..], ..}   body: text where it is valid UTF-8, else body_base64; key likewise
    msgpack the same map                      body and key: str where valid UTF-8 in JSON's sense; body is always bin
    Arrow   one stream of TIER_SCHEMA (+ delivery_attempt int32 in a receive); what JSON has beside `messages`
            stands as JSON in the schema's metadata under `millpond`

Column by column. JSON of rows that need no escapes is put together by one kernel call (`json_columns`). Everything
else: a slice of about ANSWER_SLICE_BYTES is turned into lists with one call a column, zipped into structs and encoded
at once. Only when a slice's bodies are not all UTF-8 are they looked at one by one. The loop gets a turn between
slices.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import UNSET, UnsetType

from millpond.core.arrow import END_OF_STREAM
from millpond.core.gathered import GATHERED_BYTES, Buffer, Gathered
from millpond.core.limits import ANSWER_COLUMN_BYTES, ANSWER_SLICE_BYTES
from millpond.core.ranges import split
from millpond.core.schema import TIER_SCHEMA
from millpond.core.tier.rows import row_bytes
from millpond.core.turns import Pause, turn, turn_behind
from millpond.proxy.codec import few, json_columns
from millpond.proxy.codec.few import METADATA_KEY, RECEIVE_SCHEMA, Few
from millpond.proxy.frames import Bodies

JSON = "application/json"
MSGPACK = "application/msgpack"
ARROW = "application/vnd.apache.arrow.stream"
MEDIA_TYPES = (JSON, MSGPACK, ARROW)

FEW_ROWS = 64
"""Up to so many are turned into objects one by one: 23 us for one and 121 for 64, where joining columns takes 183 and
205; both take 225 for 128."""

_FEW = 8

NOTHINGS = 4_096  # empty answers that are kept: one for each topic and media type

Form = Literal["json", "msgpack"]
Batch: TypeAlias = pa.RecordBatch | Few | Bodies

_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


class MessageOut(msgspec.Struct, frozen=True, gc=False):
    """One message of an answer. `store_ts`, `born_ts`: ms since 1970. `body` xor `body_base64`. `origin`: where a
    replayed message came from. `delivery_attempt` (1: first) and `lease_id` only in a receive."""

    message_id: str
    topic: str
    queue: int
    offset: int
    store_ts: int
    born_ts: int | None
    key: str | bytes | UnsetType | None
    key_base64: str | UnsetType
    tag: str | None
    properties: dict[str, str]
    body: str | bytes | UnsetType
    body_base64: str | UnsetType
    delivery_attempt: int | UnsetType
    lease_id: str | UnsetType
    origin: Any | UnsetType


@dataclass(frozen=True, slots=True)
class Rows:
    """Messages of one queue and, in a receive, of one grant.

    `batch`: TIER_SCHEMA; of a receive also `Few` or `Bodies`. `id_prefix`: what their message ids start with.
    `attempts` u32[n]; `token` and `base`: a row's lease id is `token.(offset - base)`.
    """

    batch: Batch
    id_prefix: str
    attempts: npt.NDArray[np.uint32] | None = None
    token: str = ""
    base: int = 0

    @property
    def columns(self) -> pa.RecordBatch:
        """`batch` as one of TIER_SCHEMA."""
        return self.batch.batch() if isinstance(self.batch, Few | Bodies) else self.batch

    def part(self, first: int, count: int) -> Rows:
        attempts = None if self.attempts is None else self.attempts[first : first + count]
        return Rows(self.columns.slice(first, count), self.id_prefix, attempts, self.token, self.base)


async def encode(
    media_type: str, topic: str, rows: Sequence[Rows], beside: Mapping[str, Any], pause: Pause = turn
) -> list[Buffer]:
    """The whole answer, in pieces that follow each other: `rows` as messages, and the fields of `beside`. A `pause`
    between steps of much work."""
    if media_type == ARROW:
        beside = {"topic": topic, **beside}
        if len(rows) == 1 and isinstance(batch := rows[0].batch, Few):
            assert rows[0].attempts is not None
            return few.stream(batch, rows[0].attempts, _json.encode(beside))
        return await arrow_stream(rows, beside, pause)
    if media_type == MSGPACK:
        return [await _msgpack_map(topic, rows, beside, pause)]
    return await _json_object(topic, rows, beside, pause)


@lru_cache(NOTHINGS)
def nothing(media_type: str, topic: str) -> list[Buffer]:
    """The answer of a receive that found none."""
    beside: dict[str, Any] = {"receipts": []}
    if media_type == ARROW:
        schema, _ = _arrow_parts([], {"topic": topic, **beside})
        return [schema.serialize(), END_OF_STREAM]
    if media_type == MSGPACK:
        return [_msgpack.encode({"messages": [], **beside})]
    return [_json.encode({"messages": [], **beside})]


# -- Arrow ----------------------------------------------------------------------------------------------------


async def arrow_stream(rows: Sequence[Rows], beside: Mapping[str, Any], pause: Pause = turn) -> list[Buffer]:
    """One Arrow stream, with a `pause` behind each large batch."""
    schema, batches = _arrow_parts(rows, beside)
    if len(batches) <= _FEW and sum(batch.get_total_buffer_size() for batch in batches) < GATHERED_BYTES:
        return [schema.serialize(), *(batch.serialize() for batch in batches), END_OF_STREAM]  # cheaper than a writer
    sink = Gathered()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            await turn_behind(batch.num_rows, pause)
    return sink.whole()


def _arrow_parts(rows: Sequence[Rows], beside: Mapping[str, Any]) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """The schema of a stream, and its batches; that of a receive, also of an empty one, is known by its `receipts`."""
    metadata = {METADATA_KEY: _json.encode(beside)}
    leased = "receipts" in beside
    batches = [_leased(one) if leased else one.columns for one in rows]
    schema = (RECEIVE_SCHEMA if leased else TIER_SCHEMA).with_metadata(metadata)
    return schema, [batch.replace_schema_metadata(metadata) for batch in batches]


def _leased(rows: Rows) -> pa.RecordBatch:
    assert rows.attempts is not None
    attempts = pa.Array.from_buffers(pa.int32(), len(rows.attempts), [None, pa.py_buffer(rows.attempts)])
    return rows.columns.append_column(few.ATTEMPT, attempts)


# -- JSON and msgpack -----------------------------------------------------------------------------------------


async def _json_object(topic: str, rows: Sequence[Rows], beside: Mapping[str, Any], pause: Pause) -> list[Buffer]:
    """Slices as they are encoded, each message with a comma behind it but for the last."""
    pieces: list[Buffer] = [b'{"messages":[']
    for part in _cut(rows, ANSWER_COLUMN_BYTES):
        if len(pieces) > 1:
            await pause()
        joined = None
        if part.batch.num_rows > FEW_ROWS:
            joined = json_columns.joined(topic, part.batch, part.id_prefix, part.attempts, part.token, part.base)
        if joined is not None:
            pieces.append(joined)
            continue
        async for some in _slices(topic, [part], "json", pause):
            array = _json.encode(some)
            pieces += [memoryview(array)[1:-1], b","]
    if len(pieces) > 1:
        last = memoryview(pieces[-1])
        pieces[-1] = last[: last.nbytes - 1]
    pieces.append(b"]," + _json.encode(beside)[1:] if beside else b"]}")
    return pieces


async def _msgpack_map(topic: str, rows: Sequence[Rows], beside: Mapping[str, Any], pause: Pause) -> bytearray:
    """As with JSON: the head of each slice's array stands over bytes that are then restored."""
    count = sum(one.batch.num_rows for one in rows)
    assert len(beside) < 15, "a map of up to 15 entries has a head of one byte"
    buffer = bytearray((0x81 + len(beside),))
    buffer += _msgpack.encode("messages") + b"\xdd" + count.to_bytes(4, "big")
    async for some in _slices(topic, rows, "msgpack", pause):
        _append(some, buffer, _array_head(len(some)))
    _append(beside, buffer, 1)
    return buffer


def _append(value: Any, buffer: bytearray, head: int) -> None:
    """Encode a list or map behind `buffer`, without the `head` bytes it begins with."""
    at = len(buffer) - head
    kept = buffer[at:]
    _msgpack.encode_into(value, buffer, at)
    buffer[at : at + head] = kept


def _array_head(count: int) -> int:
    """Bytes of a msgpack array's head."""
    return 1 if count < 16 else 3 if count < 1 << 16 else 5


async def _slices(topic: str, rows: Sequence[Rows], form: Form, pause: Pause) -> AsyncIterator[list[MessageOut]]:
    """Lists of MessageOut of about ANSWER_SLICE_BYTES each, with a `pause` between."""
    begun = False
    for part in _cut(rows, ANSWER_SLICE_BYTES):
        if begun:
            await pause()
        begun = True
        yield messages(topic, part, form)


def _cut(rows: Iterable[Rows], slice_bytes: int) -> Iterator[Rows]:
    """Parts of about `slice_bytes`, each at least one row; none empty."""
    for one in rows:
        if isinstance(one.batch, Few | Bodies) and one.batch.nbytes <= slice_bytes:
            yield one
            continue
        batch = one.columns  # all that it is a part of is asked for first: what a part has takes its time to say
        if batch.get_total_buffer_size() <= slice_bytes or batch.nbytes <= slice_bytes:
            if batch.num_rows:
                yield one
            continue
        whole = replace(one, batch=batch)
        for start, end in split(row_bytes(pa.Table.from_batches([batch])), slice_bytes):
            yield whole.part(start, end - start)


def messages(topic: str, rows: Rows, form: Form = "json") -> list[MessageOut]:
    """`rows` as structs, one call a column. In msgpack bodies are bytes, and so are keys that are not text."""
    column = rows.columns.column
    offsets = column("offset").to_pylist()
    keys, keys_base64 = _text(column("key"), form)
    bodies: Iterable[Any]
    bodies_base64: Iterable[Any]
    if form == "msgpack":
        bodies, bodies_base64 = column("body").to_pylist(), repeat(UNSET)
    else:
        bodies, bodies_base64 = _text(column("body"), form)
    return list(
        map(
            MessageOut,
            [f"{rows.id_prefix}{offset}" for offset in offsets],
            repeat(topic),
            column("queue").to_pylist(),
            offsets,
            column("store_ts").view(pa.int64()).to_pylist(),
            _listed(column("born_ts").view(pa.int64())),
            keys,
            keys_base64,
            _listed(column("tag")),
            _properties(column("properties")),
            bodies,
            bodies_base64,
            repeat(UNSET) if rows.attempts is None else rows.attempts.tolist(),
            [f"{rows.token}.{offset - rows.base}" for offset in offsets] if rows.token else repeat(UNSET),
            _origins(column("origin")),
        )
    )


def _text(column: pa.BinaryArray, form: Form) -> tuple[Iterable[Any], Iterable[Any]]:
    """(texts, base64): one cast for all; only if that fails, one by one. Null is None as text."""
    if column.null_count == len(column):
        return repeat(None, len(column)), repeat(UNSET)
    try:
        if len(column) <= FEW_ROWS:  # a kernel costs more than it saves
            return [None if value is None else value.decode() for value in column.to_pylist()], repeat(UNSET)
        return column.cast(pa.string()).to_pylist(), repeat(UNSET)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        values = [_decoded(value) for value in column.to_pylist()]
    if form == "msgpack":
        return values, repeat(UNSET)
    texts = [UNSET if isinstance(value, bytes) else value for value in values]
    return texts, [base64.b64encode(value).decode() if isinstance(value, bytes) else UNSET for value in values]


def _listed(column: pa.Array) -> Iterable[Any]:
    """Its values; most columns that may be null are, throughout."""
    return repeat(None, len(column)) if column.null_count == len(column) else column.to_pylist()


def _decoded(value: bytes | None) -> str | bytes | None:
    """`value` as text when it is UTF-8."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _properties(column: pa.MapArray) -> Iterable[dict[str, str]]:
    """A map a row; `{}` for null, so that a client need not tell them apart."""
    if column.null_count == len(column):
        return repeat({}, len(column))
    return [dict(pairs) if pairs else {} for pairs in column.to_pylist()]


def _origins(column: pa.StringArray) -> Iterable[Any]:
    """What the JSON texts say; a text that is not JSON stays a text. Nothing at all where null."""
    if column.null_count == len(column):
        return repeat(UNSET, len(column))
    decoded = {text: _origin(text) for text in column.unique().to_pylist()}
    return [decoded[text] for text in column.to_pylist()]


def _origin(text: str | None) -> Any:
    if text is None:
        return UNSET
    try:
        value = msgspec.json.decode(text)
        _msgpack.encode(value)
    except (msgspec.DecodeError, OverflowError, RecursionError):
        return text
    return value
