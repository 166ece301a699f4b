"""Rows into the bytes of a tier object (`layout`), one row group after the other: `Grouping`, `ObjectEncoder`.

Rows come in as they are read and the bytes go out as they are made, so an object of any size takes the memory of one
row group and its pages, which is used again for the next: little enough to stay in a processor's cache, and none of it
fresh. Fresh memory, and an encoder that sweeps the caches, are what others on the machine would notice of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpond.core.limits import ROW_GROUP_BYTES, ROW_GROUPS_PER_OBJECT, SEAL_BYTES, TIER_FOOTER_BYTES
from millpond.core.ranges import split
from millpond.core.schema import TIER_SCHEMA, TIER_VERSION
from millpond.core.tier.layout import (
    FOOTER_KEY,
    FOOTER_MAGIC,
    GUARD_BYTES,
    PARQUET,
    Footer,
    QueueRange,
    RowGroup,
)
from millpond.core.tier.rows import row_bytes

Write = Callable[[memoryview], None]
Checksum = Callable[[list[bytes]], Callable[[], int]]
"""Begins the CRC32C of the pieces, one behind the other; what it gives waits for it."""


class Encoded(NamedTuple):
    """What the manifest keeps of an object. `footer_bytes`: how much of its end is the footer."""

    bytes: int
    footer_bytes: int
    ranges: list[QueueRange]


class Group(NamedTuple):
    """Rows of one row group, and what its description says of them."""

    rows: pa.Table
    span: QueueRange


class Grouping:
    """Parts rows into row groups, as they come. Blocks a little: call it in a thread."""

    def __init__(self, most_bytes: int = SEAL_BYTES) -> None:
        """`most_bytes` raw are planned for the object; a few frames more are fine."""
        # The number of row groups is bounded, and each queue may end with a short one: the others grow where a run is
        # of more than the usual size.
        self._group_bytes = max(ROW_GROUP_BYTES, 2 * most_bytes // (ROW_GROUPS_PER_OBJECT // 2))
        self._queue = -1
        self._rows: list[pa.Table] = []
        self._sizes: list[npt.NDArray[np.int64]] = []
        self.raw_bytes = 0

    def add(self, queue: int, rows: pa.Table) -> list[Group]:
        """Consecutive rows of `queue` (TIER_SCHEMA), behind those before; queues ascend. The groups that are whole."""
        assert queue >= self._queue, "queues ascend"
        groups = self.finish() if queue != self._queue else []
        self._queue = queue
        sizes = row_bytes(rows)
        self.raw_bytes += int(sizes.sum())
        self._rows.append(rows)
        self._sizes.append(sizes)
        *whole, last = split(np.concatenate(self._sizes), self._group_bytes)  # the last one may still grow
        if whole:
            rows = pa.concat_tables(self._rows)
            groups += [_group(rows.slice(start, end - start)) for start, end in whole]
            self._rows = [rows.slice(last[0])]
            self._sizes = [np.concatenate(self._sizes)[last[0] :]]
        return groups

    def finish(self) -> list[Group]:
        """What is left."""
        rows, self._rows, self._sizes = self._rows, [], []
        return [_group(pa.concat_tables(rows))] if rows else []


def crc_of(pieces: list[bytes]) -> int:
    """CRC32C of the pieces, one behind the other."""
    return reduce(google_crc32c.extend, pieces, 0)


def _at_once(pieces: list[bytes]) -> Callable[[], int]:
    crc = crc_of(pieces)
    return lambda: crc


class ObjectEncoder:
    """One object. Everything here blocks, nearly all of it outside the interpreter: call it in a thread."""

    def __init__(self, write: Write, topic_id: int, epoch: int, checksum: Checksum = _at_once) -> None:
        """`write` takes the object's bytes in their order; they do not change afterwards. `checksum` is asked for
        that of each row group."""
        self._sink = _Sink(write)
        # Gathered where no other thread of the interpreter is waited for: a row group is some 36 writes.
        self._file = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), ROW_GROUP_BYTES)
        self._writer = pq.ParquetWriter(self._file, TIER_SCHEMA, **PARQUET)
        self._file.flush()  # what a file begins with is of no row group
        self._topic_id = topic_id
        self._epoch = epoch
        self._checksum = checksum
        self._groups: list[Callable[[], RowGroup]] = []
        self._ranges: list[QueueRange] = []

    def write(self, group: Group) -> None:
        rows, span = group
        at = self._sink.position
        self._sink.written = []
        self._writer.write_table(rows, row_group_size=rows.num_rows)
        self._file.flush()
        size, crc = self._sink.position - at, self._checksum(self._sink.written)
        self._groups.append(partial(_described, span, rows.num_rows, at, size, crc))
        if self._ranges and self._ranges[-1].queue == span.queue:
            span = _joined(self._ranges.pop(), span)
        self._ranges.append(span)

    def finish(self) -> Encoded:
        """The object is whole: everything was written."""
        assert len(self._groups) <= ROW_GROUPS_PER_OBJECT, "at most 32 queues, and groups of twice their share"
        groups = [described() for described in self._groups]
        footer = Footer(TIER_VERSION, self._topic_id, self._epoch, self._ranges, groups)
        self._writer.add_key_value_metadata({FOOTER_KEY: msgspec.json.encode(footer)})
        tail = self._sink.hold(GUARD_BYTES)
        self._writer.close()
        self._file.flush()
        self._sink.release(FOOTER_MAGIC + google_crc32c.value(bytes(tail)).to_bytes(4, "little"))
        footer_bytes = GUARD_BYTES + len(tail)
        assert footer_bytes <= TIER_FOOTER_BYTES, "64 row groups describe themselves in far less"
        return Encoded(self._sink.position, footer_bytes, self._ranges)


def _described(span: QueueRange, rows: int, at: int, size: int, crc: Callable[[], int]) -> RowGroup:
    return RowGroup(span.queue, span.first, rows, at, size, crc(), span.max_store_ts, span.max_born_ts)


def _group(rows: pa.Table) -> Group:
    return Group(rows, _range_of(rows))


class _Sink:
    """A file for the Parquet writer. `written`: the pieces of the row group that is being written."""

    closed = False

    def __init__(self, write: Write) -> None:
        self._write = write
        self._held: bytearray | None = None
        self.position = 0
        self.written: list[bytes] = []

    def write(self, data: bytes) -> int:
        if self._held is not None:
            self._held += data
        else:
            self.written.append(data)
            self._write(memoryview(data))
        self.position += len(data)
        return len(data)

    def hold(self, before: int) -> bytearray:
        """What follows is kept; `before` bytes will come before it."""
        self.position += before
        self._held = bytearray()
        return self._held

    def release(self, before: bytes) -> None:
        assert self._held is not None
        self._write(memoryview(before))
        self._write(memoryview(self._held))

    def tell(self) -> int:
        return self.position

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _range_of(rows: pa.Table) -> QueueRange:
    queue, first = rows.column("queue")[0].as_py(), rows.column("offset")[0].as_py()
    store = pc.min_max(rows.column("store_ts").cast(pa.int64()))
    born = pc.min_max(rows.column("born_ts").cast(pa.int64()))
    clocks = (store["min"].as_py(), store["max"].as_py(), born["min"].as_py(), born["max"].as_py())
    return QueueRange(queue, first, first + rows.num_rows, *clocks)


def _joined(one: QueueRange, behind: QueueRange) -> QueueRange:
    """The range of both."""
    assert one.end == behind.first, "consecutive rows"
    born = [
        each for each in (one.min_born_ts, behind.min_born_ts, one.max_born_ts, behind.max_born_ts) if each is not None
    ]
    return QueueRange(
        one.queue, one.first, behind.end,
        min(one.min_store_ts, behind.min_store_ts), max(one.max_store_ts, behind.max_store_ts),
        min(born, default=None), max(born, default=None),
    )  # fmt: skip
