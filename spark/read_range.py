"""`read_range`: the messages [first, end) of one queue, in order, without a gap, as Arrow batches.

Reads the public API in Arrow, whose proxy decides at each call whether the store or the tier has them: what was
planned hot may be cold by now. Offsets are checked to be dense; a hole is an error, never silently skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.errors import Conflict, Internal, OffsetExpired
from millpond.core.limits import READ_MESSAGES
from millpond.core.schema import TIER_SCHEMA
from millpond.spark.http import ARROW, HttpClient, path_of
from millpond.spark.plan import ClockName

Lost = Callable[[int, int], None]
"""Told of offsets [first, end) that are lost, which are then left out."""

_METADATA = b"millpond"
# which member of a problem says where messages go on behind what is lost, by its code
_GOES_ON = {"offset_expired": "start_offset", "corrupt_range": "next_offset"}


class _Position(msgspec.Struct, frozen=True):
    """What the answer's schema metadata says under `millpond`."""

    next_offset: int
    start_offset: int = 0
    end_offset: int = -1
    topic: str = ""
    topic_id: int | None = None


class Range(msgspec.Struct, frozen=True):
    """Offsets [first, end) of a queue. `topic_id` None: whichever topic has that name."""

    topic: str
    queue: int
    first: int
    end: int
    topic_id: int | None = None


def read_range(
    client: HttpClient, span: Range, limit: int = READ_MESSAGES, lost: Lost | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches of `TIER_SCHEMA`, together exactly the offsets of `span`, but for those that `lost` is told of.

    Raises, where there is no `lost`, OffsetExpired when retention has passed `first` and Internal(corrupt_range) where
    messages are damaged; Internal also when other offsets are answered than asked for; Conflict(topic_replaced).
    """
    path = path_of("topics", span.topic, "queues", span.queue, "messages")
    at = span.first
    while at < span.end:
        query = {"offset": at, "limit": min(limit, span.end - at)}
        try:
            answer = client.call("GET", path, query=query, accept=ARROW)
        except (OffsetExpired, Internal) as error:
            if error.code not in _GOES_ON:
                raise
            goes_on = error.extra.get(_GOES_ON[error.code])
            if lost is None or not isinstance(goes_on, int) or goes_on <= at:
                where = f"{span.topic!r} queue {span.queue}, from offset {at} on"
                raise type(error)(error.code, f"{where}: {error.detail}", **error.extra) from error
            lost(at, min(goes_on, span.end))
            at = goes_on
            continue
        with pa.ipc.open_stream(answer.body) as stream:
            position = msgspec.json.decode((stream.schema.metadata or {})[_METADATA], type=_Position)
            if None not in {span.topic_id, position.topic_id} and span.topic_id != position.topic_id:
                raise Conflict("topic_replaced", f"{span.topic!r} is another topic than when this was planned")
            for batch in stream:
                clipped = _clip(batch, at, span)
                at += clipped.num_rows
                if clipped.num_rows:
                    yield clipped
        if position.next_offset < at or (position.next_offset == query["offset"]):
            raise Internal(
                "corrupt_range",
                f"{span.topic!r} queue {span.queue}: asked for offsets from {query['offset']} to {span.end}, "
                f"got none (it ends at {position.end_offset})",
            )


def select(
    batch: pa.RecordBatch,
    *,
    clock: ClockName = "store",
    from_ms: int | None = None,
    to_ms: int | None = None,
    tags: frozenset[str] | None = None,
    properties: dict[str, str] | None = None,
) -> pa.RecordBatch:
    """The rows with `from_ms` <= clock value < `to_ms`, one of `tags`, and all of `properties`."""
    masks: list[pa.Array] = []
    if from_ms is not None or to_ms is not None:
        stamps = batch.column(f"{clock}_ts").cast(pa.int64())
        masks += [pc.greater_equal(stamps, from_ms)] if from_ms is not None else []
        masks += [pc.less(stamps, to_ms)] if to_ms is not None else []
    if tags is not None:
        masks.append(pc.is_in(batch.column("tag"), value_set=pa.array(sorted(tags), pa.string())))
    for name, value in (properties or {}).items():
        found = pc.map_lookup(batch.column("properties"), name, "last")
        masks.append(pc.equal(found, value))
    if not masks:
        return batch
    mask = masks[0]
    for other in masks[1:]:
        mask = pc.and_(mask, other)
    return batch.filter(mask)  # a null (no born_ts, no tag, no such property) is no match


def tag_set(expression: str | None) -> frozenset[str] | None:
    """The tags of `a || b`; None (every message) for no expression and for `*`."""
    if expression is None or expression.strip() in {"", "*"}:
        return None
    return frozenset(part.strip() for part in expression.split("||"))


def _clip(batch: pa.RecordBatch, at: int, span: Range) -> pa.RecordBatch:
    """The rows of `batch` below the end, in `TIER_SCHEMA`; raises Internal unless they are at, at + 1, .."""
    offsets = batch.column("offset").to_numpy(zero_copy_only=False)
    keep = int(np.searchsorted(offsets, span.end))
    if not np.array_equal(offsets[:keep], np.arange(at, at + keep)):
        raise Internal(
            "corrupt_range",
            f"{span.topic!r} queue {span.queue}: expected offsets from {at} on without a gap, "
            f"got {offsets[0]} to {offsets[-1]} in {len(offsets)} messages",
        )
    rows = batch.slice(0, keep)
    return pa.RecordBatch.from_arrays([rows.column(name) for name in TIER_SCHEMA.names], schema=TIER_SCHEMA)
