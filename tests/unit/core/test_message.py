"""Limits of a message: a violation belongs to its row, and both forms of the check agree."""

from __future__ import annotations

import re
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millpond.core import limits
from millpond.core.errors import BadRequest, MillpondError, TooLarge
from millpond.core.message import _TAG_REFUSED, _TAG_REFUSED_RE2, check_columns, check_single
from millpond.core.schema import BORN_TS, KEY, ORIGIN, PROPERTIES, PROPERTIES_TYPE, TAG, TIMESTAMP, message_schema

GOOD = {"key": b"k", "tag": "t", "properties": [("a", "b")], "born_ts": 1_000, "origin": "{}", "body": b"x"}
BAD = [
    ("body", b"x" * 101),
    ("key", b"k" * (limits.KEY_BYTES + 1)),
    ("tag", ""),
    ("tag", "t" * (limits.TAG_BYTES + 1)),
    ("tag", "a b"),
    ("tag", "a|b"),
    ("tag", "*"),
    ("tag", "a\x00"),
    ("properties", [("a", "b" * limits.PROPERTIES_BYTES)]),
    ("properties", [("", "b")]),
    ("born_ts", -1),
    ("born_ts", limits.TIMESTAMP_MS_MOST + 1),
]
BAD_IN_COLUMNS = [
    ("properties", [("a", "b"), ("a", "c")]),
    ("properties", [("a", None)]),
    ("origin", "[]"),
    ("origin", "nonsense"),
    ("origin", '{"a":"' + "b" * limits.ORIGIN_BYTES + '"}'),
]


def batch_of(rows: list[dict]) -> pa.RecordBatch:
    schema = message_schema(KEY | TAG | PROPERTIES | BORN_TS | ORIGIN)
    types = {"properties": PROPERTIES_TYPE, "born_ts": pa.int64()}
    arrays = [pa.array([row[name] for row in rows], types.get(name, schema.field(name).type)) for name in schema.names]
    arrays[3] = arrays[3].cast(TIMESTAMP)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@pytest.mark.parametrize(("field", "value"), BAD + BAD_IN_COLUMNS)
def test_a_bad_row_is_named_and_no_other(field: str, value: object) -> None:
    """Of a batch with one bad value exactly that row has an error, which names the field; slices change nothing."""
    rows = [GOOD, GOOD, {**GOOD, field: value}, dict.fromkeys(GOOD, None) | {"body": b""}]
    errors = check_columns(batch_of([GOOD, *rows]).slice(1), 100)
    assert list(errors) == [2]
    assert errors[2].detail.startswith(field)


def test_good_rows_pass() -> None:
    """Values at their limits, and nulls, are no errors."""
    most = {
        "key": b"k" * limits.KEY_BYTES,
        "tag": "t" * limits.TAG_BYTES,
        "properties": [("a", "b" * (limits.PROPERTIES_BYTES - 1))],
        "born_ts": limits.TIMESTAMP_MS_MOST,
        "origin": "{}",
        "body": b"x" * 100,
    }
    assert check_columns(batch_of([most, GOOD, dict.fromkeys(GOOD, None) | {"body": b""}]), 100) == {}


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_single_message_has_the_same_limits(field: str, value: object) -> None:
    """What a column check refuses, the check of one message refuses too."""
    row = {**GOOD, field: value}
    with pytest.raises(MillpondError, match=field) as caught:
        check_single(len(row["body"]), 100, row["key"], row["tag"], dict(row["properties"]), row["born_ts"], None)
    assert isinstance(caught.value, TooLarge if field == "body" else BadRequest)


def test_what_a_single_message_has_in_all() -> None:
    """Bytes of its parts, not characters."""
    assert check_single(3, 100, "ké", "té", {"a": "é", "bc": ""}, 5, "id") == 3 + 3 + 3 + 3 + 2


@pytest.mark.parametrize("dedup_id", ["", "d" * (limits.DEDUP_ID_BYTES + 1)])
def test_dedup_id_lengths(dedup_id: str) -> None:
    """A dedup id is 1 to 256 bytes, in a batch and alone."""
    with pytest.raises(BadRequest, match="dedup_id"):
        check_single(0, 1, None, None, None, None, dedup_id)
    beside = pa.RecordBatch.from_arrays([pa.array(["fine", dedup_id, None])], ["dedup_id"])
    assert list(check_columns(beside, 0)) == [1]


def test_both_tag_patterns_refuse_the_same_characters() -> None:
    """Python's pattern and RE2's agree on all of Unicode."""
    points = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    by_columns = pc.match_substring_regex(pa.array(points), _TAG_REFUSED_RE2).to_pylist()
    assert by_columns == [re.search(_TAG_REFUSED, point) is not None for point in points]
