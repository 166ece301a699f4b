"""Texts of one width, as the rows of a table of bytes: numbers and constants become a column without a kernel's call.

A kernel of Arrow's lets other threads have the interpreter, and waits for it again: between threads that write and
flush, that takes longer than the work on a thousand numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Table: TypeAlias = npt.NDArray[np.uint8]
"""A text a row; ASCII."""

_AT_ONCE = 4  # digits that are looked up together
_POWERS = 10 ** np.arange(_AT_ONCE - 1, -1, -1)
_DIGITS = (np.arange(10**_AT_ONCE)[:, np.newaxis] // _POWERS % 10 + ord("0")).astype(np.uint8).view(np.uint32)[:, 0]


def decimal(numbers: npt.NDArray[np.int64]) -> Table | None:
    """Numbers in decimal, at least one. None when they have not all as many digits, or one is negative."""
    least, most = int(numbers.min()), int(numbers.max())
    width = len(str(most))
    if least < 0 or len(str(least)) != width:
        return None
    parts = -(-width // _AT_ONCE)
    digits = np.empty((len(numbers), parts), np.uint32)
    for part in reversed(range(parts)):
        higher = numbers // 10**_AT_ONCE
        digits[:, part] = _DIGITS[numbers - higher * 10**_AT_ONCE]
        numbers = higher
    return digits.view(np.uint8)[:, -width:]


def consecutive(first: int, end: int) -> Iterator[tuple[bytes, Table]]:
    """The numbers from `first`, 0 or more, up to `end` in runs: the digits that all of a run begin with, and a table
    of the others."""
    while first < end:
        high, low = divmod(first, len(_DIGITS))
        width = _AT_ONCE if high else len(str(low))
        upto = min(end - first + low, 10**width)
        yield str(high or "").encode(), _DIGITS[low:upto, np.newaxis].view(np.uint8)[:, -width:]
        first += upto - low


def beside(pieces: Sequence[bytes | Table], count: int) -> Table:
    """Constants and tables of `count` rows as one table."""
    row = b"".join([piece if isinstance(piece, bytes) else bytes(piece.shape[1]) for piece in pieces])
    table = np.frombuffer(bytearray(row) * count, np.uint8).reshape(count, len(row))
    at = 0
    for piece in pieces:
        if isinstance(piece, bytes):
            at += len(piece)
        else:
            width = piece.shape[1]
            whole = f"V{width}"  # a row's bytes as one element: NumPy moves them several times as fast
            table[:, at : at + width].view(whole)[:] = piece.view(whole)
            at += width
    return table


def texts(pieces: Sequence[bytes | Table], count: int) -> str | pa.StringArray:
    """The same as a column, or as the one text that all its rows are."""
    constants = [piece for piece in pieces if isinstance(piece, bytes)]
    if len(constants) == len(pieces):
        return b"".join(constants).decode()
    table = beside(pieces, count)
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(table.shape[1])
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(table)])
