"""From frames to rows, and the sizes of rows."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pytest

from millpond.core.errors import Internal
from millpond.core.schema import KEY, TAG, TIER_SCHEMA, message_schema
from millpond.core.tier.rows import row_bytes, rows_of


class Frame(NamedTuple):
    first_offset: int
    count: int
    columns: int
    store_ts: int
    payload: pa.Buffer


def frame(first: int, bodies: list[bytes], columns: int = 0, ts: int = 5) -> Frame:
    arrays = {"key": pa.array([b"k"] * len(bodies)), "tag": pa.array(["t"] * len(bodies)), "body": pa.array(bodies)}
    schema = message_schema(columns)
    batch = pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)
    return Frame(first, len(bodies), columns, ts, batch.serialize())


def test_rows_of_mixed_frames() -> None:
    """Frames with different columns become one table; what a frame does not have is null."""
    table = rows_of(
        3, [frame(7, [b"a", b"b"], KEY), frame(9, [b"c"], KEY, 6), frame(10, [b"d"], TAG, 8), frame(11, [b"e"])]
    )
    assert table.schema.equals(TIER_SCHEMA, check_metadata=True)
    assert table.column("offset").to_pylist() == [7, 8, 9, 10, 11]
    assert table.column("store_ts").cast(pa.int64()).to_pylist() == [5, 5, 6, 8, 5]
    assert table.column("key").to_pylist() == [b"k", b"k", b"k", None, None]
    assert table.column("tag").to_pylist() == [None, None, None, "t", None]
    assert table.column("body").to_pylist() == [b"a", b"b", b"c", b"d", b"e"]
    assert set(table.column("queue").to_pylist()) == {3}
    assert rows_of(3, []).num_rows == 0


@pytest.mark.parametrize("first", [8, 10])
def test_frames_that_do_not_follow(first: int) -> None:
    """A gap or an overlap is an error, whether or not the columns change there."""
    for columns in (KEY, TAG):
        with pytest.raises(Internal) as error:
            rows_of(0, [frame(7, [b"a", b"b"], KEY), frame(first, [b"c"], columns)])
        assert error.value.code == "corrupt_range"


def test_a_frame_with_other_rows() -> None:
    """A frame that does not hold the rows its header claims is an error."""
    with pytest.raises(Internal):
        rows_of(0, [frame(0, [b"a", b"b"])._replace(count=3)])


def test_row_bytes() -> None:
    """A row is 24 bytes, its texts and 8 for each property, in slices and in several chunks too."""
    i32 = pa.array([0] * 3, pa.int32())
    i64 = pa.array([0] * 3, pa.int64())
    maps = pa.array([[("ab", "c"), ("d", "")], None, []], TIER_SCHEMA.field("properties").type)
    ts = i64.cast(TIER_SCHEMA.field("store_ts").type)
    arrays = [i32, i64, ts, ts, pa.array([b"kk", None, b""]), pa.array(["t", "\u00f6", None]), maps,
              pa.array([b"body", b"", b"x" * 100]), pa.array([None, None, "o"])]  # fmt: skip
    table = pa.Table.from_arrays(arrays, schema=TIER_SCHEMA)
    assert row_bytes(table).tolist() == [24 + 2 + 1 + 4 + 2 * 8 + 4, 24 + 2, 24 + 101]
    assert row_bytes(pa.concat_tables([table.slice(1), table.slice(0, 1)])).tolist() == [26, 125, 51]
    assert row_bytes(table.slice(0, 0)).tolist() == []
