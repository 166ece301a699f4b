"""Memory is given back after work, once, and never during it."""

from __future__ import annotations

import pytest

from millpond.memory import LOOK_SECONDS, Tidier, give_back, used_cpu


@pytest.mark.parametrize(
    ("shares", "given"),
    [
        ([0.0, 0.0, 0.0], 0),  # never worked
        ([0.9, 0.9, 0.9], 0),  # works still
        ([0.9, 0.0, 0.0, 0.0], 1),  # once
        ([0.9, 0.0, 0.9, 0.0, 0.0], 2),  # once after each time
        ([0.05, 0.05], 0),  # that little is no work
    ],
)
def test_when_it_gives_back(shares: list[float], given: int) -> None:
    """`shares`: of one core, in each time between two looks."""
    cpu, times = [0.0], []
    tidier = Tidier(lambda: cpu[0], lambda: times.append(1))
    for share in shares:
        cpu[0] += share * LOOK_SECONDS
        tidier.look()
    assert len(times) == given


def test_what_giving_back_takes_is_no_work() -> None:
    """Else it would be repeated for ever."""
    cpu, times = [0.0], []

    def release() -> None:
        cpu[0] += LOOK_SECONDS
        times.append(1)

    tidier = Tidier(lambda: cpu[0], release)
    cpu[0] += LOOK_SECONDS
    for _ in range(4):
        tidier.look()
    assert len(times) == 1


def test_the_real_ones_can_be_called() -> None:
    """On any platform the tests run on: CPU time grows, and giving back leaves the process alive."""
    before = used_cpu()
    give_back()
    assert used_cpu() >= before
