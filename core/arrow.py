"""Arrow IPC streams from strangers: bounded before they are decoded, validated before they are used.

    stream   = message*  [end: FFFFFFFF 00000000]
    message  = FFFFFFFF, i32 metadata length (a multiple of 8), metadata (flatbuffer `Message`), body
    body     = the buffers its record batch lists by (offset, length); a compressed one begins with the i64 size it
               claims to have once decompressed (-1: it stands as it is)

`scan` reads framing and metadata with its own small flatbuffer reader, every access inside bounds, and adds up what
decoding would allocate; only then may `Scanned.batches` let pyarrow decode, and `validate(full=True)` has the last
word. Refused: what no current writer sends (metadata before V5, no continuation marker, big-endian) and anything
after the end mark. A stream without end mark ends at a message boundary.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa

from millpond.core.errors import BadRequest, TooLarge
from millpond.core.frame import CODEC_LZ4, CODEC_NONE, CODEC_ZSTD, aligned
from millpond.core.limits import (
    ARROW_BATCHES,
    ARROW_METADATA_BYTES,
    BATCH_BYTES,
    BATCH_MESSAGES,
    BATCH_OVERHEAD_BYTES,
    KIB,
)

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
DECODED_BYTES = BATCH_BYTES + BATCH_OVERHEAD_BYTES
"""The most that all buffers of a stream may take once decompressed; also the most its body may have."""

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_V5 = 4  # MetadataVersion
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # MessageHeader
_CODECS = {0: CODEC_LZ4, 1: CODEC_ZSTD}  # CompressionType
_BUFFERS = 256  # of one batch: ours has 20 at most
PREFIX = struct.Struct("<Ii")  # of a message: its continuation marker, and how long its metadata is
_CONTINUATION = 0xFFFFFFFF
_UNREADABLE = (pa.ArrowException, ValueError, OSError)  # what pyarrow raises for broken bytes
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
_KNOWN_SCHEMAS = 256  # remembered, the last used; each of at most
_KNOWN_BYTES = 4 * KIB
_KNOWN_METADATA = 256  # of messages, likewise
_KNOWN_METADATA_BYTES = KIB
FEW_ROWS = 64  # more are quicker by pyarrow, which looks at none by itself ..
_KNOWN_BODY_BYTES = 128 * KIB  # .. and so are larger ones
_ONE_COLUMN = pa.schema([("body", pa.binary())])


class _Broken(Exception):
    """The bytes are not what they should be; never leaves this module."""


class BatchMessage(NamedTuple):
    """One record batch message: where it stands in the stream ([start, end), framing included), how many rows it
    claims, its codec, and the bytes of its buffers once decompressed."""

    start: int
    end: int
    rows: int
    codec: int
    decoded_bytes: int
    dictionary: bool


class Scanned:
    """A stream whose framing and sizes are in bounds; nothing of its data has been looked at yet."""

    def __init__(
        self, data: bytes | memoryview, schema: pa.Schema, messages: list[BatchMessage], schema_message: bytes = b""
    ) -> None:
        """`schema_message`: the bytes that said `schema`."""
        self.data = data
        self.schema = schema
        self.schema_message = schema_message
        self.messages = messages
        self.rows = sum(message.rows for message in messages)

    def only_batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """The batch of a stream of one, decoded as `schema`, whose layout is that of the stream's own; validated."""
        [message] = self.messages
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(self.data)[message.start : message.end], schema)
            batch.validate(full=True)
        except _UNREADABLE as error:
            raise _malformed(str(error)) from error
        if batch.num_rows != message.rows:
            raise _malformed("a batch of another length than it claims")
        return batch

    def batches(self) -> list[pa.RecordBatch]:
        """Decode and validate all batches; whoever calls this has agreed to the schema. Raises BadRequest."""
        if any(message.dictionary for message in self.messages):
            raise _malformed("dictionaries without a dictionary column")
        try:
            with pa.ipc.open_stream(pa.py_buffer(self.data), options=_READ_OPTIONS) as reader:
                batches: list[pa.RecordBatch] = list(reader)
            for batch in batches:
                batch.validate(full=True)
        except _UNREADABLE as error:
            raise _malformed(str(error)) from error
        if [batch.num_rows for batch in batches] != [message.rows for message in self.messages]:
            raise _malformed("batches of another length than they claim")
        return batches


def scan(data: bytes | memoryview) -> Scanned:
    """Bounds of the stream in `data`. Raises BadRequest (malformed_body) and TooLarge (batch_too_large)."""
    try:
        return _scan(data)
    except (_Broken, struct.error) as error:
        raise _malformed(str(error)) from error


