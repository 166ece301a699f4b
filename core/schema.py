"""The Arrow schemas of Millpond: one message batch in the log, one row of the tier.

A messages frame holds one record batch of `message_schema(columns)`; the schema is not repeated in the
frame, its column bitmap names it:

    bit   0  key         binary
    bit   1  tag         utf8
    bit   2  properties  map<utf8, utf8>
    bit   3  born_ts     timestamp(ms, UTC)
    bit   4  origin      utf8        (JSON of topic, queue, offset, replay: where a replayed message came from)
    (body    binary, always present, always last)
    bit  16  deliver_at  i64         in the sidecar only
    bit  17  dedup       16 B + u32  in the sidecar only
    bit  18  parts       table       in the sidecar only

Evolution only appends bits and fields; a reader that sees a bit it does not know refuses the frame.
"""

from __future__ import annotations

from functools import cache

import pyarrow as pa

KEY, TAG, PROPERTIES, BORN_TS, ORIGIN = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 4
DELIVER_AT, DEDUP, PARTS = 1 << 16, 1 << 17, 1 << 18

PAYLOAD_COLUMNS = KEY | TAG | PROPERTIES | BORN_TS | ORIGIN
SIDECAR_COLUMNS = DELIVER_AT | DEDUP | PARTS
KNOWN_COLUMNS = PAYLOAD_COLUMNS | SIDECAR_COLUMNS

TIMESTAMP = pa.timestamp("ms", "UTC")
PROPERTIES_TYPE = pa.map_(pa.string(), pa.string())

_PAYLOAD_FIELDS = (
    (KEY, pa.field("key", pa.binary())),
    (TAG, pa.field("tag", pa.string())),
    (PROPERTIES, pa.field("properties", PROPERTIES_TYPE)),
    (BORN_TS, pa.field("born_ts", TIMESTAMP)),
    (ORIGIN, pa.field("origin", pa.string())),
)
_BODY = pa.field("body", pa.binary(), nullable=False)


@cache
def message_schema(columns: int) -> pa.Schema:
    """The schema of a messages frame's payload for the payload bits of `columns`."""
    return pa.schema([field for bit, field in _PAYLOAD_FIELDS if columns & bit] + [_BODY])


def columns_of(names: set[str]) -> int:
    """The payload bits of a batch that has these column names (`body` apart)."""
    return sum(bit for bit, field in _PAYLOAD_FIELDS if field.name in names)


def _tier_field(number: int, name: str, type_: pa.DataType, nullable: bool = True) -> pa.Field:
    return pa.field(name, type_, nullable, metadata={"PARQUET:field_id": str(number)})


TIER_VERSION = 1
TIER_SCHEMA = pa.schema(
    [
        _tier_field(1, "queue", pa.int32(), nullable=False),
        _tier_field(2, "offset", pa.int64(), nullable=False),
        _tier_field(3, "store_ts", TIMESTAMP, nullable=False),
        _tier_field(4, "born_ts", TIMESTAMP),
        _tier_field(5, "key", pa.binary()),
        _tier_field(6, "tag", pa.string()),
        _tier_field(7, "properties", PROPERTIES_TYPE),
        _tier_field(8, "body", pa.binary(), nullable=False),
        _tier_field(9, "origin", pa.string()),
    ]
)
"""One row of the tier, and one row of every Arrow answer of the HTTP API: fixed order, fixed types."""
