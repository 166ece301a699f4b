"""The frame: what the commitlog is made of.

    offset size  field
         0    4  magic "MPF1"             the last character is the format version
         4    4  header checksum          CRC32C of bytes 8..96, seeded with the log id's own checksum
         8    8  position                 where in the log this frame stands: tells stale bytes of a recycled file
        16    8  confirmed position       as the writer knew it; never decreases along the log
        24    4  epoch                    of the store group
        28    1  kind                     1 messages  2 state  3 epoch start  4 mark  5 filler
        29    1  codec                    of the payload: 0 none  1 lz4  2 zstd (inside the Arrow message)
        30    1  flags                    1 more (the append group goes on)  2 copied (fold and time index ignore it)
        31    1  schema version           of payload and sidecar: 1
        32    4  sidecar length           bytes
        36    4  payload length           bytes
        40    4  sidecar checksum         CRC32C
        44    4  payload checksum         CRC32C
        48    8  queue id                 0 for frames without a queue
        56    8  first offset
        64    4  rows                     messages (kind 1) or operations (kind 2)
        68    4  columns                  bitmap, see `core.schema`
        72    8  store timestamp          ms since 1970 UTC
        80    4  payload size once decompressed
        84   12  zero
        96       sidecar, then payload, then zeros up to a multiple of 8

    sidecar of a messages frame, columns one after another:
        tag_hash u32[n]  key_hash u32[n]  [deliver_at i64[n]]  [dedup_hash 16B[n]  dedup_check u32[n]]  [parts]
    parts: u32 count, then for each: u16 id length, id, i64 previous (-1: opens), i64 first, i64 last, u32 row, u32 rows

A frame never crosses a segment; what remains of a segment is one filler (header only, its payload length
says how much). A position is 8-byte aligned. Truth: checksummed, and replicated byte by byte.
Integers are little-endian. Header checksums are seeded with the store group's secret random log id, so that
a message body cannot contain a frame that a scan would believe.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.schema import DEDUP, DELIVER_AT, PARTS

MAGIC = b"MPF1"
HEADER_BYTES = 96
ALIGNMENT = 8
VERSION = 1

MESSAGES, STATE, EPOCH_START, MARK, FILLER = 1, 2, 3, 4, 5
MORE, COPIED = 1, 2
CODEC_NONE, CODEC_LZ4, CODEC_ZSTD = 0, 1, 2

_BODY = struct.Struct("<QQIBBBBIIIIQQIIqI12x")
_START = struct.Struct("<4sI")
_PART = struct.Struct("<qqqII")
assert _START.size + _BODY.size == HEADER_BYTES


class FrameHeader(NamedTuple):
    """The fixed header, without magic and checksum; field meanings as drawn above."""

    position: int
    confirmed: int
    epoch: int
    kind: int
    codec: int
    flags: int
    schema_version: int
    sidecar_length: int
    payload_length: int
    sidecar_crc: int
    payload_crc: int
    queue_id: int
    first_offset: int
    rows: int
    columns: int
    store_ts: int
    payload_size: int

    @property
    def length(self) -> int:
        """Bytes this frame takes in the log, padding included."""
        return aligned(HEADER_BYTES + self.sidecar_length + self.payload_length)


class ProducerPart(msgspec.Struct, frozen=True):
    """One part of a producer session inside a frame. `previous` is -1 when the part opens the session."""

    producer_id: str
    previous: int
    first: int
    last: int
    row: int
    rows: int


def aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def seed_of(log_id: bytes) -> int:
    """The seed of header checksums for a store group's log id (16 secret random bytes)."""
    return int(google_crc32c.value(log_id))


def pack_header(header: Sequence[int], seed: int) -> bytes:
    """`header`: the fields of a `FrameHeader`, in their order."""
    body = _BODY.pack(*header)
    return _START.pack(MAGIC, google_crc32c.extend(seed, body)) + body


def unpack_header(data: bytes | memoryview, seed: int) -> FrameHeader | None:
    """The header in the first 96 bytes of `data`, or None when it is not one of this log."""
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        return None
    body = bytes(data[8:HEADER_BYTES])
    if google_crc32c.extend(seed, body) != int.from_bytes(data[4:8], "little"):
        return None
    return FrameHeader._make(_BODY.unpack(body))


class Sidecar(NamedTuple):
    """The columns a store knows of each row without opening the payload (views, not copies)."""

    tag_hash: npt.NDArray[np.uint32]
    key_hash: npt.NDArray[np.uint32]
    deliver_at: npt.NDArray[np.int64] | None
    dedup_hash: npt.NDArray[np.void] | None  # V16
    dedup_check: npt.NDArray[np.uint32] | None
    parts: list[ProducerPart]


def pack_sidecar(sidecar: Sidecar) -> bytes:
    """`sidecar` as bytes; the caller sets the matching bits in `columns`."""
    pieces = [sidecar.tag_hash.tobytes(), sidecar.key_hash.tobytes()]
    if sidecar.deliver_at is not None:
        pieces.append(sidecar.deliver_at.tobytes())
    if sidecar.dedup_hash is not None:
        assert sidecar.dedup_check is not None
        pieces += [sidecar.dedup_hash.tobytes(), sidecar.dedup_check.tobytes()]
    if sidecar.parts:
        pieces.append(pack_parts(sidecar.parts))
    return b"".join(pieces)


def pack_parts(parts: list[ProducerPart]) -> bytes:
    """The parts table, which stands last in a sidecar."""
    pieces = [len(parts).to_bytes(4, "little")]
    for part in parts:
        name = part.producer_id.encode()
        pieces += [len(name).to_bytes(2, "little"), name]
        pieces.append(_PART.pack(part.previous, part.first, part.last, part.row, part.rows))
    return b"".join(pieces)


def unpack_sidecar(data: bytes | memoryview | pa.Buffer, count: int, columns: int) -> Sidecar:
    """The columns in `data`. Raises ValueError when the lengths do not fit."""
    view = memoryview(data)
    at = 8 * count
    tag_hash = np.frombuffer(view, np.uint32, count, 0)
    key_hash = np.frombuffer(view, np.uint32, count, 4 * count)
    deliver_at = dedup_hash = dedup_check = None
    if columns & DELIVER_AT:
        deliver_at = np.frombuffer(view, np.int64, count, at)
        at += 8 * count
    if columns & DEDUP:
        dedup_hash = np.frombuffer(view, "V16", count, at)
        dedup_check = np.frombuffer(view, np.uint32, count, at + 16 * count)
        at += 20 * count
    parts: list[ProducerPart] = []
    if columns & PARTS:
        total = int.from_bytes(view[at : at + 4], "little")
        at += 4
        for _ in range(total):
            name_bytes = int.from_bytes(view[at : at + 2], "little")
            name = bytes(view[at + 2 : at + 2 + name_bytes]).decode()
            at += 2 + name_bytes
            try:
                parts.append(ProducerPart(name, *_PART.unpack_from(view, at)))
            except struct.error as error:
                raise ValueError("parts table cut short") from error
            at += _PART.size
    if at != len(view):
        raise ValueError(f"sidecar of {len(view)} bytes, expected {at}")
    return Sidecar(tag_hash, key_hash, deliver_at, dedup_hash, dedup_check, parts)
