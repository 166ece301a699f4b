"""Few messages of a receive, from their frames into an Arrow answer without columns in between.

Messages that come one by one are received one by one, and making columns of TIER_SCHEMA of one message, and a stream
of those, took a seventh of what the service does for it. Few rows of frames that hold bodies alone differ from others
like them in five columns of numbers and in the bodies: so a batch of so many rows is encoded once, with empty bodies,
and each answer is a copy of it with its own numbers in their places.

    stream   schema message with what stands beside | metadata, columns up to the bodies | bodies | the columns behind

It says the same as `answers.arrow_stream`. JSON, msgpack and answers of several grants are made of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import pack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.arrow import BUFFER, END_OF_STREAM, LONG, Places, lengthen, only_bodies, places
from millpond.core.frame import aligned
from millpond.core.gathered import Buffer
from millpond.core.limits import KIB
from millpond.core.schema import TIER_SCHEMA
from millpond.proxy.frames import FEW_ROWS, bodies, has_bodies_alone, tier_rows
from millpond.store.client import StoredFrame

BYTES = 64 * KIB
"""More are not few."""

ATTEMPT = pa.field("delivery_attempt", pa.int32(), nullable=False)
RECEIVE_SCHEMA = TIER_SCHEMA.append(ATTEMPT)
METADATA_KEY = b"millpond"
_METADATA_LENGTHS = 64  # whose schema messages are kept
_QUEUE, _OFFSET, _STORE_TS = 1, 3, 5  # buffers of the first columns: each has its validity before it


class _Part(NamedTuple):
    """Those of one frame: their offsets, and where they stand in its payload (`OnlyBodies`)."""

    frame: StoredFrame
    offsets: range
    bounds: tuple[int, ...]
    data: int


@dataclass(frozen=True, slots=True)
class Few:
    """Few rows of one queue, in order, which stand for a batch until it is known what is to become of them. `queue`:
    its number in the topic."""

    parts: list[_Part]
    queue: int

    @property
    def num_rows(self) -> int:
        return sum(len(part.offsets) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Of the bodies."""
        return sum(part.bounds[-1] - part.bounds[0] for part in self.parts)

    def batch(self) -> pa.RecordBatch:
        """As TIER_SCHEMA."""
        some = [bodies(part.frame, self.queue, part.offsets.start, part.offsets.stop) for part in self.parts]
        offsets = range(self.parts[0].offsets.start, self.parts[-1].offsets.stop)
        times = np.repeat([part.store_ts for part in some], [part.num_rows for part in some])
        return tier_rows({"body": pa.concat_arrays([part.column for part in some])}, self.queue, offsets, times)


def few(frames: Sequence[StoredFrame], queue: int, first: int, end: int) -> Few | None:
    """The rows [first, end) of these frames, which follow each other; None when they are not few, have more than
    bodies, or one does not open. `queue`: its number in the topic."""
    if end - first > FEW_ROWS or sum(frame.payload_size for frame in frames) > BYTES:
        return None
    parts = []
    for frame in frames:
        at = only_bodies(memoryview(frame.payload)) if has_bodies_alone(frame) else None
        if at is None or len(at.bounds) != frame.count + 1:
            return None
        start = max(first, frame.first_offset)
        offsets = range(start, min(end, frame.first_offset + frame.count))
        skipped = start - frame.first_offset
        parts.append(_Part(frame, offsets, at.bounds[skipped : skipped + len(offsets) + 1], at.data))
    return Few(parts, queue)


