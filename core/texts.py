"""Columns of binary or utf8 values as the buffers that they are."""

from __future__ import annotations

from struct import unpack_from

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_NOTHING = pa.py_buffer(b"")


def offsets_and_data(array: pa.Array) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Offsets i32[n+1] and the bytes they point into (views; n >= 1)."""
    _, offsets, data = array.buffers()
    view = np.frombuffer(offsets, np.int32, len(array) + 1, 4 * array.offset)  # a sent buffer may have any size beyond
    return view, np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)


def data_of(array: pa.Array) -> pa.Buffer:
    """The bytes of all rows, one after another; those of nulls, if they have any, among them."""
    count = len(array)
    if not count:
        return _NOTHING
    _, offsets, data = array.buffers()
    (first,) = unpack_from("<i", offsets, 4 * array.offset)
    (end,) = unpack_from("<i", offsets, 4 * (array.offset + count))
    return data.slice(first, end - first)
