"""When a run closes."""

from __future__ import annotations

import pytest

from millpond.core.config import TierConfig
from millpond.core.limits import MIB
from millpond.store.tier.policy import due

NOON = 1_700_049_600_000
MINUTE, HOUR = 60_000, 3_600_000


@pytest.mark.parametrize(
    ("size", "age_ms", "expected"),
    [
        (0, 0, None),
        (64 * MIB - 1, 0, None),
        (64 * MIB, 0, "full"),
        (4 * MIB, 10 * MINUTE, "trickle"),
        (4 * MIB - 1, 10 * MINUTE, None),
        (4 * MIB, 10 * MINUTE - 1, None),
        (1, 6 * HOUR, "age"),
        (1, 6 * HOUR - 1, None),
        (1, 12 * HOUR + 1, "midnight"),
        (100 * MIB, 12 * HOUR + 1, "full"),
    ],
)
def test_due(size: int, age_ms: int, expected: str | None) -> None:
    """64 MiB; 10 minutes with 4 MiB; 6 hours; midnight UTC; nothing otherwise."""
    assert due(size, NOON - age_ms, NOON, TierConfig()) == expected


def test_midnight_comes_before_age() -> None:
    """A day that is over is due at once, however small and young what is left of it is."""
    midnight = NOON - 12 * HOUR
    assert due(1, midnight - 1, midnight, TierConfig()) == "midnight"
    assert due(1, midnight, midnight + 1, TierConfig()) is None
