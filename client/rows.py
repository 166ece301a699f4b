"""Messages on their way out: `Rows`, and their Arrow stream without a copy of a body.

    stream   schema message | batch metadata, the other columns, offsets of the bodies | bodies, as they are | end

A batch is laid out around the bodies (`millpond.core.bodies`), and these follow as the buffers they are: a message's
bytes are touched by the socket alone.
Compressed batches are encoded by pyarrow as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.arrow import END_OF_STREAM
from millpond.core.bodies import around, schema_of
from millpond.core.errors import BadRequest
from millpond.core.gathered import Buffer
from millpond.core.http.wire import Buffers
from millpond.core.schema import columns_of, message_schema

ROW_BYTES = 24  # what a row costs beside its values: offsets and validity of its columns
SMALL_BYTES = 256  # bodies below it on average are put together first: a buffer each costs the kernel more than that


class Rows:
    """`lengths` int32[n] of the bodies; `bodies`: their bytes back to back, in buffers; `beside`: the other columns in
    the order of `message_schema`, or None."""

    __slots__ = ("beside", "bodies", "bytes", "lengths")

    def __init__(
        self,
        lengths: npt.NDArray[np.int32],
        bodies: Sequence[Buffer],
        beside: pa.RecordBatch | None = None,
        size: int | None = None,
    ) -> None:
        """`size`: their bytes, ROW_BYTES each among them, where that is known already."""
        self.lengths = lengths
        self.bodies = bodies
        self.beside = beside
        if size is None:
            beside_bytes = 0 if beside is None else beside.nbytes
            size = int(lengths.sum()) + beside_bytes + ROW_BYTES * len(lengths)
        self.bytes = size

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of_bodies(cls, bodies: list[bytes], beside: pa.RecordBatch | None = None, size: int | None = None) -> Rows:
        """One buffer a row: what `take` needs."""
        return cls(np.fromiter(map(len, bodies), np.int32, len(bodies)), bodies, beside, size)

    @classmethod
    def of_batch(cls, batch: pa.RecordBatch) -> Rows:
        """A batch of `message_schema`; its body is not copied."""
        if not batch.num_rows:
            return cls(np.zeros(0, np.int32), [])
        body = batch.column(batch.num_columns - 1)
        _, offsets, data = body.buffers()
        ends = np.frombuffer(offsets, np.int32, len(body) + 1, 4 * body.offset)
        bodies = [] if data is None else [data[int(ends[0]) : int(ends[-1])]]
        beside = batch.select(batch.schema.names[:-1]) if batch.num_columns > 1 else None
        return cls(np.diff(ends), bodies, beside)

    @property
    def names(self) -> list[str]:
        """Of the columns beside the body."""
        return [] if self.beside is None else list(self.beside.schema.names)

    def take(self, rows: npt.NDArray[np.intp]) -> Rows:
        """These rows, in their order; only of rows with a buffer each."""
        bodies = self.bodies
        beside = None if self.beside is None else self.beside.take(pa.array(rows))
        return Rows(self.lengths[rows], [bodies[row] for row in rows.tolist()], beside)


def stream(parts: Sequence[Rows]) -> Buffers:
    """`parts`, which have the same columns, as one Arrow stream of one batch."""
    beside = _beside(parts)
    lengths = parts[0].lengths if len(parts) == 1 else np.concatenate([part.lengths for part in parts])
    before, after, bounds = around(lengths, beside)
    body_bytes = int(bounds[-1])
    bodies = [part.bodies for part in parts]
    if body_bytes < SMALL_BYTES * len(lengths):
        bodies = [[b"".join(chain.from_iterable(bodies))]]
    front: list[Buffer] = [_schema_message(schema_of(beside)), before]
    end = after + END_OF_STREAM
    return Buffers(front, *bodies, [end], length=sum(map(len, front)) + body_bytes + len(end))


def compressed_stream(parts: Sequence[Rows], compression: str) -> Buffers:
    """The same, its buffers compressed."""
    beside = _beside(parts)
    lengths = np.concatenate([part.lengths for part in parts])
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    data = pa.py_buffer(b"".join(chain.from_iterable(part.bodies for part in parts)))
    body = pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(offsets), data])
    columns = [body] if beside is None else [*beside.columns, body]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema_of(beside))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return Buffers([sink.getvalue()])


def _beside(parts: Sequence[Rows]) -> pa.RecordBatch | None:
    first = parts[0].beside
    if first is None or len(parts) == 1:
        return first
    return pa.concat_batches([part.beside for part in parts])


@cache
def _schema_message(schema: pa.Schema) -> bytes:
    message: bytes = schema.serialize().to_pybytes()
    return message


def in_message_schema(batch: pa.RecordBatch) -> pa.RecordBatch:
    """`batch` in the log's exact schema: columns in its order, text keys as bytes, naive times as UTC.

    Raises BadRequest on a column that messages do not have, or that does not convert.
    """
    names = set(batch.schema.names)
    unknown = names - set(message_schema(columns_of(names)).names)
    if unknown or "body" not in names or len(names) != batch.num_columns:
        raise BadRequest.field("columns", "body and any of key, tag, properties, born_ts", sorted(batch.schema.names))
    schema = message_schema(columns_of(names))
    if batch.schema.equals(schema):
        return batch
    try:
        columns = [batch.column(field.name).cast(field.type) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    except pa.ArrowException as error:
        raise BadRequest("invalid_request", f"a column has a wrong type: {error}") from error
