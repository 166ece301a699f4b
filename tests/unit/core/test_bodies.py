"""A batch laid out around bodies that stand elsewhere."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.bodies import around, schema_of

ROWS = st.lists(st.tuples(st.binary(max_size=20), st.none() | st.binary(max_size=3)), min_size=1, max_size=30)


@given(ROWS, st.booleans())
def test_with_the_bodies_in_between_it_is_what_pyarrow_encodes(
    rows: list[tuple[bytes, bytes | None]], keyed: bool
) -> None:
    """Byte for byte, with other columns and without; the bounds are those of the column."""
    bodies = [body for body, _ in rows]
    beside = pa.record_batch({"key": pa.array([key for _, key in rows], pa.binary())}) if keyed else None
    before, after, bounds = around(np.array([len(body) for body in bodies], np.int32), beside)
    columns = [*(beside.columns if beside is not None else []), pa.array(bodies, pa.binary())]
    expected = pa.RecordBatch.from_arrays(columns, schema=schema_of(beside)).serialize().to_pybytes()
    assert b"".join((before, *bodies, after)) == expected
    assert [b"".join(bodies)[begin:end] for begin, end in pairwise(bounds)] == bodies
