"""Where the metadata of an encoded record batch names its lengths: for batches that are put together from a template.

    encoded   FFFFFFFF, i32 metadata length, metadata (flatbuffer `Message`: body length, `RecordBatch`: buffers), body

pyarrow encodes a batch whose large column is empty; `places` says which numbers differ with the real one.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from millpond.core.gathered import Buffer

LONG = struct.Struct("<q")
BUFFER = struct.Struct("<qq")  # of a record batch: offset in the body, length
_UINT, _INT, _USHORT = (struct.Struct("<" + code) for code in "IiH")
_HEADER, _BODY_LENGTH, _BUFFERS = 2, 3, 2  # slots of the flatbuffer tables (Message.fbs)


class Places(NamedTuple):
    """Positions in an encoded record batch: of its body's length (i64), of the first of its `buffer_count` buffers, and
    of its body."""

    body_length: int
    buffers: int
    buffer_count: int
    body: int


def places(encoded: Buffer) -> Places:
    """Of a batch that pyarrow has encoded."""
    message = 8 + int(_UINT.unpack_from(encoded, 8)[0])  # behind the continuation marker and the metadata's length
    header_at = _slot(encoded, message, _HEADER)
    vector_at = _slot(encoded, header_at + int(_UINT.unpack_from(encoded, header_at)[0]), _BUFFERS)
    vector_at += int(_UINT.unpack_from(encoded, vector_at)[0])
    count = int(_UINT.unpack_from(encoded, vector_at)[0])
    body = 8 + int(_INT.unpack_from(encoded, 4)[0])
    return Places(_slot(encoded, message, _BODY_LENGTH), vector_at + 4, count, body)


def _slot(data: Buffer, table: int, slot: int) -> int:
    """Where a field of a flatbuffer table stands."""
    vtable = table - int(_INT.unpack_from(data, table)[0])
    offset = int(_USHORT.unpack_from(data, vtable + 4 + 2 * slot)[0])
    assert offset, "the field is there"
    return table + offset


def aligned(size: int) -> int:
    """With the padding behind a buffer."""
    return -(-size // 8) * 8
