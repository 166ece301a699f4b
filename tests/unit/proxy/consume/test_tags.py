"""Tag expressions and row ranges: what they mean and what is refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millpond.core.errors import BadRequest
from millpond.core.hashing import hash_bytes
from millpond.core.limits import RECEIPT_RANGES, TAG_BYTES, TAG_EXPRESSION_TAGS
from millpond.proxy import message_id, row_ranges
from millpond.proxy.tags import parse


@pytest.mark.parametrize("text", [None, "*", " * "])
def test_a_star_is_every_message(text: str | None) -> None:
    """No filter at all, so nothing is compared."""
    assert parse(text) is None


def test_equal_filters_have_one_text() -> None:
    """Order, spaces and repeats do not make another filter: 409 filter_differs compares texts."""
    one, other = parse("b||a"), parse(" a || b || a ")
    assert one is not None
    assert one == other
    assert one.text == "a || b"
    assert set(one.hashes) == {hash_bytes(b"a"), hash_bytes(b"b")}


def test_texts_are_compared_not_hashes() -> None:
    """Only equal texts match; no tag never does."""
    found = parse("a || ü")
    assert found is not None
    mask = found.mask(pa.array(["a", "A", None, "ü", "ab"]))
    assert mask.to_pylist() == [True, False, False, True, False]


@pytest.mark.parametrize(
    "text",
    ["", " ", "a ||", "|| a", "a || * ", "a | b", "x" * (TAG_BYTES + 1), "ü" * TAG_BYTES, "\ud800",
     "||".join(f"t{n}" for n in range(TAG_EXPRESSION_TAGS + 1)), "a" * 100_000],
)  # fmt: skip
def test_what_is_no_expression_is_refused(text: str) -> None:
    """400 that names the field."""
    with pytest.raises(BadRequest) as caught:
        parse(text, "filter")
    assert caught.value.fields[0].field == "filter"


@pytest.mark.parametrize(("rows", "text"), [([4], "4"), ([0, 1, 2], "0-2"), ([0, 1, 5, 7, 8], "0-1,5,7-8")])
def test_rows_as_text(rows: list[int], text: str) -> None:
    """Runs of rows, ends inclusive, and back as pairs of first and exclusive end."""
    assert row_ranges.texts_of(np.array(rows, np.int64)) == [text]
    pairs = row_ranges.parse(text, "rows").reshape(-1, 2)
    assert [row for first, end in pairs for row in range(first, end)] == rows


@pytest.mark.parametrize(
    "text",
    ["", "-", "1-", "-1", "a", "3-1", "0-5,3", "5,1", "1,,2", "1 - 2", "\u0663", "9999999999", "1\n",
     ",".join(str(2 * n) for n in range(RECEIPT_RANGES + 1))],
)  # fmt: skip
def test_rows_that_are_no_ranges_are_refused(text: str) -> None:
    """400 that names the field; never an error of the parser."""
    with pytest.raises(BadRequest):
        row_ranges.parse(text, "rows")


def test_message_ids_may_have_dashes_in_the_group() -> None:
    """The group's name may hold dashes; what is no id is None."""
    assert message_id.parse("store-a-1-12-7") == ("store-a-1", 12, 7)
    for text in ("", "a", "a-1", "a-01-2", "a-1--2", "-1-2", "a-1-2-", "a-1-99999999999999999999", "a-\u0661-2"):
        assert message_id.parse(text) is None
