"""Operations: what the payload of a state frame is made of. Version 1. Truth (the frame checksums it).

A payload is operations one after another, each a multiple of 8 bytes long, integers little-endian:

    offset size  field
         0    2  kind
         2    1  version of this kind: 1
         3    1  flags
         4    4  length of the operation, this header included
         8    .  body by kind

    kind 1 CURSOR        one (group, queue): absolute, so applying it twice changes nothing
         8   32  tenant id, topic id, group id, queue id     i64 each
        40    4  queue (number in the topic)                 u32
        44    4  runs of unsettled rows, U                   u32
        48    4  runs of removed offsets, R                  u32
        52    4  zero
        56   24  generation, head, next lease                i64 each
        80    8  skipped                                     i64
        88   24  last seek: hash of its id, from, to         i64 each
       112   8U  first offset of each run                    i64
         .   8U  lease                                       i64
         .   8U  due, ms since 1970                          i64
         .   8R  first removed offset of each run            i64
         .   4U  rows in the run                             u32
         .   4U  attempt                                     u32
         .   4R  offsets in the removed run                  u32
         .   1U  state: 1 leased  2 waiting                  u8
         .    .  zeros up to a multiple of 8
       flag 1 (reset): forget all rows of the cursor first
    kind 2 QUEUE_OPEN    tenant id, topic id, queue id, queue, first offset      i64 each
    kind 3 QUEUE_TRIM    queue id, start offset                                  i64 each
    kind 4 QUEUE_DROP    queue id                                                i64
    kind 5 GROUP_DROP    tenant id, topic id, group id                           i64 each
    kind 6 PRODUCER_CLOSE  queue id i64, u16 length, producer id as UTF-8, zeros

A run is consecutive offsets with equal columns: a grant of a thousand rows is 33 bytes of arrays, a thousand
scattered rows are 33 bytes each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.store.client import GroupRef, QueueRef

CURSOR, QUEUE_OPEN, QUEUE_TRIM, QUEUE_DROP, GROUP_DROP, PRODUCER_CLOSE = 1, 2, 3, 4, 5, 6
VERSION = 1
RESET = 1

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

_HEADER = struct.Struct("<HBBI")
_CURSOR = struct.Struct("<qqqqIII4xqqqqqqq")
_OPEN = struct.Struct("<qqqqq")
_TRIM = struct.Struct("<qq")
_QUEUE = struct.Struct("<q")
_GROUP = struct.Struct("<qqq")
_PRODUCER = struct.Struct("<qH")
_CURSOR_BYTES = _HEADER.size + _CURSOR.size
assert _CURSOR_BYTES == 112
_RUN = struct.Struct("<qqqIIB")  # the arrays behind it, when there is one run
_GONE = struct.Struct("<qI")  # and when there is one of removed offsets


class NewerFormat(ValueError):
    """The log holds an operation that this release does not know: it was written by a newer one."""


class Rows(NamedTuple):
    """Unsettled rows as columns of one length n, ascending by offset: i64, i64, i64, u32, u8."""

    offset: Array
    lease: Array
    due: Array
    attempt: Array
    state: Array


class Row(NamedTuple):
    """One of them."""

    offset: int
    lease: int
    due: int
    attempt: int
    state: int


class CursorDelta(NamedTuple):
    """The final state of one cursor's scalars, of its touched rows, and the offsets that are no longer in it."""

    group: GroupRef
    queue: QueueRef
    generation: int
    head: int
    next_lease: int
    skipped: int
    seek_hash: int
    seek_from: int
    seek_to: int
    reset: bool
    rows: Rows
    removed: Ints


class QueueOpen(NamedTuple):
    queue: QueueRef
    first_offset: int


class QueueTrim(NamedTuple):
    queue_id: int
    start_offset: int


class QueueDrop(NamedTuple):
    queue_id: int


class GroupDrop(NamedTuple):
    group: GroupRef


class ProducerClose(NamedTuple):
    queue_id: int
    producer_id: str


Operation = CursorDelta | QueueOpen | QueueTrim | QueueDrop | GroupDrop | ProducerClose


