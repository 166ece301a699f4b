"""A store that loses power at any moment: every acknowledged message is there, at its offset, and nothing else moved.

A workload runs on a recording disk; afterwards any moment of it can be turned into a power cut that keeps any
subset of the pages written since the last sync. Each such disk is opened by a new engine.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.disks import MemoryDisk, Noted, crash
from support.stores import StoreMetadata, append, bodies_of, messages, open_store

from millpond.store.client import ReadRequest
from millpond.store.local import LocalStore

QUEUES = 3
CONFIG = {"checkpoint_bytes": 48 * 1024, "checkpoint_frames": 200}


async def workload(disk: MemoryDisk, tier: Path, seed: int, appends: int) -> None:
    """Batches of random sizes to random queues from several producers at once; every acknowledgement is noted."""
    chance = random.Random(seed)  # noqa: S311  # a seed reproduces a failure
    store = await open_store(disk, StoreMetadata(), tier, **CONFIG)
    numbers = iter(range(1_000_000))

    async def produce() -> None:
        for _ in range(appends):
            number = chance.randrange(QUEUES)
            bodies = [b"%d:" % next(numbers) + b"x" * chance.randrange(600) for _ in range(chance.randrange(1, 8))]
            result = await append(store, messages(bodies, number=number))
            outcome = result.outcomes[0]
            assert outcome.error is None
            disk.note(Noted((number, outcome.first_offset, bodies)))

    await asyncio.gather(*(produce() for _ in range(4)))
    await store.close()


async def content(store: LocalStore, number: int) -> dict[int, bytes]:
    """Every message of a queue by offset."""
    found: dict[int, bytes] = {}
    ends = (await store.queues([number + 1]))[0]
    offset = ends.start_offset
    while offset < ends.end_offset:
        result = await store.read(ReadRequest(number + 1, offset, 10_000, 1 << 24))
        for frame in result.frames:
            for row, body in enumerate(bodies_of(frame)):
                assert found.setdefault(frame.first_offset + row, body) == body
        assert result.next_offset > offset
        offset = result.next_offset
    assert list(found) == list(range(ends.start_offset, ends.end_offset)), "offsets are dense"
    return found


async def check(disk: MemoryDisk, tier: Path, noted: list[Any]) -> None:
    metadata = StoreMetadata()
    metadata.epoch = 1000
    store = await open_store(disk, metadata, tier, **CONFIG)
    try:
        there = {number: await content(store, number) for number in range(QUEUES)}
        for number, first, bodies in noted:
            for row, body in enumerate(bodies):
                assert there[number].get(first + row) == body, f"acknowledged message {first + row} of queue {number}"
        before = {number: max(found, default=-1) for number, found in there.items()}
        for number in range(QUEUES):
            result = await append(store, messages([b"after"], number=number))
            assert result.outcomes[0].first_offset == before[number] + 1, "the next offset follows the last one"
    finally:
        await store.close()


async def crashes(tmp_path: Path, seed: int, states: int, **kind: Any) -> int:
    disk = MemoryDisk(record=True)
    await workload(disk, tmp_path / "tier", seed, 30)
    chance = random.Random(seed)  # noqa: S311  # a seed reproduces a failure
    acknowledged = 0
    for _ in range(states):
        left = crash(disk.trace, chance.randrange(40, len(disk.trace) + 1), chance, **kind)
        await check(left.disk, tmp_path / "tier", left.noted)
        acknowledged += len(left.noted)
    return acknowledged


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_power_cut_at_any_moment_loses_nothing_acknowledged(tmp_path: Path, seed: int) -> None:
    """With any subset of the unsynced pages on the disk, every flushed append is read back at its offset."""
    assert await crashes(tmp_path, seed, 60) > 1000, "the cuts came after acknowledgements"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10, 20))
async def test_a_thousand_power_cuts(tmp_path: Path, seed: int) -> None:
    """The same, 100 states from each of ten workloads."""
    assert await crashes(tmp_path, seed, 100) > 1000


async def test_a_killed_process_keeps_all_it_wrote(tmp_path: Path) -> None:
    """kill -9 leaves every written page: the same holds."""
    assert await crashes(tmp_path, 3, 20, keep_unsynced=True) > 300
