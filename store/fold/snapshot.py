"""A snapshot in two steps, so that the loop stands still for the first alone, however much is known.

`snapshot()` of each part notes on the loop what it knows at that moment, and gives back a function that makes `Tables`
of it, which a thread calls. What that function holds does not change any more: it is immutable, or only grows behind
what was noted, or is copied before it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.threads import give_way

Tables: TypeAlias = dict[str, pa.Table]
Snapshot: TypeAlias = Callable[[], Tables]

AT_ONCE = 1024
"""Rows of Python objects that one call looks at, which holds the interpreter for half a millisecond."""


def together(parts: Iterable[Snapshot]) -> Snapshot:
    held = list(parts)
    return lambda: dict(chain.from_iterable(part().items() for part in held))


def parted(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """`rows` by `AT_ONCE`, others given way to in between; one empty piece when there are none."""
    yield rows[:AT_ONCE]
    for start in range(AT_ONCE, len(rows), AT_ONCE):
        give_way()
        yield rows[start : start + AT_ONCE]


def table_of(rows: Sequence[Any], names: Sequence[str], flat: Callable[[Any], tuple[int, ...]] = tuple) -> pa.Table:
    """A column of 64-bit numbers for each name; `flat` makes these of a row."""
    columns: npt.NDArray[np.int64] = np.empty((len(names), len(rows)), np.int64)
    end = 0
    for piece in parted(rows):
        start, end = end, end + len(piece)
        columns[:, start:end] = np.array(list(map(flat, piece)), np.int64).reshape(-1, len(names)).T
    return pa.table(dict(zip(names, columns, strict=True)))