def encode(operation: Operation) -> bytes:
    """One operation as it stands in a state frame; its length is a multiple of 8."""
    match operation:
        case CursorDelta():
            return _encode_cursor(operation)
        case QueueOpen(queue, first_offset):
            return _framed(
                QUEUE_OPEN, _OPEN.pack(queue.tenant_id, queue.topic_id, queue.queue_id, queue.queue, first_offset)
            )
        case QueueTrim(queue_id, start_offset):
            return _framed(QUEUE_TRIM, _TRIM.pack(queue_id, start_offset))
        case QueueDrop(queue_id):
            return _framed(QUEUE_DROP, _QUEUE.pack(queue_id))
        case GroupDrop(group):
            return _framed(GROUP_DROP, _GROUP.pack(group.tenant_id, group.topic_id, group.group_id))
        case ProducerClose(queue_id, producer_id):
            name = producer_id.encode()
            return _framed(PRODUCER_CLOSE, _PRODUCER.pack(queue_id, len(name)) + name)


def decode(payload: bytes | memoryview, operations: int) -> Iterator[Operation]:
    """The `operations` of one state frame, in order.

    Raises NewerFormat for a kind or version this release does not know, ValueError when lengths do not fit.
    """
    view = memoryview(payload)
    at = 0
    for _ in range(operations):
        if at + _HEADER.size > len(view):
            raise ValueError("state frame cut short")
        kind, version, flags, length = _HEADER.unpack_from(view, at)
        if kind not in _DECODERS or version != VERSION:
            raise NewerFormat(
                f"state operation of kind {kind}, version {version}: written by a newer format of Millpond "
                f"(known here: kinds 1 to {PRODUCER_CLOSE}, version {VERSION})"
            )
        if length < _HEADER.size or length % 8 or at + length > len(view):
            raise ValueError(f"state operation of {length} bytes does not fit its frame")
        try:
            yield _DECODERS[kind](view[at : at + length], flags)
        except struct.error as error:
            raise ValueError(f"state operation of kind {kind} cut short") from error
        at += length
    if at != len(view):
        raise ValueError(f"{len(view) - at} bytes after the last of {operations} operations")


def split(payload: bytes, operations: int, most_bytes: int) -> list[tuple[bytes, int]]:
    """`payload` as pieces of whole operations, each of at most `most_bytes` unless one operation is larger."""
    if len(payload) <= most_bytes:
        return [(payload, operations)]
    pieces: list[tuple[bytes, int]] = []
    start = at = count = 0
    for _ in range(operations):
        length = _HEADER.unpack_from(payload, at)[3]
        if count and at + length - start > most_bytes:
            pieces.append((payload[start:at], count))
            start, count = at, 0
        at += length
        count += 1
    pieces.append((payload[start:], count))
    return pieces


def _framed(kind: int, body: bytes, flags: int = 0) -> bytes:
    length = _HEADER.size + len(body)
    padding = -length % 8
    return _HEADER.pack(kind, VERSION, flags, length + padding) + body + bytes(padding)


def _encode_cursor(delta: CursorDelta) -> bytes:
    rows, removed = delta.rows, delta.removed
    starts, counts = _runs(rows.offset, rows.lease, rows.due, rows.attempt, rows.state)
    gone, gone_counts = _runs(removed)
    firsts = Rows._make(column[starts] for column in rows)
    return encode_runs(delta._replace(rows=firsts, removed=removed[gone]), counts, gone_counts)


def encode_runs(delta: CursorDelta, counts: Array, gone_counts: Array) -> bytes:
    """A cursor's operation when its runs are known: `delta` has the first row of each, and the first removed offset;
    their lengths are `counts` and `gone_counts`, u32."""
    rows, removed = delta.rows, delta.removed
    pieces = [
        _scalars(delta, len(counts), len(gone_counts)),
        rows.offset.tobytes(), rows.lease.tobytes(), rows.due.tobytes(), removed.tobytes(),
        counts.tobytes(), rows.attempt.tobytes(), gone_counts.tobytes(), rows.state.tobytes(),
    ]  # fmt: skip
    return _framed(CURSOR, b"".join(pieces), RESET if delta.reset else 0)


def encode_run(delta: CursorDelta, run: range, first: Row | None) -> bytes:
    """A cursor's operation when one run is all: its rows are as `first`, or removed when that is None. Of `delta` only
    the scalars are looked at."""
    if first is None:
        body = _scalars(delta, 0, 1) + _GONE.pack(run.start, len(run))
    else:
        body = _scalars(delta, 1, 0) + _RUN.pack(
            run.start, first.lease, first.due, len(run), first.attempt, first.state
        )
    return _framed(CURSOR, body, RESET if delta.reset else 0)


