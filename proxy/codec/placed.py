"""Answers of produce: one result for each message in order, or ranges by queue.

results   JSON or msgpack: {results: [{message_id, queue, offset, store_ts, duplicate?} | {error}]}
ranges    `Prefer: return=minimal`: {ranges: [{queue, first_offset, count, duplicate?}]}; Accept Arrow: the same
          as a table of queue int32, first_offset int64, count int32
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.errors import MillpondError
from millpond.metadata.client import QueueInfo
from millpond.proxy.codec import fixed
from millpond.proxy.frame_plan import Placed, PlacedRun, PlacedSingle
from millpond.proxy.message_id import prefix

_BY_COLUMNS = 64
"""Results of fewer messages are made one by one: 13 us for 32, 39 for 64 and 73 for 128, where columns take 28, 29 and
46. Those of several queues always are: 0.27 ms for 1,000, where columns and putting them in order took 0.29."""


class ResultError(msgspec.Struct, frozen=True):
    code: str
    message: str
    retryable: bool


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """`duplicate`: the message stands since an earlier request; its place may be forgotten (id and offset null)."""

    message_id: str | None
    queue: int
    offset: int | None
    store_ts: int | None
    duplicate: bool = False


class Refused(msgspec.Struct, frozen=True):
    error: ResultError


class ProduceResults(msgspec.Struct, frozen=True):
    results: list[Result | Refused]


class Range(msgspec.Struct, frozen=True, omit_defaults=True):
    """`first_offset` -1: duplicates whose place is forgotten."""

    queue: int
    first_offset: int
    count: int
    duplicate: bool = False


class ProduceRanges(msgspec.Struct, frozen=True):
    ranges: list[Range]


class QueuePlaced(NamedTuple):
    """What became of those rows of a request that went to one queue; `rows` None: all of them."""

    queue: QueueInfo
    rows: npt.NDArray[np.int64] | None
    placed: Placed | PlacedRun


RANGES_SCHEMA = pa.schema([("queue", pa.int32()), ("first_offset", pa.int64()), ("count", pa.int32())])


def refused(error: MillpondError) -> Refused:
    return Refused(ResultError(error.code, error.detail, error.retryable))


def result_of(queue: QueueInfo, placed: PlacedSingle) -> Result:
    if placed.offset < 0:
        return Result(None, queue.queue, None, None, placed.duplicate)
    message_id = f"{prefix(queue, placed.offset)}{placed.offset}"
    return Result(message_id, queue.queue, placed.offset, placed.store_ts, placed.duplicate)


def results(count: int, errors: dict[int, MillpondError], parts: Sequence[QueuePlaced]) -> list[Result | Refused]:
    """In the order of the request's `count` messages."""
    found: list[Result | Refused | None] = [None] * count
    for part in parts:
        if part.rows is None:
            found = list(_results_of(part))
        else:
            for row, result in zip(part.rows.tolist(), _results_of(part), strict=True):
                found[row] = result
        rows = range(count) if part.rows is None else part.rows
        for at, error in part.placed.errors.items():
            found[int(rows[at])] = refused(error)
    for row, error in errors.items():
        found[row] = refused(error)
    complete = [one for one in found if one is not None]
    assert len(complete) == count, "every message has its result"
    return complete


def results_json(parts: Sequence[QueuePlaced]) -> bytes | None:
    """`results` of a request all of which is new in one queue, as JSON, by columns: no object for a message is made.
    None when it is not, or when the messages are too few to be worth it."""
    queue, rows, placed = parts[0]
    if rows is not None or not isinstance(placed, PlacedRun) or placed.rows < _BY_COLUMNS:
        return None
    first = placed.first_offset
    begin, then = f'{{"message_id":"{prefix(queue, first)}'.encode(), f'","queue":{queue.queue},"offset":'.encode()
    end = f',"store_ts":{placed.store_ts}}},'.encode()
    tables = [
        fixed.beside([begin + high, low, then + high, low, end], len(low)).reshape(-1).data
        for high, low in fixed.consecutive(first, first + placed.rows)
    ]
    tables[-1] = tables[-1][:-1]
    return b"".join((b'{"results":[', *tables, b"]}"))


def _results_of(part: QueuePlaced) -> Iterable[Result]:
    queue, placed = part.queue, part.placed
    if isinstance(placed, PlacedRun):
        offsets = range(placed.first_offset, placed.first_offset + placed.rows)
        start = prefix(queue, placed.first_offset)
        return map(
            Result, [f"{start}{offset}" for offset in offsets], repeat(queue.queue), offsets, repeat(placed.store_ts)
        )
    each = zip(placed.offsets.tolist(), placed.store_ts.tolist(), placed.duplicate.tolist(), strict=True)
    return [result_of(queue, PlacedSingle(*one)) for one in each]


def ranges(parts: Sequence[QueuePlaced]) -> list[Range]:
    """Runs of consecutive offsets by queue, in order of the rows; failed rows are left out."""
    found: list[Range] = []
    for part in parts:
        placed = part.placed
        if isinstance(placed, PlacedRun):
            found.append(Range(part.queue.queue, placed.first_offset, placed.rows))
            continue
        good = np.ones(len(placed.offsets), bool)
        good[list(placed.errors)] = False
        offsets, duplicate = placed.offsets[good], placed.duplicate[good]
        if not len(offsets):
            continue
        forgotten = (offsets[1:] < 0) & (offsets[:-1] < 0)
        breaks = ((np.diff(offsets) != 1) & ~forgotten) | (np.diff(duplicate.astype(np.int8)) != 0)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1, [len(offsets)]))
        found.extend(
            Range(part.queue.queue, int(offsets[at]), end - at, bool(duplicate[at]))
            for at, end in pairwise(starts.tolist())
        )
    return found


def ranges_table(found: Sequence[Range]) -> pa.Buffer:
    """As an Arrow stream of `RANGES_SCHEMA`."""
    arrays = [
        pa.array([one.queue for one in found], pa.int32()),
        pa.array([one.first_offset for one in found], pa.int64()),
        pa.array([one.count for one in found], pa.int32()),
    ]
    batch = pa.RecordBatch.from_arrays(arrays, schema=RANGES_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, RANGES_SCHEMA) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
