"""Which segments of the local disk go, and where topics begin."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, bodies_of, messages, open_store, texts

from millpond.core.errors import BelowLocal
from millpond.metadata.client import TopicSettings
from millpond.store.client import (
    QueueRef,
    ReadRequest,
    TimeRequest,
    TimeResult,
)
from millpond.store.housekeeping import Housekeeping


async def test_the_local_disk_is_a_cache(tmp_path: Path) -> None:
    """Above `local_bytes`, segments whose messages are tiered are recycled; older offsets answer BelowLocal, and the
    disk does not grow."""
    disk = MemoryDisk()
    store = await open_store(disk, StoreMetadata(), tmp_path, local_bytes=4 * 64 * 1024, checkpoint_bytes=32 * 1024)
    for round_number in range(60):
        await append(store, messages([b"%d" % round_number + b"x" * 9000]))
        for state in store.engine.fold.queues:
            store.engine.seal_source.tiered(state.ref.queue_id, state.confirmed_end)
        if round_number % 8 == 7:
            await store.engine.housekeeping.checkpoint()
            await store.engine.retention.free(store.engine.housekeeping)
    ends = (await store.queues([1]))[0]
    assert ends.local_offset > 20
    assert disk.allocated < 8 * 64 * 1024
    with pytest.raises(BelowLocal):
        await store.read(ReadRequest(1, 0, 10, 1 << 20))
    assert len(await texts(store, ends.local_offset)) == 60 - ends.local_offset
    await store.close()


@pytest.mark.parametrize("at_the_end", [False, True])
async def test_a_burst_is_recycled_when_no_checkpoint_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    """Nothing is appended after it: the checkpoints that segments wait for are taken all the same, all that they need,
    and none after that. One that stands at the log's end already is not enough: two must cover a segment."""
    monkeypatch.setattr("millpond.store.housekeeping.CHECKPOINT_SECONDS_LEAST", 0)
    limits = {"local_bytes": 4 * 64 * 1024, "checkpoint_bytes": 1 << 30}
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path, **limits)
    housekeeping, log = store.engine.housekeeping, store.engine.log
    for round_number in range(60):
        await append(store, messages([b"%d" % round_number + b"x" * 9000]))
        store.engine.seal_source.tiered(1, round_number + 1)
        if at_the_end and round_number == 5:
            await housekeeping.checkpoint()
    if at_the_end:
        store.engine.writer.mark()
        await housekeeping.checkpoint()
    async with asyncio.timeout(10):
        while len(log.segments) * 64 * 1024 > limits["local_bytes"] or housekeeping._checkpoint_wake.is_set():
            await store.engine.retention.free(housekeeping)
            await asyncio.sleep(0.01)
    tail = log.tail
    await store.engine.retention.free(housekeeping)
    assert (housekeeping._checkpoint_wake.is_set(), log.tail) == (False, tail)
    await store.close()


async def test_retention_of_a_topic(tmp_path: Path) -> None:
    """By size: what is behind the size goes. A topic that is gone from the metadata meanwhile holds up no other."""
    metadata = StoreMetadata()
    store = await open_store(MemoryDisk(), metadata, tmp_path)
    gone = QueueRef(1, 2, 7, 0)
    await append(store, msgspec.structs.replace(messages([b"gone"]), queue=gone))
    for _ in range(10):
        await append(store, messages([b"x" * 1000]))
    metadata.settings[1] = TopicSettings(queues=1, retention_bytes=3500)
    await store.engine.retention.trim()
    ends = await store.queues([1, 7])
    assert [end.start_offset for end in ends] == [7, 0]
    await store.close()


async def test_a_damaged_queue_does_not_hold_up_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own start stays where it is; the others' advance."""
    metadata = StoreMetadata()
    metadata.settings[1] = TopicSettings(queues=2, retention_ms=1)
    store = await open_store(MemoryDisk(), metadata, tmp_path)
    await append(store, messages([b"a"]), messages([b"b"], number=1))
    reads, real = store.engine.reads, store.engine.reads.offsets_at

    async def offsets_at(request: TimeRequest) -> TimeResult:
        if request.queue_ids == [1]:
            raise reads.missing(1, 0)
        return await real(TimeRequest(request.queue_ids, request.ts + 60_000))

    monkeypatch.setattr(reads, "offsets_at", offsets_at)
    await store.engine.retention.trim()
    assert [end.start_offset for end in await store.queues([1, 2])] == [0, 1]
    await store.close()


