"""The tier object's bytes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.objects import Encoded, encode

from millpond.core.limits import MIB, ROW_GROUP_BYTES, ROW_GROUPS_PER_OBJECT, SEAL_QUEUES
from millpond.core.schema import PROPERTIES_TYPE, TIER_SCHEMA, TIMESTAMP
from millpond.core.tier.layout import Footer, decode_group, object_name, parse_footer
from millpond.core.tier.rows import row_bytes

GOLDEN = Path(__file__).parents[3] / "golden" / "tier_object_v1.parquet"
Large = tuple[Encoded, dict[int, pa.Table]]


def golden_rows() -> list[tuple[int, pa.Table]]:
    """What the golden object holds: every column, null and not, in two queues."""
    values = [
        [0, 41, 1_700_000_000_000, 1_699_999_999_000, b"k1", "red", [("a", "1"), ("b", "")], b"body 1", None],
        [0, 42, 1_700_000_000_000, None, None, None, None, b"", None],
        [3, 0, 1_700_000_000_007, 1_700_000_000_001, b"\x00\xff", "", [], "b\u00f6dy".encode(), '{"topic":"t"}'],
    ]
    columns = [
        pa.array([row[i] for row in values], pa.int64()).cast(field.type)
        if pa.types.is_timestamp(field.type)
        else pa.array([row[i] for row in values], field.type)
        for i, field in enumerate(TIER_SCHEMA)
    ]
    table = pa.Table.from_arrays(columns, schema=TIER_SCHEMA)
    return [(0, table.slice(0, 2)), (3, table.slice(2, 1))]


def read_back(encoded: Encoded) -> tuple[Footer, list[pa.Table]]:
    footer, parquet = parse_footer(bytes(encoded.data[-encoded.footer_bytes :]))
    data = bytes(encoded.data)
    return footer, [
        decode_group(parquet, footer, index, data[group.at : group.at + group.bytes])
        for index, group in enumerate(footer.groups)
    ]


def test_golden_object_is_still_read() -> None:
    """The object written by version 1 of the format opens and holds exactly its rows. Never rewrite the file."""
    data = GOLDEN.read_bytes()
    footer_bytes = int.from_bytes(data[-8:-4], "little") + 8 + 8
    encoded = Encoded(data, footer_bytes, [])
    footer, tables = read_back(encoded)
    assert (footer.version, footer.topic_id, footer.epoch) == (1, 7, 2)
    assert [(r.queue, r.first, r.end, r.min_born_ts) for r in footer.ranges] == [
        (0, 41, 43, 1_699_999_999_000),
        (3, 0, 1, 1_700_000_000_001),
    ]
    assert tables == [table for _, table in golden_rows()]


def test_golden_object_is_still_written_the_same() -> None:
    """What is written today has the golden object's rows, schema and layout, and any Parquet reader opens it."""
    encoded = encode(golden_rows(), topic_id=7, epoch=2)
    now, then = pq.ParquetFile(io.BytesIO(encoded.data)), pq.ParquetFile(GOLDEN)
    assert now.read() == then.read()
    assert now.schema.equals(then.schema)
    for index in range(then.metadata.num_row_groups):
        for column in range(then.metadata.num_columns):
            new, old = (file.metadata.row_group(index).column(column) for file in (now, then))
            assert (new.compression, new.encodings, new.statistics) == (old.compression, old.encodings, old.statistics)


def test_every_reader_sees_the_schema(large: Large) -> None:
    """Columns, types and field ids are those of TIER_SCHEMA without any help of Arrow metadata in the file."""
    file = pq.ParquetFile(io.BytesIO(large[0].data))
    assert file.schema_arrow.equals(TIER_SCHEMA)
    ids = [field.metadata[b"PARQUET:field_id"] for field in file.schema_arrow]
    assert ids == [str(i + 1).encode() for i in range(len(TIER_SCHEMA))]
    assert file.metadata.metadata.keys() == {b"millpond"}


def test_row_groups(large: Large) -> None:
    """A row group never spans queues, closes at 4 MiB raw, and only queue, key and tag have dictionaries."""
    encoded, tables = large
    footer, groups = read_back(encoded)
    assert pa.concat_tables(groups) == pa.concat_tables(tables.values())
    assert [group.queue for group in footer.groups] == [0, 0, 0, 0, 2, 2, 5]
    assert all(row_bytes(group).sum() <= ROW_GROUP_BYTES for group in groups)
    metadata = pq.read_metadata(io.BytesIO(encoded.data))
    for column in range(metadata.num_columns):
        chunk = metadata.row_group(0).column(column)
        name = chunk.path_in_schema
        assert chunk.compression == "ZSTD"
        assert chunk.has_dictionary_page == (name in {"queue", "key", "tag"}), name
        assert chunk.is_stats_set == (name in {"queue", "offset", "store_ts", "born_ts", "key"}), name