def stream(rows: Few, attempts: npt.NDArray[np.uint32], metadata: bytes) -> list[Buffer]:
    """An Arrow stream of one batch of RECEIVE_SCHEMA; `attempts` u32[n]; `metadata`: what stands beside, as JSON."""
    count = len(attempts)
    template = _template(count)
    ends: list[int] = []
    offsets: list[int] = []
    times: list[int] = []
    texts: list[Buffer] = []
    body_bytes = 0
    for frame, run, bounds, data in rows.parts:
        start, stop = bounds[0], bounds[-1]
        if stop > start:
            texts.append(frame.payload[data + start : data + stop])
        ends += [bound - start + body_bytes for bound in bounds[:-1]]
        offsets += run
        times += [frame.store_ts] * len(run)
        body_bytes += stop - start
    ends.append(body_bytes)
    before, after = template.with_bodies(body_bytes)
    template.put(before, _QUEUE, pack(f"<{count}i", *[rows.queue] * count))
    template.put(before, _OFFSET, pack(f"<{count}q", *offsets))
    template.put(before, _STORE_TS, pack(f"<{count}q", *times))
    template.put(before, template.bodies - 1, pack(f"<{count + 1}i", *ends))
    template.put_behind(after, attempts.tobytes())
    front, back = _schema_around(len(metadata))
    return [b"".join((front, metadata, back)), before, *texts, after, END_OF_STREAM]


class _Template:
    """An encoded batch of so many rows whose bodies are empty."""

    def __init__(self, encoded: bytes, bodies: int) -> None:
        """`bodies`: which of its buffers is that of the bodies."""
        self.bodies = bodies
        self._at: Places = places(encoded)
        buffers = range(self._at.buffers, self._at.buffers + BUFFER.size * self._at.buffer_count, BUFFER.size)
        self._buffers: list[tuple[int, int]] = [BUFFER.unpack_from(encoded, at) for at in buffers]
        self._body_length = int(LONG.unpack_from(encoded, self._at.body_length)[0])
        split = self._at.body + self._buffers[bodies][0]
        self._before, self._after = encoded[:split], encoded[split:]

    def with_bodies(self, body_bytes: int) -> tuple[bytearray, bytearray]:
        """What stands before the bodies, whose metadata says that there are so many, and what stands behind them."""
        before = bytearray(self._before)
        lengthen(before, self._at, self.bodies, body_bytes)
        return before, bytearray(aligned(body_bytes) - body_bytes) + self._after

    def put(self, before: bytearray, buffer: int, values: bytes) -> None:
        """The values of a column that stands before the bodies."""
        offset, length = self._buffers[buffer]
        assert len(values) == length, "as many as there are rows"
        at = self._at.body + offset
        before[at : at + length] = values

    def put_behind(self, after: bytearray, values: bytes) -> None:
        """Those of the last column."""
        offset, length = self._buffers[-1]
        assert len(values) == length, "as many as there are rows"
        at = len(after) - self._body_length + offset
        after[at : at + length] = values


@lru_cache(FEW_ROWS)
def _template(count: int) -> _Template:
    """Which of its buffers is that of the bodies is seen by what differs when they have some bytes."""
    empty, filled = (_encoded(count, body) for body in (b"", b"xxxxxxxx"))
    at = places(empty)
    lengths = [
        [BUFFER.unpack_from(encoded, at.buffers + BUFFER.size * number)[1] for number in range(at.buffer_count)]
        for encoded in (empty, filled)
    ]
    [bodies] = (number for number in range(at.buffer_count) if lengths[0][number] == 0 and lengths[1][number])
    return _Template(empty, bodies)


def _encoded(count: int, body: bytes) -> bytes:
    batch = tier_rows({"body": pa.array([body] * count, pa.binary())}, 0, range(count), 0)
    encoded: bytes = batch.append_column(ATTEMPT, pa.array([1] * count, pa.int32())).serialize().to_pybytes()
    return encoded


@lru_cache(_METADATA_LENGTHS)
def _schema_around(length: int) -> tuple[bytes, bytes]:
    """The schema message before and behind metadata of this length."""
    mark = b"\x01" * length
    message: bytes = RECEIVE_SCHEMA.with_metadata({METADATA_KEY: mark}).serialize().to_pybytes()
    front, back = message.split(mark)
    return front, back
