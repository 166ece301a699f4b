"""Rounds take turns, and a round waits until what went before has come to rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from benchmarks import harness


async def test_rounds_take_turns() -> None:
    """A B A B, each after the rest; the warming round is not counted."""
    seen: list[str] = []

    async def settle() -> None:
        seen.append("rest")

    def run(name: str) -> harness.Callable[[], harness.Awaitable[float]]:
        async def one() -> float:
            seen.append(name)
            return float(len(seen))

        return one

    found = await harness.interleaved(1, {"a": run("a"), "b": run("b")}, seen.append, settle, warm=True)
    assert [each for each in seen if each in {"a", "b", "rest"}] == ["rest", "a", "rest", "b"] * 2
    assert [len(values) for values in found.values()] == [1, 1]
    assert found["a"] > [seen.index("b")]


BUSY, BUSY_FIRST, IDLE = itertools.count(), itertools.chain([0, 1, 2], itertools.repeat(3)), itertools.repeat(3)


@pytest.mark.parametrize(("taken", "rests"), [(BUSY, False), (BUSY_FIRST, True), (IDLE, True)])
async def test_a_round_waits_for_rest(monkeypatch: pytest.MonkeyPatch, taken: Iterator[int], rests: bool) -> None:
    """Until its processes take next to nothing, but not for ever."""
    monkeypatch.setattr(harness, "family_cpu_seconds", lambda pid: next(taken))
    monkeypatch.setattr(harness, "discarded", int)  # what other tests unlink meanwhile
    monkeypatch.setattr(harness.os, "sync", int)  # what they write
    monkeypatch.setattr(harness, "SETTLE_SECONDS", 20.0 if rests else 0.5)
    monkeypatch.setattr(harness, "QUIET_SECONDS", 0.01)
    assert await harness.settled(1) is rests
