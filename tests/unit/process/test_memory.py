"""Memory is given back after work, once; during it what is free alone, when memory has piled up."""

from __future__ import annotations

import pytest

from millpond.core.limits import MIB
from millpond.memory import (
    CALM_LOOK_SECONDS,
    CROWD_BYTES,
    CROWD_GROWTH,
    CROWD_LOOK_SECONDS,
    LOOK_SECONDS,
    Tidier,
    give_back,
    held_bytes,
    used_cpu,
)


class Heap:
    """A process's memory: what is in use, and what was freed and stands there still."""

    def __init__(self) -> None:
        self.used = self.free = 0
        self.given: list[int] = []

    def held(self) -> int:
        return self.used + self.free

    def release(self) -> None:
        self.given.append(self.free)
        self.free = 0


@pytest.fixture
def heap() -> Heap:
    return Heap()


@pytest.fixture
def crowd(heap: Heap) -> Tidier:
    return Tidier(held=heap.held, release_free=heap.release)


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


async def test_both_are_looked_for_as_time_passes(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of work with memory that piles up, and then rest: free memory often, and all of it once."""
    cpu, passed, times = [0.0], [0.0], []

    async def sleep(seconds: float) -> None:
        passed[0] += seconds
        if passed[0] > 75:
            raise TimeoutError
        if passed[0] <= 60:
            cpu[0] += seconds
            heap.free += CROWD_BYTES // 8

    monkeypatch.setattr("millpond.memory.asyncio.sleep", sleep)
    with pytest.raises(TimeoutError):
        await Tidier(lambda: cpu[0], lambda: times.append(passed[0]), heap.held, heap.release).run()
    assert len(heap.given) > 1
    assert len(times) == 1 and 60 <= times[0] <= 60 + 2 * LOOK_SECONDS + CALM_LOOK_SECONDS


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


def test_what_piles_up_under_load_is_given_back(heap: Heap, crowd: Tidier) -> None:
    heap.used = CROWD_BYTES // 2
    for _ in range(100):
        heap.free += CROWD_BYTES // 32
        assert heap.held() < CROWD_BYTES + CROWD_BYTES // 32
        crowd.look_for_crowd()
    assert heap.given


def test_what_is_in_use_is_not_looked_through_in_vain(heap: Heap, crowd: Tidier) -> None:
    """Once when it comes to be so much, and again when it has grown by its share: not at every look."""
    heap.used = 2 * CROWD_BYTES
    for _ in range(10):
        crowd.look_for_crowd()
    assert len(heap.given) == 1
    heap.used = int(2 * CROWD_BYTES * CROWD_GROWTH) - 1
    crowd.look_for_crowd()
    assert len(heap.given) == 1
    heap.used += 1
    crowd.look_for_crowd()
    assert len(heap.given) == 2


def test_growth_counts_from_the_least_since(heap: Heap, crowd: Tidier) -> None:
    heap.used = 2 * CROWD_BYTES
    crowd.look_for_crowd()
    heap.used = CROWD_BYTES
    crowd.look_for_crowd()
    heap.free = int(CROWD_BYTES * (CROWD_GROWTH - 1))
    crowd.look_for_crowd()
    assert len(heap.given) == 2


def test_a_small_process_is_looked_at_less_often(heap: Heap, crowd: Tidier) -> None:
    heap.used = CROWD_BYTES // 4
    assert crowd.look_for_crowd() == CALM_LOOK_SECONDS
    heap.free = CROWD_BYTES // 2
    assert crowd.look_for_crowd() == CROWD_LOOK_SECONDS


def test_a_small_process_keeps_what_it_has_freed(heap: Heap, crowd: Tidier) -> None:
    for heap.free in (0, CROWD_BYTES - 1, 0, CROWD_BYTES - 1):
        crowd.look_for_crowd()
    assert not heap.given


def test_the_memory_that_is_held_is_anonymous_memory() -> None:
    """A block that was written to counts, wherever it stands; 0 is what a system says that does not tell."""
    before = held_bytes()
    block = bytearray(b"x") * (64 * MIB)
    assert not before or held_bytes() - before > 48 * MIB
    del block


def test_the_real_ones_can_be_called() -> None:
    """On any platform the tests run on: CPU time grows, and giving back leaves the process alive."""
    before = used_cpu()
    give_back()
    assert used_cpu() >= before