async def test_a_few_unsealed_messages_do_not_pin_a_segment(tmp_path: Path) -> None:
    """What is not tiered of an old segment is appended again, unchanged: same offset, same timestamp, also after a
    restart."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    config = {"local_bytes": 4 * 64 * 1024, "checkpoint_bytes": 32 * 1024}
    store = await open_store(disk, metadata, tmp_path, **config)
    await append(store, messages([b"small and slow"], number=1))
    stamp = (await store.read(ReadRequest(2, 0, 1, 1000))).frames[0].store_ts
    for round_number in range(60):
        await append(store, messages([b"%d" % round_number + b"x" * 9000]))
        store.engine.seal_source.tiered(1, round_number + 1)
        if round_number % 8 == 7:
            await store.engine.housekeeping.checkpoint()
            await store.engine.retention.free(store.engine.housekeeping)
    assert store.engine.log.first_position > 0
    assert await texts(store, number=1) == [b"small and slow"]
    await store.close()
    store = await open_store(disk, metadata, tmp_path, **config)
    result = await store.read(ReadRequest(2, 0, 1, 1000))
    assert [bodies_of(frame) for frame in result.frames] == [[b"small and slow"]]
    assert result.frames[0].store_ts == stamp
    assert (await append(store, messages([b"next"], number=1))).outcomes[0].first_offset == 1
    await store.close()


@pytest.mark.parametrize("full", [False, True])
async def test_no_room_to_copy_unsealed_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """A round of retention ends all the same, and the next one goes on; on a full disk, which nothing else would give
    room, the messages are sealed instead."""
    config = {"local_bytes": 2 * 64 * 1024, "checkpoint_bytes": 8192}
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path, **config)
    housekeeping, retention = store.engine.housekeeping, store.engine.retention
    await append(store, messages([b"small and slow"], number=1))
    for number in range(30):
        await append(store, messages([b"x" * 9000]))
        store.engine.seal_source.tiered(1, number + 1)
    for _ in range(2):
        store.engine.writer.mark(again=True)
        await housekeeping.checkpoint()
    await housekeeping.write_indexes()
    assert retention.wanted() is not None
    sealed: list[int] = []

    async def seal(topic_id: int) -> None:
        sealed.append(topic_id)
        store.engine.seal_source.tiered(2, 1)

    with monkeypatch.context() as patch:
        patch.setattr(store.engine.tail, "has_room", lambda _: False)
        patch.setattr(Housekeeping, "disk_full", property(lambda _: full, lambda *_: None), raising=False)
        patch.setattr(retention, "_seal", seal)
        async with asyncio.timeout(10):
            await retention.free(housekeeping)
    assert sealed == [1] * full
    assert (store.engine.log.first_position > 0) == full
    await retention.free(housekeeping)
    assert store.engine.log.first_position > 0
    await store.close()


async def test_what_shared_a_segment_with_copied_messages_is_in_the_tier(tmp_path: Path) -> None:
    """Of a recycled segment, what was tiered is no longer local, though something else in it was copied."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path, local_bytes=4 * 64 * 1024, checkpoint_bytes=8192)
    await append(store, messages([b"never sealed"], number=1))
    count = 0
    while store.engine.log.first_position == 0:
        await append(store, messages([b"%d" % count + b"x" * 9000]))
        count += 1
        store.engine.seal_source.tiered(1, count)
        await store.engine.housekeeping.checkpoint()
        await store.engine.retention.free(store.engine.housekeeping)
    with pytest.raises(BelowLocal) as cold:
        await store.read(ReadRequest(1, 0, 10, 1 << 20))
    local = cold.value.extra["first_local_offset"]
    assert 0 < local == (await store.queues([1]))[0].local_offset
    assert len(await texts(store, local)) == count - local
    await store.close()
