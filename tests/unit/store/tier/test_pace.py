"""How fast sealing may go."""

from __future__ import annotations

from millpond.core.limits import MIB, SEAL_GENTLE_BYTES_PER_SECOND
from millpond.store.tier.pace import Pace


def test_slowly_until_the_store_is_known_to_rest() -> None:
    """A limit holds from the start, and goes once next to no CPU was used."""
    pace = Pace()
    assert pace.begin(0.0, 5.0, 0) == SEAL_GENTLE_BYTES_PER_SECOND
    assert pace.look(0.25, 5.01, 0) == 0


def test_slowly_beside_work_but_never_slower_than_what_comes_in() -> None:
    """While the store works there is a limit: twice of what is appended when that is more."""
    pace = Pace()
    pace.begin(0.0, 0.0, 0)
    assert pace.look(1.0, 0.5, MIB) == SEAL_GENTLE_BYTES_PER_SECOND
    assert pace.look(2.0, 1.0, 301 * MIB) == 600 * MIB
    assert pace.look(3.0, 1.01, 301 * MIB) == 0


def test_what_was_done_before_a_rest_ended_does_not_count() -> None:
    """The first look after it knows what one message takes from what work takes."""
    pace = Pace()
    pace.begin(0.0, 0.0, 0)
    pace.begin(60.0, 30.0, 900 * MIB)
    assert pace.look(60.05, 30.005, 900 * MIB) == 0
    pace.begin(60.0, 30.0, 900 * MIB)
    assert pace.look(60.05, 30.01, 900 * MIB) == SEAL_GENTLE_BYTES_PER_SECOND
