"""From frames of the log to rows of the tier, by columns: `rows_of`, and how large rows are: `row_bytes`.

The Arrow columns of the frames are carried over as they are; queue, offset and store timestamp are added as
whole columns. Nothing here looks at a single message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.errors import Internal
from millpond.core.ranges import split
from millpond.core.schema import PAYLOAD_COLUMNS, TIER_SCHEMA, TIMESTAMP, message_schema

_ROW_BYTES = 24  # queue, offset, store and born timestamp of one row
_PROPERTY_BYTES = 8  # where its name and its value end
_TEXTS = {"key", "tag", "body", "origin"}
_CHUNK_BYTES = 64 * 1024  # smaller chunks on average are put together: every later step works chunk by chunk


class MessageFrame(Protocol):
    """What is needed of a stored messages frame (`store.client.StoredFrame` is one)."""

    @property
    def first_offset(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def store_ts(self) -> int: ...
    @property
    def payload(self) -> pa.Buffer: ...


def rows_of(queue: int, frames: Sequence[MessageFrame]) -> pa.Table:
    """The rows of consecutive frames of one queue, as TIER_SCHEMA; columns they do not have are null.

    Raises Internal(corrupt_range) when the frames leave a gap, overlap, or do not hold what they claim.
    """
    tables = []
    for columns, run in groupby(frames, key=lambda frame: frame.columns & PAYLOAD_COLUMNS):
        tables.append(_aligned(queue, columns, list(run)))
    table = pa.concat_tables(tables) if tables else TIER_SCHEMA.empty_table()
    offsets = table.column("offset").to_numpy()
    if (np.diff(offsets) != 1).any():
        raise Internal("corrupt_range", f"frames of queue {queue} from offset {offsets[0]} are not consecutive")
    return table


def _aligned(queue: int, columns: int, frames: list[MessageFrame]) -> pa.Table:
    """Rows of frames that all have the same columns."""
    schema = message_schema(columns)
    try:
        batches = [pa.ipc.read_record_batch(frame.payload, schema) for frame in frames]
    except (pa.ArrowException, EOFError, OSError, ValueError) as error:
        raise Internal("corrupt_range", f"{_named(queue, frames)} does not open: {error}") from error
    counts = np.fromiter((frame.count for frame in frames), np.int64, len(frames))
    if [batch.num_rows for batch in batches] != counts.tolist():
        raise Internal("corrupt_range", f"{_named(queue, frames)} does not hold the rows it claims")
    messages = pa.Table.from_batches(batches, schema)
    if sum(frame.payload.size for frame in frames) < _CHUNK_BYTES * len(frames):
        messages = messages.combine_chunks()
    first = np.fromiter((frame.first_offset for frame in frames), np.int64, len(frames))
    store_ts = np.fromiter((frame.store_ts for frame in frames), np.int64, len(frames))
    rows = messages.num_rows
    starts = np.cumsum(counts) - counts
    added = {
        "queue": pa.array(np.full(rows, queue, np.int32)),
        "offset": pa.array(np.arange(rows) + np.repeat(first - starts, counts)),
        "store_ts": pa.array(np.repeat(store_ts, counts)).cast(TIMESTAMP),
    }
    arrays = [
        added[field.name]
        if field.name in added
        else messages.column(field.name)
        if field.name in schema.names
        else pa.nulls(rows, field.type)
        for field in TIER_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=TIER_SCHEMA)


def _named(queue: int, frames: list[MessageFrame]) -> str:
    return f"one of {len(frames)} frames of queue {queue} from offset {frames[0].first_offset}"


def row_bytes(table: pa.Table) -> npt.NDArray[np.int64]:
    """Raw bytes of each row of a table with columns of TIER_SCHEMA, all or some, i64[rows]: its texts and bytes, 24 for
    the numbers, and 8 for each property."""
    sizes: npt.NDArray[np.int64] = np.full(table.num_rows, _ROW_BYTES)
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count == len(column):
            continue
        if name in _TEXTS:
            sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy()
        elif name == "properties":
            sizes += np.concatenate([_map_bytes(chunk) for chunk in column.chunks])
    return sizes


def cut(batch: pa.RecordBatch, most_bytes: int, most_rows: int) -> list[pa.RecordBatch]:
    """`batch`, with columns as in `row_bytes`, in slices of at most so much, or one row, and of so many rows."""
    return [
        batch.slice(row, min(most_rows, end - row))
        for start, end in split(row_bytes(pa.Table.from_batches([batch])), most_bytes)
        for row in range(start, end, most_rows)
    ]


def _map_bytes(maps: pa.MapArray) -> npt.NDArray[np.int64]:
    """Bytes of names and values in each of `maps`, and of Arrow's offsets to them; null is 0."""
    entries = pc.add(pc.binary_length(maps.keys), pc.fill_null(pc.binary_length(maps.items), 0)).to_numpy(False)
    ends = np.concatenate(([0], np.cumsum(entries + _PROPERTY_BYTES, dtype=np.int64)))
    offsets = maps.offsets.to_numpy()
    return np.asarray(ends[offsets[1:]] - ends[offsets[:-1]], np.int64)
