"""Rows cut into ranges by what they take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def split(sizes: npt.NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Ranges [start, end) of consecutive rows, whose `sizes` add up to `most` or less; or one row that is larger."""
    ends = np.cumsum(sizes)
    ranges, start = [], 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + most, "right")))
        ranges.append((start, end))
        start = end
    return ranges
