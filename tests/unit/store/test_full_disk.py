"""A full disk: what is refused, what goes on, and that room brings it all back."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, messages, open_store, queue, texts

from millpond.core.errors import DiskFull
from millpond.metadata.client import TopicSettings
from millpond.store.client import (
    GroupRef,
    LagRequest,
    QueueRef,
    ReceiveRequest,
    SeekRequest,
)
from millpond.store.commitlog import Segment
from millpond.store.fold import operations as ops
from millpond.store.local import LocalStore


async def test_a_full_disk_refuses_messages_and_takes_acks(tmp_path: Path) -> None:
    """507 once the open segment is full; receive and settle go on; room brings produce back; nothing is lost."""
    disk = MemoryDisk(capacity=3 * 64 * 1024)
    store = await open_store(disk, StoreMetadata(), tmp_path)
    kept = await fill(store)
    group = GroupRef(1, 1, 5)
    result = await store.receive(ReceiveRequest(group, [queue()], "earliest", 10, 1 << 20, 30_000))
    assert len(result.grants) == 1
    disk.capacity = 1 << 30
    assert await texts(store) == kept
    for _ in range(100):
        if (await append(store, messages([b"again"]))).outcomes[0].error is None:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("produce did not come back")
    await store.close()


async def fill(store: LocalStore) -> list[bytes]:
    """Messages until the disk is full; those that were taken."""
    kept: list[bytes] = []
    for number in range(200):
        body = b"%d:" % number + b"x" * 2000
        outcome = (await append(store, messages([body]))).outcomes[0]
        if outcome.error is not None:
            assert outcome.error.code == "disk_full"
            return kept
        kept.append(body)
    pytest.fail("the disk is never full")


async def test_not_even_room_for_state(tmp_path: Path) -> None:
    """Once what is kept back for state is used up as well, whatever would need more of it is refused as disk_full,
    nothing of it is done, and room brings it all back; also for a start."""
    disk, metadata = MemoryDisk(capacity=3 * 64 * 1024), StoreMetadata()
    metadata.settings[1] = TopicSettings(queues=2, retention_bytes=1)
    store = await open_store(disk, metadata, tmp_path)
    await append(store, msgspec.structs.replace(messages([b"other"]), queue=QueueRef(1, 2, 7, 0)))
    kept = await fill(store)
    for operation in (ops.QueueTrim(1, 0), ops.QueueDrop(99)):  # a short one, and the shortest
        with pytest.raises(DiskFull):
            while True:
                store.engine.tail.operation(operation)
    group = GroupRef(1, 1, 5)
    receive = ReceiveRequest(group, [queue(), queue(1)], "latest", 10, 1 << 20, 30_000)
    refused: list[Callable[[], Awaitable[object]]] = [
        lambda: store.receive(receive),
        lambda: store.seek(SeekRequest(group, [queue(), queue(1)], [1, 0], "one", dry_run=False)),
        lambda: store.delete_topic(2),
        store.engine.retention.trim,
    ]
    for call in refused:
        with pytest.raises(DiskFull):
            await call()
    assert not (await store.lag(LagRequest(group, [queue()], "latest"))).queues[0].exists
    assert await texts(store) == kept
    disk.capacity = 1 << 30
    while store.engine.housekeeping.disk_full:
        await store.engine.housekeeping.segment_ready()
    await store.receive(receive)
    lags = (await store.lag(LagRequest(group, [queue(), queue(1)], "latest"))).queues
    assert [(lag.exists, lag.committed) for lag in lags] == [(True, len(kept)), (True, 0)]
    await store.delete_topic(2)
    await store.close()
    store = await open_store(disk, metadata, tmp_path)
    assert await texts(store) == kept
    assert store.engine.quarantined == []
    await store.close()


async def test_who_waits_for_a_segment_hears_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and as disk_full: it is found to be full while an append waits already."""
    monkeypatch.setattr("millpond.store.append.UNFLUSHED_WAIT_MS", 60_000)
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    waited_for = threading.Event()

    def full(_zeroed: bool, *, hurry: Callable[[], bool]) -> Segment:
        assert waited_for.wait(30)
        assert hurry()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(store.engine.log, "allocate_segment", full)
    ready = store.engine.housekeeping.segment_ready

    async def segment_ready() -> None:
        waiting = asyncio.create_task(ready())
        await asyncio.sleep(0)
        waited_for.set()
        await waiting

    monkeypatch.setattr(store.engine.housekeeping, "segment_ready", segment_ready)
    codes = set()
    async with asyncio.timeout(30):
        while not codes:
            outcome = (await append(store, messages([b"x" * 2_000]))).outcomes[0]
            codes |= {outcome.error.code} if outcome.error is not None else set()
    assert codes == {"disk_full"}
    monkeypatch.undo()
    await store.close()
