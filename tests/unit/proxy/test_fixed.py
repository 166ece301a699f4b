"""Texts of one width as tables of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.proxy.codec import fixed


def of_width(width: int) -> st.SearchStrategy[list[int]]:
    least, most = 10 ** (width - 1) if width > 1 else 0, min(10**width, 2**63) - 1
    return st.lists(st.integers(least, most), min_size=1, max_size=20)


@given(st.integers(1, 19).flatmap(of_width))
def test_numbers_of_as_many_digits_are_a_table(numbers: list[int]) -> None:
    """Of their digits, whatever their width."""
    digits = fixed.decimal(np.array(numbers, np.int64))
    assert digits is not None
    assert fixed.column(digits).to_pylist() == [str(number) for number in numbers]


@pytest.mark.parametrize("numbers", [[9, 10], [-1, 1], [-10, -11]], ids=["widths", "one negative", "negative"])
def test_other_numbers_are_none(numbers: list[int]) -> None:
    """They have not all as many digits."""
    assert fixed.decimal(np.array(numbers)) is None


@given(st.integers(0, 12_000) | st.integers(10**12 - 2_000, 10**12), st.integers(0, 3_000))
def test_a_run_of_numbers_is_a_table_for_each_width(first: int, count: int) -> None:
    """In order, and none is left out."""
    tables = list(fixed.decimals(first, first + count))
    assert [row.tobytes() for table in tables for row in table] == [
        str(number).encode() for number in range(first, first + count)
    ]
    assert len({table.shape[1] for table in tables}) == len(tables)


def test_constants_and_tables_stand_beside_each_other() -> None:
    """One text a row, the constants in each."""
    digits = fixed.decimal(np.array([17, 42]))
    assert digits is not None
    table = fixed.beside([b"<", digits, b"", b"|", digits, b">"], 2)
    assert fixed.column(table).to_pylist() == ["<17|17>", "<42|42>"]


def test_texts_without_width_are_empty() -> None:
    """As many as there are rows."""
    assert fixed.column(fixed.beside([b""], 3)).to_pylist() == ["", "", ""]
