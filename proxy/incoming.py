"""Messages as they came in, in the two shapes the produce path knows: one (`Single`) or a batch (`Incoming`).

Codecs make them, `encode` and `coalesce` use them. Nothing here has been checked against limits yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import sub
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import pyarrow as pa

from millpond.core.errors import BadRequest
from millpond.core.frame import CODEC_NONE, ProducerPart
from millpond.core.http.call import Input
from millpond.core.limits import PRODUCER_ID_BYTES, SEQUENCE_MOST
from millpond.core.schema import BORN_TS, KEY, PROPERTIES, PROPERTIES_TYPE, TAG, TIMESTAMP, message_schema


class Single(NamedTuple):
    """One message; text is UTF-8. `queue` is the number its producer asked for."""

    body: bytes | str
    key: bytes | str | None = None
    tag: str | None = None
    properties: dict[str, str] | None = None
    born_ts: int | None = None
    dedup_id: str | None = None
    queue: int | None = None


class Session(Input, frozen=True):
    """`producer` of a request: a part of a session. All its messages go to `queue`; sequences may have gaps."""

    id: str
    queue: int
    first: int
    last: int
    previous: int | None = None

    def part(self, rows: int) -> ProducerPart:
        """As it stands in a frame. Raises BadRequest naming the field that cannot be."""
        if not 1 <= len(self.id.encode()) <= PRODUCER_ID_BYTES or not self.id.isprintable():
            raise BadRequest.field("producer.id", f"1 to {PRODUCER_ID_BYTES} printable bytes")
        if self.previous is not None and not 0 <= self.previous < self.first:
            raise BadRequest.field("producer.previous", "null, or a number from 0 and below first", self.previous)
        if not 0 <= self.first <= self.last <= SEQUENCE_MOST:
            raise BadRequest.field("producer.last", f"first <= last, from 0 to {SEQUENCE_MOST}", self.last)
        if self.last - self.first + 1 < rows:
            raise BadRequest.field("producer.last", f"room for {rows} messages between first and last", self.last)
        previous = -1 if self.previous is None else self.previous
        return ProducerPart(self.id, previous, self.first, self.last, 0, rows)


class Standing:
    """Messages that stand in `payload` as `message_schema(columns)`, and are decoded when their batch is asked for."""

    __slots__ = ()
    decoded: pa.RecordBatch | None
    columns: int
    payload: pa.Buffer | None

    @property
    def batch(self) -> pa.RecordBatch:
        if self.decoded is None:
            batch = pa.ipc.read_record_batch(self.payload, message_schema(self.columns))
            self.decoded = batch  # type: ignore[misc]  # a slot of each subclass
        return self.decoded


@dataclass(slots=True)
class Incoming(Standing):
    """A batch in columns: `batch` has exactly `message_schema(columns)`; `dedup_ids` utf8, `queues` int32 beside it.

    `payload`: the record batch message as it was sent, when it can stand in a frame as it is; `codec` is what the
    producer compressed with, `payload_size` the payload's size once decompressed. `decoded`: None of few bodies alone,
    whose `payload` is decoded when somebody asks for the batch; `bounds` are those of their message (`OnlyBodies`).
    """

    decoded: pa.RecordBatch | None
    columns: int
    dedup_ids: pa.Array | None = None
    queues: pa.Array | None = None
    payload: pa.Buffer | None = None
    payload_size: int = 0
    codec: int = CODEC_NONE
    bounds: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1 if self.bounds else int(self.batch.num_rows)

    def fits(self, body_bytes: int) -> bool:
        """Whether it is known to have nothing but bodies of at most so many bytes."""
        return bool(self.bounds) and max(map(sub, self.bounds[1:], self.bounds)) <= body_bytes


class Request(NamedTuple):
    """A produce request: one message without a session, or a batch."""

    single: Single | None
    batch: Incoming | None
    session: Session | None


Optional = Sequence[Any] | None  # of a value or None for each row; None: nobody has one


def gather(
    bodies: Sequence[bytes | str],
    keys: Optional = None,
    tags: Optional = None,
    properties: Optional = None,
    born_ts: Optional = None,
    dedup_ids: Optional = None,
    queues: Optional = None,
) -> Incoming:
    """Sequences of n values as a batch; a column nobody uses is left out."""
    batch, columns = batch_of(bodies, keys, tags, properties, born_ts)
    return Incoming(
        batch,
        columns,
        pa.array(dedup_ids, pa.string()) if _used(dedup_ids) else None,
        pa.array(queues, pa.int32()) if _used(queues) else None,
    )


def batch_of(
    bodies: Sequence[bytes | str],
    keys: Optional,
    tags: Optional,
    properties: Optional,
    born_ts: Optional,
) -> tuple[pa.RecordBatch, int]:
    """The columns that are used as a record batch of `message_schema`, and their bitmap."""
    columns, arrays = 0, []
    if _used(keys):
        columns |= KEY
        arrays.append(pa.array(keys, pa.binary()))
    if _used(tags):
        columns |= TAG
        arrays.append(pa.array(tags, pa.string()))
    if _used(properties):
        columns |= PROPERTIES
        arrays.append(_maps(properties))
    if _used(born_ts):
        columns |= BORN_TS
        arrays.append(pa.array(born_ts, pa.int64()).cast(TIMESTAMP))
    arrays.append(pa.array(bodies, pa.binary()))
    return pa.RecordBatch.from_arrays(arrays, schema=message_schema(columns)), columns


def _maps(properties: Sequence[Any]) -> pa.Array:
    """Dicts as one map array: names and values are flattened first (five times faster than converting each)."""
    sizes = [0 if one is None else len(one) for one in properties]
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    present = [one for one in properties if one]
    names = pa.array(list(chain.from_iterable(present)), pa.string())
    values = pa.array(list(chain.from_iterable(map(dict.values, present))), pa.string())
    missing = pa.array([one is None for one in properties]) if properties.count(None) else None
    return pa.MapArray.from_arrays(pa.array(offsets), names, values, type=PROPERTIES_TYPE, mask=missing)


def _used(values: Optional) -> TypeGuard[Sequence[Any]]:
    return values is not None and values.count(None) < len(values)