def _scalars(delta: CursorDelta, runs: int, gone: int) -> bytes:
    group, queue = delta.group, delta.queue
    return _CURSOR.pack(
        group.tenant_id, group.topic_id, group.group_id, queue.queue_id, queue.queue, runs, gone,
        delta.generation, delta.head, delta.next_lease, delta.skipped,
        delta.seek_hash, delta.seek_from, delta.seek_to,
    )  # fmt: skip


def _runs(offsets: Ints, *columns: Array) -> tuple[Ints, npt.NDArray[np.uint32]]:
    """Where each run begins (index), and its rows."""
    count = len(offsets)
    if count < 2:
        return np.zeros(count, np.int64), np.ones(count, np.uint32)
    breaks = offsets[1:] != offsets[:-1] + 1
    for column in columns:
        breaks |= column[1:] != column[:-1]
    starts = np.empty(np.count_nonzero(breaks) + 1, np.int64)
    starts[0] = 0
    starts[1:] = np.flatnonzero(breaks) + 1
    return starts, np.diff(starts, append=count).astype(np.uint32)


def spread(firsts: Ints, counts: Array) -> Ints:
    """[f0, f0+1, .. f0+c0-1, f1, ..]: all members of consecutive runs."""
    counts = counts.astype(np.int64)
    before = np.cumsum(counts) - counts
    return np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))


def _decode_cursor(view: memoryview, flags: int) -> CursorDelta:
    (tenant, topic, group, queue_id, queue, runs, gone, generation, head, next_lease, skipped, seek_hash, seek_from,
     seek_to) = _CURSOR.unpack_from(view, _HEADER.size)  # fmt: skip
    if len(view) < _CURSOR_BYTES + 33 * runs + 12 * gone:
        raise ValueError("cursor operation cut short")
    at = _CURSOR_BYTES
    columns = []
    for dtype, count in (("<i8", runs), ("<i8", runs), ("<i8", runs), ("<i8", gone), ("<u4", runs), ("<u4", runs),
                         ("<u4", gone), ("u1", runs)):  # fmt: skip
        column = np.frombuffer(view, dtype, count, at)
        columns.append(column)
        at += column.nbytes
    first, lease, due, gone_first, rows, attempt, gone_rows, state = columns
    table = Rows(
        spread(first, rows), np.repeat(lease, rows), np.repeat(due, rows),
        np.repeat(attempt, rows), np.repeat(state, rows),
    )  # fmt: skip
    return CursorDelta(
        GroupRef(tenant, topic, group), QueueRef(tenant, topic, queue_id, queue),
        generation, head, next_lease, skipped, seek_hash, seek_from, seek_to, bool(flags & RESET),
        table, spread(gone_first, gone_rows),
    )  # fmt: skip


def _decode_open(view: memoryview, _flags: int) -> QueueOpen:
    tenant, topic, queue_id, queue, first_offset = _OPEN.unpack_from(view, _HEADER.size)
    return QueueOpen(QueueRef(tenant, topic, queue_id, queue), first_offset)


def _decode_trim(view: memoryview, _flags: int) -> QueueTrim:
    return QueueTrim(*_TRIM.unpack_from(view, _HEADER.size))


def _decode_queue_drop(view: memoryview, _flags: int) -> QueueDrop:
    return QueueDrop(*_QUEUE.unpack_from(view, _HEADER.size))


def _decode_group_drop(view: memoryview, _flags: int) -> GroupDrop:
    return GroupDrop(GroupRef(*_GROUP.unpack_from(view, _HEADER.size)))


def _decode_producer_close(view: memoryview, _flags: int) -> ProducerClose:
    queue_id, length = _PRODUCER.unpack_from(view, _HEADER.size)
    at = _HEADER.size + _PRODUCER.size
    if at + length > len(view):
        raise ValueError("producer id cut short")
    return ProducerClose(queue_id, bytes(view[at : at + length]).decode())


_DECODERS: dict[int, Callable[[memoryview, int], Operation]] = {
    CURSOR: _decode_cursor,
    QUEUE_OPEN: _decode_open,
    QUEUE_TRIM: _decode_trim,
    QUEUE_DROP: _decode_queue_drop,
    GROUP_DROP: _decode_group_drop,
    PRODUCER_CLOSE: _decode_producer_close,
}
