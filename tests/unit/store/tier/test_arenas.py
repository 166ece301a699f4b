"""Memory that is used again."""

from __future__ import annotations

from millpond.core.limits import MIB
from millpond.store.tier.arenas import STEP_BYTES, Arenas


def test_what_is_given_back_is_taken_again() -> None:
    """The same memory, when it is large enough; never the same for two."""
    arenas = Arenas(2)
    first, second = arenas.take(MIB), arenas.take(MIB)
    assert first.address != second.address
    arenas.give_back(first)
    assert arenas.take(STEP_BYTES).address == first.address
    assert arenas.take(MIB).address != first.address


def test_too_small_ones_are_dropped() -> None:
    """A larger object gets memory of its own size."""
    arenas = Arenas(2)
    arenas.give_back(arenas.take(MIB))
    assert arenas.take(STEP_BYTES + 1).size == 2 * STEP_BYTES


def test_no_more_than_most_are_kept_and_none_after_release() -> None:
    """What is kept is bounded, and goes when sealing has come to rest."""
    arenas = Arenas(1)
    one, other = arenas.take(MIB), arenas.take(MIB)
    arenas.give_back(one)
    arenas.give_back(other)
    assert len(arenas._free) == 1
    arenas.release()
    assert not arenas._free
