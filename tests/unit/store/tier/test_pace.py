"""How fast sealing may go."""

from __future__ import annotations

from millpond.core.limits import MIB, SEAL_GENTLE_BYTES_PER_SECOND
from millpond.store.tier.pace import Pace


def test_slowly_until_the_store_is_known_to_rest() -> None:
    """A limit holds from the start, and goes once next to no CPU was used."""
    pace = Pace()
    assert pace.bytes_per_second(0.0, 5.0, 0) == SEAL_GENTLE_BYTES_PER_SECOND
    assert pace.bytes_per_second(0.1, 5.0, 0) == SEAL_GENTLE_BYTES_PER_SECOND
    assert pace.bytes_per_second(0.5, 5.01, 0) == 0


def test_slowly_beside_work_but_never_slower_than_what_comes_in() -> None:
    """While the store works there is a limit: twice of what is appended when that is more."""
    pace = Pace()
    pace.bytes_per_second(0.0, 0.0, 0)
    assert pace.bytes_per_second(1.0, 0.5, MIB) == SEAL_GENTLE_BYTES_PER_SECOND
    assert pace.bytes_per_second(2.0, 1.0, 301 * MIB) == 600 * MIB
    assert pace.bytes_per_second(3.0, 1.01, 301 * MIB) == 0
