"""The record batch of a frame, laid out around bodies that stand elsewhere.

    message   metadata, the other columns, offsets of the bodies | bodies, one after another | padding

`body` is the last column of the log's schema, so its bytes stand last in a batch. pyarrow encodes the batch with
empty bodies; what is different with the real ones (two lengths in the metadata, and the offsets) is put in its place.
So whoever has the bodies writes them once, to where they are needed.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.arrow import Places, lengthen, places
from millpond.core.frame import aligned
from millpond.core.limits import BATCH_MESSAGES
from millpond.core.schema import columns_of, message_schema

_NO_BODY = pa.py_buffer(b"")


class Around(NamedTuple):
    """What stands `before` and `after` the bodies in their message; `bounds` int32[n + 1], where each begins among
    them, and where the last one ends."""

    before: bytes
    after: bytes
    bounds: npt.NDArray[np.int32]


def around(lengths: npt.NDArray[np.int32], beside: pa.RecordBatch | None = None) -> Around:
    """`lengths` int32[n] of the bodies, at most BATCH_MESSAGES; `beside`: the other columns, in the order of
    `message_schema`."""
    count = len(lengths)
    empty, at = _bare_front(count) if beside is None else _front(count, beside)
    bounds = np.zeros(_bounds(count), np.int32)
    np.cumsum(lengths, out=bounds[1 : count + 1])
    size = int(bounds[count])
    front = bytearray(empty)
    lengthen(front, at, at.buffer_count - 1, size)
    before = b"".join((front, bounds.data))
    return Around(before, bytes(aligned(size) - size), bounds[: count + 1])


def schema_of(beside: pa.RecordBatch | None) -> pa.Schema:
    """That of the log for bodies with these columns."""
    return message_schema(0 if beside is None else columns_of(set(beside.schema.names)))


@lru_cache(256)
def _bare_front(count: int) -> tuple[bytes, Places]:
    """Batches of bodies alone differ only in how many there are; and most have as many as fill one."""
    front, at = _front(count, None)
    return bytes(front), at


def _front(count: int, beside: pa.RecordBatch | None) -> tuple[memoryview, Places]:
    """What stands before the offsets of the bodies, when these are all empty."""
    empty = pa.Array.from_buffers(pa.binary(), count, [None, _zeros()[: 4 * (count + 1)], _NO_BODY])
    columns = [empty] if beside is None else [*beside.columns, empty]
    encoded = memoryview(pa.RecordBatch.from_arrays(columns, schema=schema_of(beside)).serialize()).cast("B")
    return encoded[: len(encoded) - 4 * _bounds(count)], places(encoded)


def _bounds(count: int) -> int:
    """How many numbers the offsets of `count` bodies are, with the padding that follows them."""
    return aligned(4 * (count + 1)) // 4


@cache
def _zeros() -> pa.Buffer:
    return pa.py_buffer(bytes(4 * (BATCH_MESSAGES + 1)))