def _malformed(why: str) -> BadRequest:
    return BadRequest("malformed_body", f"the body is not a valid Arrow stream: {why[:200]}")


def _scan(data: bytes | memoryview) -> Scanned:
    _, metadata_bytes = PREFIX.unpack_from(data, 0)
    schema_message = bytes(data[: PREFIX.size + max(0, min(metadata_bytes, ARROW_METADATA_BYTES))])
    schema = _schema(schema_message) if len(schema_message) > _KNOWN_BYTES else _known_schema(schema_message)
    messages: list[BatchMessage] = []
    for metadata, body in _framed(data, len(schema_message)):
        if len(messages) == ARROW_BATCHES:
            raise TooLarge("batch_too_large", f"more than {ARROW_BATCHES} record batches", limit=ARROW_BATCHES)
        messages.append(_batch(data, metadata, body))
    if sum(message.rows for message in messages if not message.dictionary) > BATCH_MESSAGES:
        raise TooLarge("batch_too_large", f"more than {BATCH_MESSAGES} messages", limit=BATCH_MESSAGES)
    if sum(message.decoded_bytes for message in messages) > DECODED_BYTES:
        raise TooLarge("batch_too_large", f"more than {BATCH_BYTES} bytes once decompressed", limit_bytes=BATCH_BYTES)
    return Scanned(data, schema, messages, schema_message)


def _framed(data: bytes | memoryview, at: int = 0) -> Iterator[tuple[_Metadata, int]]:
    """What each encapsulated message says, and where its body begins."""
    while at < len(data):
        continuation, metadata_bytes = PREFIX.unpack_from(data, at)
        if continuation != _CONTINUATION:
            raise _Broken("a message does not begin with its continuation marker")
        metadata_at = at + PREFIX.size
        if metadata_bytes == 0:
            if metadata_at != len(data):
                raise _Broken("bytes after its end")
            return
        if not 0 < metadata_bytes <= min(ARROW_METADATA_BYTES, len(data) - metadata_at) or metadata_bytes % 8:
            raise _Broken("a message's metadata has an impossible length")
        body = metadata_at + metadata_bytes
        text = bytes(data[metadata_at:body])
        metadata = _metadata(text) if metadata_bytes > _KNOWN_METADATA_BYTES else _known_metadata(text)
        if metadata.body_bytes > len(data) - body:
            raise _Broken("a message's body has an impossible length")
        yield metadata, body
        at = body + metadata.body_bytes


class _Metadata(NamedTuple):
    """Of one message: its length, framing included, its kind, the bytes of its body; and of a batch its rows, codec
    and buffers, (offset, length) in the body."""

    length: int
    kind: int
    body_bytes: int
    little_endian: bool = True
    rows: int = 0
    codec: int = CODEC_NONE
    buffers: tuple[tuple[int, int], ...] = ()


@lru_cache(_KNOWN_METADATA)
def _known_metadata(text: bytes) -> _Metadata:
    """Batches of as many rows and bytes say the same each time."""
    return _metadata(text)


def _metadata(text: bytes) -> _Metadata:
    message = _root(text)
    body_bytes = message.long(3)
    if body_bytes < 0 or body_bytes % 8:
        raise _Broken("a message's body has an impossible length")
    if message.short(0) != _V5:
        raise _Broken("its metadata version is not V5")
    length, kind, header = PREFIX.size + len(text), message.byte(1), message.table(2)
    if kind == _SCHEMA:
        return _Metadata(length, kind, body_bytes, little_endian=header.short(0) == 0)
    if kind not in {_BATCH, _DICTIONARY}:
        raise _Broken("a message is neither a record batch nor a dictionary")
    table = header.table(1) if kind == _DICTIONARY else header
    rows = table.long(0)
    if not 0 <= rows < 2**31:
        raise _Broken("a batch has an impossible number of rows")
    codec = CODEC_NONE
    compression = table.optional_table(3)
    if compression is not None:
        if compression.byte(1) != 0 or compression.byte(0) not in _CODECS:
            raise _Broken("its compression is neither lz4 nor zstd by buffer")
        codec = _CODECS[compression.byte(0)]
    buffers = table.pairs(2)
    for offset, size in buffers:
        if offset < 0 or size < 0 or offset % 8 or offset + size > body_bytes:
            raise _Broken("a buffer lies outside its body")
    return _Metadata(length, kind, body_bytes, rows=rows, codec=codec, buffers=buffers)


@lru_cache(_KNOWN_SCHEMAS)
def _known_schema(message: bytes) -> pa.Schema:
    """Producers say the same schema each time."""
    return _schema(message)


