"""kill -9 of standalone under load: nothing acknowledged is lost, nothing moves, nothing comes twice that may not."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from support.checker import Checker
from support.load import GROUPS, Load
from support.processes import Process

READY_SECONDS = 20.0  # generous: a broken start takes for ever; what is measured is printed


async def kill_cycles(service: Process, cycles: int, messages: int) -> tuple[Checker, list[float]]:
    """Kill and restart `cycles` times with `messages` acknowledged in between; the checker, and seconds to ready."""
    await service.start()
    checker, ready = Checker(), []
    async with Load(service.url, checker) as load:
        load.start()
        for cycle in range(cycles):
            await load.acknowledged(messages)
            assert service.kill() == -signal.SIGKILL
            checker.fault(f"kill -9 number {cycle}")
            await service.start()
            ready.append(service.ready_seconds)
        await load.acknowledged(messages)
        await load.finish()
    checker.check(GROUPS, least=messages, faults=cycles)
    assert checker.statuses["ok"] > messages
    assert not {"void", "unknown"} & checker.statuses.keys(), checker.statuses
    return checker, ready


async def test_killed_under_load(start: Callable[..., Process]) -> None:
    """Three kills: all that was acknowledged is there once, at its offset, and every group drains."""
    checker, ready = await kill_cycles(start(), cycles=3, messages=1000)
    print(f"\n{checker.acknowledged} acknowledged, {checker.unknown} unknown, ready after {ready}")
    assert max(ready) < READY_SECONDS


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_killed_thirty_times_under_load(start: Callable[..., Process]) -> None:
    """The same, thirty kills on one data directory, with checkpoints and full segments in between."""
    checker, ready = await kill_cycles(start("--segment-bytes", "1048576", "--checkpoint-frames", "500"), 30, 1000)
    print(f"\n{checker.acknowledged} acknowledged, {checker.unknown} unknown, ready after {ready}")
    assert max(ready) < READY_SECONDS
