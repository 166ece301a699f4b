"""A real power cut: ext4 on a loop device loses everything that was not synced while standalone runs on it.

Every message acknowledged by a `flush` topic is there afterwards, at its offset; whatever any reader saw is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from support.checker import Checker
from support.cuts import SmallDisk
from support.load import FLUSHED, GROUPS, Load
from support.processes import Process


async def cut_cycles(disk: SmallDisk, service: Process, cycles: int, messages: int) -> Checker:
    """Cut the power and start again `cycles` times with `messages` acknowledged in between."""
    await service.start()
    checker = Checker()
    async with Load(service.url, checker, (FLUSHED,)) as load:
        load.start()
        for cycle in range(cycles):
            await load.acknowledged(messages)
            canary = disk.canary()
            before = hashlib.sha256(canary.read_bytes()).digest()
            disk.cut()
            if cycle % 2:
                service.kill()
            else:  # its disk fails under it: it must notice by itself, and tell nobody that something is safe
                assert await service.exited() == 1
            disk.restore()
            assert not canary.exists() or hashlib.sha256(canary.read_bytes()).digest() != before, "nothing was lost"
            canary.unlink(missing_ok=True)
            checker.fault(f"power cut number {cycle}", forgets_grants=True)
            await service.start()
        await load.acknowledged(messages)
        await load.finish()
    checker.check(GROUPS, least=messages, faults=cycles)
    return checker


async def test_power_cut_under_load(small_disk: SmallDisk, start: Callable[..., Process]) -> None:
    """Three cuts: all that was acknowledged is there."""
    checker = await cut_cycles(small_disk, start(data=small_disk.path / "data"), cycles=3, messages=1000)
    print(f"\n{checker.acknowledged} acknowledged, {checker.unknown} unknown, settled {dict(checker.statuses)}")


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_thirty_power_cuts_under_load(small_disk: SmallDisk, start: Callable[..., Process]) -> None:
    """The same, thirty times on one data directory, with full segments and checkpoints in between."""
    flags = ("--segment-bytes", "1048576", "--checkpoint-frames", "500")
    checker = await cut_cycles(small_disk, start(*flags, data=small_disk.path / "data"), cycles=30, messages=1000)
    print(f"\n{checker.acknowledged} acknowledged, {checker.unknown} unknown, settled {dict(checker.statuses)}")