def _schema(message: bytes) -> pa.Schema:
    metadata, _ = next(_framed(message), (None, 0))
    if metadata is None or metadata.kind != _SCHEMA:
        raise _Broken("it does not begin with a schema")
    if not metadata.little_endian:
        raise _Broken("its schema is big-endian")
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(message))
        _ = schema.names, [str(type_) for type_ in schema.types]  # raises when a name in it is not UTF-8
        return schema
    except _UNREADABLE as error:
        raise _Broken(str(error)) from error


def _batch(data: bytes | memoryview, metadata: _Metadata, body: int) -> BatchMessage:
    if metadata.kind == _SCHEMA:
        raise _Broken("a message is neither a record batch nor a dictionary")
    start, end = body - metadata.length, body + metadata.body_bytes
    decoded = _decoded_bytes(data, metadata, body)
    return BatchMessage(start, end, metadata.rows, metadata.codec, decoded, metadata.kind == _DICTIONARY)


def _decoded_bytes(data: bytes | memoryview, metadata: _Metadata, body: int) -> int:
    """What the buffers take once decoded; overlapping ones count each time, so that none can be multiplied."""
    total = 0
    for offset, length in metadata.buffers:
        total += _claimed(data, body + offset, length) if metadata.codec and length else length
    return total


def _claimed(data: bytes | memoryview, at: int, length: int) -> int:
    if length < 8:
        raise _Broken("a compressed buffer is cut short")
    claimed = int.from_bytes(data[at : at + 8], "little", signed=True)
    if claimed < -1:
        raise _Broken("a compressed buffer claims a negative size")
    return length - 8 if claimed == -1 else claimed


# -- batches of bodies alone, without pyarrow -----------------------------------------------------------------


class OnlyBodies(NamedTuple):
    """A record batch message that is one binary column without nulls, as it is. `bounds`: where each body begins behind
    `data`, and where the last one ends; `data` and `end` are positions, of the bodies and of the message's end."""

    bounds: tuple[int, ...]
    data: int
    end: int


class _Layout(NamedTuple):
    """Of such a message: how long its body is, where in that the bounds stand and how they are read, and the bodies."""

    body_bytes: int
    bounds_at: int
    bounds: struct.Struct
    data_at: int
    data_bytes: int


def only_bodies(data: bytes | memoryview, at: int = 0) -> OnlyBodies | None:
    """The message at `at`, of FEW_ROWS at most, checked as pyarrow's own validation does; None for every other, and for
    what is broken."""
    if len(data) - at < PREFIX.size:
        return None
    continuation, metadata_bytes = PREFIX.unpack_from(data, at)
    body = at + PREFIX.size + metadata_bytes
    if continuation != _CONTINUATION or not 0 < metadata_bytes <= _KNOWN_METADATA_BYTES or metadata_bytes % 8:
        return None
    layout = _layout(bytes(data[at + PREFIX.size : body]))
    if layout is None or body + layout.body_bytes > len(data):
        return None
    bounds = layout.bounds.unpack_from(data, body + layout.bounds_at)
    if bounds[0] < 0 or bounds[-1] > layout.data_bytes or list(bounds) != sorted(bounds):
        return None
    return OnlyBodies(bounds, body + layout.data_at, body + layout.body_bytes)


@lru_cache(_KNOWN_METADATA)
def _layout(text: bytes) -> _Layout | None:
    """Batches of as many rows and bytes say the same each time: pyarrow has read each once, with empty bodies."""
    try:
        metadata = _known_metadata(text)
        rows = metadata.rows
        if metadata.kind != _BATCH or metadata.codec != CODEC_NONE or not 0 < rows <= FEW_ROWS:
            return None
        nodes = _root(text).table(2).pairs(1)
    except (_Broken, struct.error):
        return None
    if nodes != ((rows, 0),) or len(metadata.buffers) != 3:
        return None
    (_, nulls), (bounds_at, bounds_bytes), (data_at, data_bytes) = metadata.buffers
    if nulls or bounds_bytes < 4 * (rows + 1) or metadata.body_bytes > _KNOWN_BODY_BYTES:
        return None
    message = PREFIX.pack(_CONTINUATION, len(text)) + text + bytes(metadata.body_bytes)
    try:  # pyarrow looks at more of the metadata than what is used here
        pa.ipc.read_record_batch(pa.py_buffer(message), _ONE_COLUMN).validate(full=True)
    except _UNREADABLE:
        return None
    return _Layout(metadata.body_bytes, bounds_at, struct.Struct(f"<{rows + 1}i"), data_at, data_bytes)


# -- batches put together from a template --------------------------------------------------------------------

