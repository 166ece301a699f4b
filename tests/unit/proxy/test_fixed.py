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
    assert fixed.texts([digits], len(digits)).to_pylist() == [str(number) for number in numbers]


@pytest.mark.parametrize("numbers", [[9, 10], [-1, 1], [-10, -11]], ids=["widths", "one negative", "negative"])
def test_other_numbers_are_none(numbers: list[int]) -> None:
    """They have not all as many digits."""
    assert fixed.decimal(np.array(numbers)) is None


@given(st.integers(0, 25_000) | st.integers(10**12 - 2_000, 10**12), st.integers(0, 25_000))
def test_consecutive_numbers_come_in_runs(first: int, count: int) -> None:
    """In order, none is left out, and what a run begins with stands before each of its numbers."""
    runs = list(fixed.consecutive(first, first + count))
    assert [high + row.tobytes() for high, low in runs for row in low] == [
        str(number).encode() for number in range(first, first + count)
    ]
    assert len(runs) <= 4 + count // 10_000 + 2, "a run is as long as it can be"


def test_constants_and_tables_stand_beside_each_other() -> None:
    """One text a row, the constants in each."""
    digits = fixed.decimal(np.array([17, 42]))
    assert digits is not None
    table = fixed.beside([b"<", digits, b"", b"|", digits, b">"], 2)
    assert fixed.texts([table], 2).to_pylist() == ["<17|17>", "<42|42>"]


def test_texts_without_width_are_empty() -> None:
    """As many as there are rows."""
    assert fixed.texts([fixed.beside([b""], 3)], 3).to_pylist() == ["", "", ""]
