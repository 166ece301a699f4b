"""Rows cut into ranges."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.core.ranges import split


@pytest.mark.parametrize(
    ("sizes", "most", "ranges"),
    [
        ([], 5, []),
        ([5], 5, [(0, 1)]),
        ([6], 5, [(0, 1)]),
        ([2, 3, 1], 5, [(0, 2), (2, 3)]),
        ([1, 9, 1, 1], 5, [(0, 1), (1, 2), (2, 4)]),
        ([3, 3, 3, 20, 1, 9, 1], 10, [(0, 3), (3, 4), (4, 6), (6, 7)]),
        ([3, 3, 3], 5, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_ranges_have_no_more_than_asked_for(sizes: list[int], most: int, ranges: list[tuple[int, int]]) -> None:
    """Unless a single row has; each row is in one of them."""
    assert split(np.array(sizes, np.int64), most) == ranges
