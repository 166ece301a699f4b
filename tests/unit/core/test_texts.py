"""Columns as the buffers that they are."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millpond.core.texts import data_of


@pytest.mark.parametrize("kind", [pa.binary(), pa.string()])
@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 2), (2, 1), (3, 1), (4, 0)])
def test_the_data_is_that_of_the_rows_alone(kind: pa.DataType, first: int, count: int) -> None:
    """Of a slice what its rows have, nothing of those before and behind it; an empty one and a null have none."""
    values = [b"one", b"", None, b"four"]
    column = pa.array(values, kind).slice(first, count)
    assert data_of(column).to_pybytes() == b"".join(value or b"" for value in values[first : first + count])


def test_a_column_of_nothing_has_no_data() -> None:
    """Whatever buffers Arrow makes for it."""
    for column in (pa.nulls(3, pa.binary()), pa.array([b""] * 3), pa.array([], pa.string())):
        assert data_of(column).size == 0
