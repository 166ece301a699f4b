"""Rounds take turns, and a round waits until what went before has come to rest."""

from __future__ import annotations

import asyncio
import sys

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


BEGUN = "print(end='x', flush=True)"
PAUSE, TURN = f"import signal; {BEGUN}; signal.pause()", f"{BEGUN}\nwhile True: pass"
CHILD_TURNS = f"""
import os
if os.fork():
    import signal; signal.pause()
import ctypes; ctypes.CDLL(None).prctl(1, 9)  # ends with the one above
{TURN}
"""


@pytest.mark.parametrize(("code", "rests"), [(PAUSE, True), (TURN, False), (CHILD_TURNS, False)])
async def test_a_round_waits_for_rest(monkeypatch: pytest.MonkeyPatch, code: str, rests: bool) -> None:
    """While a process computes, or one that it has started, but not for ever; who waits is at rest, and who is gone."""
    monkeypatch.setattr(harness, "SETTLE_SECONDS", 60.0 if rests else 1.5)
    monkeypatch.setattr(harness, "QUIET_SECONDS", 1.0)  # a host may take both cores for a quarter of one
    monkeypatch.setattr(harness, "discarded", int)  # what other tests unlink meanwhile
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        await process.stdout.readexactly(1)  # it has begun
        assert await harness.settled(process.pid, 2**22 - 1) is rests
    finally:
        process.kill()
        await process.wait()
