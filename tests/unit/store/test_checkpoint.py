"""A checkpoint's file: what goes in comes out, no damage passes, and large columns are not copied for it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from millpond.store.checkpoint import VERSION, Checkpoint, Head, decode, encode

HEAD = Head(VERSION, 4096, 4096, 1, 9, 0, [(1, 0)], [], [])
ROWS = 100_000


@pytest.fixture
def checkpoint() -> Checkpoint:
    large = pa.table({"offset": np.arange(ROWS), "state": np.arange(ROWS).astype(np.uint8)})
    small = pa.table({"name": ["a", None], "parts": [b"", b"\x00"]})
    return Checkpoint(HEAD, {"large": large, "empty": large.slice(0, 0), "small": small})


def test_what_goes_in_comes_out(checkpoint: Checkpoint) -> None:
    """The head's numbers, and each table by its name."""
    found = decode(b"".join(map(bytes, encode(checkpoint))))
    assert (found.head.position, found.head.epochs) == (HEAD.position, HEAD.epochs)
    assert found.tables == checkpoint.tables


def test_no_damage_passes(checkpoint: Checkpoint) -> None:
    """One bit anywhere, in the head, a column or what stands between them, is found out."""
    data = bytearray(b"".join(map(bytes, encode(checkpoint))))
    for at in (*range(12), *range(16, len(data), 4_999), len(data) - 1):
        data[at] ^= 1
        with pytest.raises(ValueError, match=r"damaged|not a checkpoint"):
            decode(bytes(data))
        data[at] ^= 1


def test_large_columns_are_not_copied(checkpoint: Checkpoint) -> None:
    """They go to the disk from where the snapshot has them."""
    columns = [checkpoint.tables["large"].column(name).chunk(0).buffers()[1].address for name in ("offset", "state")]
    pieces = [pa.py_buffer(piece).address for piece in encode(checkpoint)]
    assert set(columns) <= set(pieces)


_FIRST_SNAPSHOT = """
import sys
import pyarrow
from millpond.store.index import OpenIndex
import millpond.store.checkpoint
pyarrow.array([1])  # what the first array of a list loads, a start has loaded
before = set(sys.modules)
OpenIndex(0).snapshot()()
print(sorted(set(sys.modules) - before))
"""


def test_a_first_snapshot_loads_nothing() -> None:
    """The loop stands still while it is taken: what it needs is there before a store begins."""
    code = [sys.executable, "-c", _FIRST_SNAPSHOT]
    told = subprocess.run(code, capture_output=True, text=True, check=True)  # noqa: S603 - this interpreter
    assert told.stdout.strip() == "[]"