LONG = struct.Struct("<q")
BUFFER = struct.Struct("<qq")
"""Of a record batch: offset in the body, length."""


class Places(NamedTuple):
    """Positions in an encoded record batch: of its body's length (i64), of the first of its `buffer_count` buffers, and
    of its body."""

    body_length: int
    buffers: int
    buffer_count: int
    body: int


def places(encoded: bytes | memoryview) -> Places:
    """What differs between a batch that pyarrow has encoded with an empty column, and one with the real values."""
    _, metadata_bytes = PREFIX.unpack_from(encoded, 0)
    message = _root(bytes(encoded[PREFIX.size : PREFIX.size + metadata_bytes]))
    buffers, count = message.table(2).vector(2)
    return Places(PREFIX.size + message.place(3), PREFIX.size + buffers, count, PREFIX.size + metadata_bytes)


def lengthen(front: bytearray, at: Places, buffer: int, size: int) -> None:
    """Have the metadata in `front`, of an encoded batch, say that its `buffer`, which is empty, has `size` bytes: so
    much, and what aligns it, stands between those before it and those behind it."""
    more = aligned(size)
    LONG.pack_into(front, at.body_length, LONG.unpack_from(front, at.body_length)[0] + more)
    place = at.buffers + BUFFER.size * buffer
    offset, length = BUFFER.unpack_from(front, place)
    assert length == 0, "what has a length is not a place to fill"
    BUFFER.pack_into(front, place, offset, size)
    for behind in range(place + BUFFER.size, at.buffers + BUFFER.size * at.buffer_count, BUFFER.size):
        offset, length = BUFFER.unpack_from(front, behind)
        BUFFER.pack_into(front, behind, offset + more, length)


# -- flatbuffers: just enough of them -------------------------------------------------------------------------

_UINT, _INT, _SHORT, _USHORT = (struct.Struct("<" + code) for code in "IihH")
_FIELDS = [struct.Struct(f"<{slots}H") for slots in range(8)]  # no table here has more fields that matter


class _Table:
    """A flatbuffer table at `at`: fields by slot, a missing one is 0. Every access stays inside `data`: all offsets but
    the way back to the vtable go forward, and struct refuses what ends behind it."""

    __slots__ = ("_at", "_data", "_fields")

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        vtable = at - _INT.unpack_from(data, at)[0]
        if vtable < 0:
            raise _Broken("its metadata points outside itself")
        slots = (_USHORT.unpack_from(data, vtable)[0] - 4) // 2
        self._fields = _FIELDS[max(0, min(slots, len(_FIELDS) - 1))].unpack_from(data, vtable + 4)

    def _field(self, slot: int) -> int:
        """Where the field stands; 0 when it is missing (no field can stand at 0)."""
        fields = self._fields
        if slot >= len(fields):
            return 0
        offset: int = fields[slot]
        return self._at + offset if offset else 0

    def long(self, slot: int) -> int:
        at = self._field(slot)
        value: int = LONG.unpack_from(self._data, at)[0] if at else 0
        return value

    def short(self, slot: int) -> int:
        at = self._field(slot)
        value: int = _SHORT.unpack_from(self._data, at)[0] if at else 0
        return value

    def byte(self, slot: int) -> int:
        at = self._field(slot)
        if at >= len(self._data):
            raise _Broken("its metadata points outside itself")
        return self._data[at] if at else 0

    def optional_table(self, slot: int) -> _Table | None:
        at = self._field(slot)
        return _Table(self._data, at + _UINT.unpack_from(self._data, at)[0]) if at else None

    def table(self, slot: int) -> _Table:
        table = self.optional_table(slot)
        if table is None:
            raise _Broken("its metadata lacks a part")
        return table

    def place(self, slot: int) -> int:
        """Where a field that is there stands."""
        at = self._field(slot)
        assert at, "the field is there"
        return at

    def vector(self, slot: int) -> tuple[int, int]:
        """Where a vector of structs of two longs (FieldNode, Buffer) begins, and how many there are."""
        at = self._field(slot)
        if not at:
            return 0, 0
        at += _UINT.unpack_from(self._data, at)[0]
        count: int = _UINT.unpack_from(self._data, at)[0]
        if count > _BUFFERS or at + 4 + count * BUFFER.size > len(self._data):
            raise _Broken("its metadata lists too much")
        return at + 4, count

    def pairs(self, slot: int) -> tuple[tuple[int, int], ...]:
        at, count = self.vector(slot)
        return tuple(BUFFER.iter_unpack(self._data[at : at + count * BUFFER.size]))


def _root(metadata: bytes) -> _Table:
    return _Table(metadata, _UINT.unpack_from(metadata, 0)[0])
