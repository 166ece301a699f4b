"""The sealer's own rounds: when they begin, pause and end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest
from support.faulty import Faulty, raising

from millpond.core.errors import Conflict, Unavailable
from millpond.core.limits import SEAL_BUSY_BYTES_PER_SECOND
from millpond.store.tier import postponement, sealer

if TYPE_CHECKING:
    from conftest import World

NOON = 1_700_049_600_000  # 2023-11-15 12:00 UTC, as in conftest
DAY_MS = 86_400_000


async def test_the_first_round_waits_to_be_woken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that starts has other things to do than to look at its topics."""
    looked, topic_ids = asyncio.Event(), world.source.topic_ids

    def noted() -> list[int]:
        looked.set()
        return topic_ids()

    monkeypatch.setattr(world.source, "topic_ids", noted)
    loop = asyncio.create_task(world.sealer.loop())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not looked.is_set()
    world.source.wake.set()
    async with asyncio.timeout(4):  # less than a tick
        await looked.wait()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


@pytest.mark.parametrize("sealed", [0, 1])
async def test_a_burst_is_not_sealed_beside_its_beginning(
    world: World, monkeypatch: pytest.MonkeyPatch, sealed: int
) -> None:
    """The topic that wakes the sealer is full, and bytes still come: it waits. Once they do not, it is sealed. Whether
    or not something was sealed in the round before."""
    monkeypatch.setattr(postponement, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(sealer, "SEAL_TICK_SECONDS", 0.1)
    world.config = msgspec.structs.replace(world.config, seal_bytes=1_000)
    one = await world.restart()
    world.source.append(0, [bytes(1_000)])
    due, asked, woken = one._due, asyncio.Queue[bool](), one._woken

    def note(topic_id: int, now_ms: int) -> bool:
        asked.put_nowait(due(topic_id, now_ms))
        return False

    async def comes() -> None:
        while coming:
            world.source.appended_bytes += SEAL_BUSY_BYTES_PER_SECOND // 10
            await asyncio.sleep(0.01)

    coming = 1

    async def wait(_sealed: int) -> None:
        await woken(sealed)

    monkeypatch.setattr(one, "_due", note)
    monkeypatch.setattr(one, "_woken", wait)
    tasks = [asyncio.create_task(comes()), asyncio.create_task(one.loop())]
    async with asyncio.timeout(20):
        world.source.wake.set()
        assert not await asked.get()
        coming = 0
        while not await asked.get():
            pass
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_loop_waits_for_the_tier_and_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the tier is away the loop pauses and tries again; when it is back, what is due is sealed."""
    monkeypatch.setattr("millpond.store.tier.sealer.SEAL_PAUSE_SECONDS_MOST", 0.001)
    world.source.append(0, [b"a"])
    world.clock.now_ms = NOON + DAY_MS
    away = Unavailable("tier_unavailable", "away")
    one = await world.restart(objects=Faulty(world.objects, raising("put_new", away, times=3), None))
    sealed = asyncio.Event()
    told = world.source.tiered

    def tell(queue_id: int, end: int) -> None:
        told(queue_id, end)
        if end:
            sealed.set()

    monkeypatch.setattr(world.source, "tiered", tell)
    world.source.wake.set()
    loop = asyncio.create_task(one.loop())
    async with asyncio.timeout(20):
        await sealed.wait()
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert one.counters()["seal_failures_total"] == 3
    assert await world.tiered() == [1, 0, 0]


async def test_a_superseded_primary_cannot_commit(world: World) -> None:
    """Another primary has taken over between PUT and commit: the commit is refused and the sealer ends."""
    world.source.append(0, [b"a"])
    done = asyncio.Event()

    class Overtaken(Faulty):
        async def put_new(self, key: str, data: bytes, sha256: str) -> None:
            await self.target.put_new(key, data, sha256)
            await world.metadata.register_store("a", "node", "")
            done.set()

    world.clock.now_ms = NOON + DAY_MS
    one = await world.restart(objects=Overtaken(world.objects, None, None))
    world.source.wake.set()
    with pytest.raises(Conflict) as refused:
        await one.loop()
    assert refused.value.code == "epoch_superseded"
    assert done.is_set()
    assert await world.tiered() == [0, 0, 0]
