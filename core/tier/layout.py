"""The tier object: its name, its bytes, its footer. Truth: checksummed, and the only copy of recycled messages.

    {prefix}/v1/tenant={t}/topic={name}/date={UTC date of store_ts}/{sequence}-{epoch}-{random}.parquet

    "PAR1"
    row groups     sorted by (queue, offset); none spans two queues; each about 4 MiB raw or one larger message
    "MPF" version  4 bytes   \\ the last `footer_bytes` of the object:
    CRC32C         4 bytes   | of everything after it. Parquet readers do not look here, ours checks it
    Parquet footer thrift    |
    its length     4 bytes   |
    "PAR1"                   /

Any Parquet reader reads it: `TIER_SCHEMA` with field ids, zstd, statistics on queue, offset, both clocks and key.
The footer's key-value metadata holds `millpond`, the JSON of `Footer`: whose rows these are and where each row
group stands with its CRC32C. So a reader that has the footer fetches a row group with one GET and knows that
every byte of it is what was written. Nothing in it depends on the version of the writing library.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.core.limits import KIB, TIER_FOOTER_BYTES
from millpond.core.schema import TIER_SCHEMA, TIER_VERSION

FOOTER_KEY = b"millpond"
FOOTER_MAGIC = b"MPF" + bytes([TIER_VERSION])
GUARD_BYTES = len(FOOTER_MAGIC) + 4
_PARQUET_MAGIC = b"PAR1"
_TAIL_BYTES = 4 + len(_PARQUET_MAGIC)
PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "data_page_size": 512 * KIB,
    "use_dictionary": ["queue", "key", "tag"],
    "write_statistics": ["queue", "offset", "store_ts", "born_ts", "key"],
    "sorting_columns": [pq.SortingColumn(0), pq.SortingColumn(1)],
    "store_schema": False,
}
"""How pyarrow's writer is set. A dictionary only where values repeat; statistics where readers prune by them; pages
that a core's own cache holds while they are made."""


class QueueRange(msgspec.Struct, frozen=True):
    """What an object holds of one queue: offsets [first, end); both clocks in ms, born None when no row has one."""

    queue: int
    first: int
    end: int
    min_store_ts: int
    max_store_ts: int
    min_born_ts: int | None
    max_born_ts: int | None


class RowGroup(msgspec.Struct, frozen=True):
    """Row group: offsets [first, first + rows) of `queue`, in bytes [at, at + bytes) of the object.

    Its greatest timestamps in ms; born None when no row has one.
    """

    queue: int
    first: int
    rows: int
    at: int
    bytes: int
    crc32c: int
    max_store_ts: int
    max_born_ts: int | None

    @property
    def end(self) -> int:
        return self.first + self.rows


class Footer(msgspec.Struct, frozen=True):
    """The key-value metadata `millpond`. `epoch`: of the store group that sealed it."""

    version: int
    topic_id: int
    epoch: int
    ranges: list[QueueRange]
    groups: list[RowGroup]


def utc_date(store_ts: int) -> str:
    """The UTC date of a timestamp in ms, as it stands in object names."""
    return datetime.fromtimestamp(store_ts / 1000, UTC).strftime("%Y-%m-%d")


def object_name(tenant: str, tier_name: str, store_ts: int, sequence: int, epoch: int, random: bytes) -> str:
    """The key of an object whose rows all stand on the UTC date of `store_ts`. Names sort by `sequence`."""
    folder = f"v1/tenant={tenant}/topic={tier_name}/date={utc_date(store_ts)}"
    return f"{folder}/{sequence:020d}-{epoch:06d}-{random.hex()}.parquet"


def parse_footer(tail: bytes) -> tuple[Footer, Any]:
    """The footer in the last `footer_bytes` of an object, and its Parquet metadata.

    Raises ValueError, with the reason, when a single bit of it is not as written.
    """
    if not GUARD_BYTES + _TAIL_BYTES < len(tail) <= TIER_FOOTER_BYTES or tail[:4] != FOOTER_MAGIC:
        raise ValueError("the footer is not where it should be")
    guarded = tail[GUARD_BYTES:]
    if google_crc32c.value(guarded) != int.from_bytes(tail[4:GUARD_BYTES], "little"):
        raise ValueError("the footer's checksum does not hold")
    metadata = pq.read_metadata(pa.BufferReader(_PARQUET_MAGIC + guarded))
    footer = msgspec.json.decode(metadata.metadata[FOOTER_KEY], type=Footer)
    if footer.version != TIER_VERSION:
        raise ValueError(f"format version {footer.version} is not known")
    return footer, metadata


def decode_group(metadata: Any, footer: Footer, index: int, data: bytes | pa.Buffer) -> pa.Table:
    """Row group `index` from its bytes `data`, as a TIER_SCHEMA table. Raises ValueError when they are damaged."""
    group = footer.groups[index]
    if len(data) != group.bytes or google_crc32c.value(data) != group.crc32c:
        raise ValueError("the row group's checksum does not hold")
    source = pa.PythonFile(_Window(group.at, data), mode="r")
    try:
        file = pq.ParquetFile(source, metadata=metadata, pre_buffer=False)
        table = file.read_row_group(index, use_threads=False)
        table = pa.Table.from_arrays([table.column(name) for name in TIER_SCHEMA.names], schema=TIER_SCHEMA)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(f"the row group does not open: {error}") from error
    offsets = table.column("offset").to_numpy()
    if not np.array_equal(offsets, np.arange(group.first, group.end)):
        raise ValueError("the row group's offsets are not dense")
    return table


class _Window:
    """A file to read from of which only bytes [at, at + len(data)) are here; a read elsewhere is an error."""

    closed = False

    def __init__(self, at: int, data: bytes | pa.Buffer) -> None:
        self._at = at
        self._data = memoryview(data)
        self._position = 0

    def seek(self, position: int, whence: int = 0) -> int:
        if whence == 0:
            self._position = position
        elif whence == 1:
            self._position += position
        else:
            self._position = self._at + len(self._data) + position
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, count: int = -1) -> memoryview:
        start = self._position - self._at
        if start < 0 or count < 0 or start + count > len(self._data):
            raise OSError(f"bytes {self._position} to {self._position + count} are not of this row group")
        self._position += count
        return self._data[start : start + count]

    def close(self) -> None: ...
