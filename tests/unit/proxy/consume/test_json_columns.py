"""JSON by columns says byte for byte what JSON message by message says, or leaves the rows to that."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.schema import PROPERTIES_TYPE, TIER_SCHEMA, TIMESTAMP
from millpond.proxy.codec import answers, json_columns
from millpond.proxy.codec.answers import Rows

PLAIN = st.text(st.characters(min_codepoint=0x20, exclude_characters='"\\', exclude_categories=["Cs"]), max_size=20)
ANY = st.binary(max_size=20) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(str.encode)
MAYBE_TIME = st.none() | st.integers(0, 253_402_300_799_999)


def rows_of(messages: list[tuple[Any, Any, Any, Any]], leased: bool, properties: Any = None) -> Rows:
    """Rows of (body, key, tag, born_ts), cut out of the middle of a batch."""
    around = [(b"before", None, None, None), *messages, (b"behind", b"k", "t", 5)]
    count = len(around)
    body, key, tag, born_ts = (list(column) for column in zip(*around, strict=True))
    arrays = [
        pa.array(np.full(count, 3, np.int32)), pa.array(np.arange(70, 70 + count)),
        pa.array(np.arange(1000, 1000 + count)).cast(TIMESTAMP), pa.array(born_ts, pa.int64()).cast(TIMESTAMP),
        pa.array(key, pa.binary()), pa.array(tag, pa.string()),
        pa.array([properties] * count, PROPERTIES_TYPE), pa.array(body, pa.binary()), pa.nulls(count, pa.string()),
    ]  # fmt: skip
    batch = pa.RecordBatch.from_arrays(arrays, schema=TIER_SCHEMA).slice(1, len(messages))
    if not leased:
        return Rows(batch, "a-11-")
    return Rows(batch, "a-11-", np.arange(1, 1 + len(messages), dtype=np.uint32), "tok_en-", 60)


def by_columns(rows: Rows) -> bytes | None:
    found = json_columns.joined("t.1", rows.batch, rows.id_prefix, rows.attempts, rows.token, rows.base)
    return None if found is None else found.to_pybytes()


def by_message(rows: Rows) -> bytes:
    return answers._json.encode(answers.messages("t.1", rows))


@given(st.lists(st.tuples(PLAIN.map(str.encode), st.none() | PLAIN.map(str.encode), st.none() | PLAIN, MAYBE_TIME),
                min_size=1, max_size=8), st.booleans())  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_plain_texts_are_said_the_same(messages: list[Any], leased: bool) -> None:
    """Texts without quotes, backslashes and control characters, nulls among them, from a batch's middle."""
    rows = rows_of(messages, leased)
    assert by_columns(rows) == by_message(rows)[1:-1] + b","


@pytest.mark.parametrize("count", [5, 60, 200])
def test_numbers_that_gain_a_digit_are_said_the_same(count: int) -> None:
    """Offsets from 71 and rows from 11 on: none gains one, the offsets do, both do."""
    rows = rows_of([(b"a", None, None, None)] * count, leased=True)
    assert by_columns(rows) == by_message(rows)[1:-1] + b","


def test_rows_left_out_have_the_numbers_of_their_offsets() -> None:
    """Rows of a filtered grant: the number in a lease id is not the place in the answer."""
    rows = rows_of([(b"a", None, None, None)] * 30, leased=True)
    odd = np.arange(1, 30, 2)
    some = Rows(rows.batch.take(pa.array(odd)), rows.id_prefix, odd.astype(np.uint32), rows.token, rows.base)
    assert by_columns(some) == by_message(some)[1:-1] + b","


@given(st.lists(st.tuples(ANY, st.none() | ANY, st.none() | PLAIN, MAYBE_TIME), min_size=1, max_size=4))
@settings(deadline=None, max_examples=300)
def test_whatever_is_in_them_it_is_the_same_or_left(messages: list[Any]) -> None:
    """Bytes of any kind: either the same JSON, or none."""
    rows = rows_of(messages, leased=False)
    found = by_columns(rows)
    assert found is None or found == by_message(rows)[1:-1] + b","


@pytest.mark.parametrize("text", [b'"', b"\\", b"\n", b"\x00", b"\x1f", b"\xff"])
@pytest.mark.parametrize("where", ["body", "key"])
def test_what_must_be_escaped_is_left(text: bytes, where: str) -> None:
    """One such byte in one body or key of many."""
    bad = (b"a" + text, b"k", "t", None) if where == "body" else (b"a", b"k" + text, "t", None)
    assert by_columns(rows_of([(b"a", b"k", "t", None), bad], leased=False)) is None


def test_del_and_what_is_not_ascii_are_not_escaped() -> None:
    """JSON escapes control characters below 0x20, quotes and backslashes, nothing else."""
    rows = rows_of([("grün \x7f \U0001f600".encode(), b"k", "t", None)], leased=True)
    found = by_columns(rows)
    assert found == by_message(rows)[1:-1] + b","
    assert json.loads(found[:-1])["body"] == "grün \x7f \U0001f600"


def test_properties_are_left() -> None:
    """Maps are not texts."""
    assert by_columns(rows_of([(b"a", None, None, None)], leased=False, properties=[("p", "q")])) is None


@pytest.mark.parametrize("size", [0, 1, 3_000, 200_000], ids=str)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer])
def test_a_byte_is_found_wherever_it_stands(size: int, kind: Any) -> None:
    """At either end and in the middle, of little that is copied and of much that is not; a NUL behind it is none."""
    text = b"x" * size + b"\x00"
    assert not json_columns.holds(kind(text), b"\\")
    for at in (0, size // 2, size):
        found = text[:at] + b"\\" + text[at:]
        assert json_columns.holds(kind(found), b"\\")