def test_ranges_and_checksum(large: Large) -> None:
    """What the manifest keeps of an object is what it holds."""
    encoded, tables = large
    assert encoded.sha256 == hashlib.sha256(encoded.data).hexdigest()
    for each in encoded.ranges:
        table = tables[each.queue]
        store, born = (table.column(name).cast(pa.int64()).drop_null().to_pylist() for name in ("store_ts", "born_ts"))
        assert (each.min_store_ts, each.max_store_ts) == (min(store), max(store))
        assert (each.min_born_ts, each.max_born_ts) == (min(born), max(born))
        assert table.column("offset").to_pylist() == list(range(each.first, each.end))


def test_at_most_64_row_groups(make_rows: Callable[..., pa.Table]) -> None:
    """The worst run, of as many queues as there may be and 80 MiB, still has at most 64 row groups."""
    queues = [(q, make_rows(q, 0, 1, 2 * MIB + 300_000)) for q in range(SEAL_QUEUES)]
    queues[0] = (0, pa.concat_tables([make_rows(0, i, 1, 3 * MIB) for i in range(5)]))
    footer, _ = parse_footer(bytes((encoded := encode(queues, 1, 1)).data[-encoded.footer_bytes :]))
    assert len(footer.groups) <= ROW_GROUPS_PER_OBJECT


def test_pieces_make_no_difference(large: Large) -> None:
    """However rows come in, the object has the same row groups and ranges."""
    whole, tables = large
    footer, groups = read_back(whole)
    for rows in (700, 4_001):
        pieces = encode(list(tables.items()), topic_id=7, epoch=3, rows=rows)
        assert pieces.ranges == whole.ranges
        found, read = read_back(pieces)
        assert [(g.queue, g.first, g.rows) for g in found.groups] == [(g.queue, g.first, g.rows) for g in footer.groups]
        assert read == groups


def test_object_names_sort_by_sequence() -> None:
    """Names of one day sort by what was tiered before; the date is that of store_ts in UTC."""
    names = [object_name("t", "orders~2", 1_700_092_799_999, s, 3, b"\xab\xcd") for s in (9, 10, 1_000)]
    assert names[0] == "v1/tenant=t/topic=orders~2/date=2023-11-15/00000000000000000009-000003-abcd.parquet"
    assert sorted(names) == names
    assert "date=2023-11-16" in object_name("t", "o", 1_700_092_800_000, 0, 1, b"")


def test_a_flipped_bit_anywhere_is_found() -> None:
    """Every bit of every byte that a read of the object uses is covered: one flip is an error, never other rows."""
    encoded = encode(golden_rows(), topic_id=7, epoch=2)
    footer, _ = parse_footer(bytes(encoded.data[-encoded.footer_bytes :]))
    used = range(footer.groups[0].at, len(encoded.data))
    assert footer.groups[0].at == 4, "before it there is only the magic"
    for at in used:
        damaged = bytearray(encoded.data)
        damaged[at] ^= 1 << (at % 8)
        if at < len(damaged) - encoded.footer_bytes and not any(g.at <= at < g.at + g.bytes for g in footer.groups):
            continue
        with pytest.raises(ValueError, match=r"."):
            read_back(Encoded(bytes(damaged), encoded.footer_bytes, []))


TEXT = st.text(max_size=8)
MAPS = st.none() | st.lists(st.tuples(TEXT, TEXT), max_size=3)
BORN = st.none() | st.integers(0, 253_402_300_799_999)
ROW = st.tuples(
    BORN, st.none() | st.binary(max_size=20), st.none() | TEXT, MAPS, st.binary(max_size=50), st.none() | TEXT
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=30), st.integers(0, 2**62), st.integers(0, 1023))
def test_round_trip(messages: list[tuple[object, ...]], first: int, queue: int) -> None:
    """Whatever rows are written are read back equal, by us and by a plain Parquet reader."""
    born, key, tag, properties, body, origin = (list(column) for column in zip(*messages, strict=True))
    n = len(messages)
    columns = [
        pa.array([queue] * n, pa.int32()), pa.array(range(first, first + n), pa.int64()),
        pa.array([5] * n, pa.int64()).cast(TIMESTAMP), pa.array(born, pa.int64()).cast(TIMESTAMP),
        pa.array(key, pa.binary()), pa.array(tag, pa.string()), pa.array(properties, PROPERTIES_TYPE),
        pa.array(body, pa.binary()), pa.array(origin, pa.string()),
    ]  # fmt: skip
    table = pa.Table.from_arrays(columns, schema=TIER_SCHEMA)
    encoded = encode([(queue, table)], 1, 1)
    assert pa.concat_tables(read_back(encoded)[1]) == table
    assert pq.read_table(io.BytesIO(encoded.data)) == table
