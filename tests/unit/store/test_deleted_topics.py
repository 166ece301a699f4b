"""Topics and groups that are deleted while they are used, or while the store is away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from support.deliveries import turns
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, messages, open_store, queue

from millpond.core.errors import NotFound
from millpond.metadata.client import TopicSettings
from millpond.store.client import (
    GroupRef,
    QueueRef,
    ReceiveRequest,
    SeekRequest,
)
from millpond.store.identity import DirectoryRefused


async def test_a_deleted_topic_does_not_come_back(tmp_path: Path) -> None:
    """Who has not heard of it yet opens none of its queues again: by a message, a receive, or a seek."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    await append(store, messages([b"a"]), messages([b"b"], number=1))
    await store.delete_topic(1)
    outcomes = (await append(store, messages([b"late"]), messages([b"late"], number=2))).outcomes
    assert [outcome.error and outcome.error.code for outcome in outcomes] == ["topic_not_found"] * 2
    group = GroupRef(1, 1, 5)
    with pytest.raises(NotFound):
        await store.receive(ReceiveRequest(group, [queue()], "earliest", 10, 1 << 20, 30_000))
    with pytest.raises(NotFound):
        await store.seek(SeekRequest(group, [queue()], [0], "one", dry_run=False))
    assert list(store.engine.fold.queues) == []
    await store.close()


async def test_nothing_is_left_of_a_deleted_topic(tmp_path: Path) -> None:
    """Receives that wait are told at once, and neither the group nor what its topic has gathered is kept."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    other, group = QueueRef(1, 2, 7, 0), GroupRef(1, 1, 5)
    await append(store, messages([b"a"]), msgspec.structs.replace(messages([b"b"]), queue=other))
    request = ReceiveRequest(group, [queue()], "latest", 10, 1 << 20, 30_000, wait_ms=30_000)
    kept = ReceiveRequest(GroupRef(1, 2, 6), [other], "latest", 10, 1 << 20, 30_000)
    await store.receive(kept)
    async with asyncio.timeout(10):
        waiting = asyncio.create_task(store.receive(request))
        await turns()
        assert store.engine.delivery.waiting == 1
        await store.delete_topic(1)
        with pytest.raises(NotFound) as error:
            await waiting
    assert error.value.code == "topic_not_found"
    assert [each.ref.group_id for each in store.engine.delivery._groups] == [6]
    assert list(store.engine.seal_source._gathered) == [2]
    await store.close()


async def test_no_more_deleted_topics_are_remembered_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was deleted first is forgotten first."""
    monkeypatch.setattr("millpond.store.tail.DROPPED_TOPICS", 1)
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    for topic_id in (1, 2):
        await store.delete_topic(topic_id)
    other = msgspec.structs.replace(messages([b"a"]), queue=QueueRef(1, 2, 7, 0))
    outcomes = (await append(store, messages([b"a"]), other)).outcomes
    assert [outcome.error is None for outcome in outcomes] == [True, False]
    await store.close()


async def test_topics_that_were_deleted_while_the_store_was_away(tmp_path: Path) -> None:
    """A round of retention drops them. A late message in a queue that the tier has more of does not keep the store from
    starting; in a queue of a living topic, or of one that metadata never had, that is an older copy of the log."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    store = await open_store(disk, metadata, tmp_path)
    await append(store, messages([b"late"]), msgspec.structs.replace(messages([b"b"]), queue=QueueRef(1, 2, 7, 0)))
    metadata.settings = {2: None}
    await store.engine.retention.trim()
    assert [each.ref.topic_id for each in store.engine.fold.queues] == [1]
    await store.close()
    metadata.tiered = {1: 900}
    for settings in ({}, {1: TopicSettings(queues=1)}):
        metadata.settings = settings
        with pytest.raises(DirectoryRefused, match="older copy"):
            await open_store(disk, metadata, tmp_path)
    metadata.settings = {1: None}
    store = await open_store(disk, metadata, tmp_path)
    assert list(store.engine.fold.queues) == []
    await store.close()


async def test_groups_that_were_deleted_while_the_store_was_away(tmp_path: Path) -> None:
    """A round of retention drops them, for good, and whoever waits is told; no other, nor one of a topic that metadata
    never had."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    store = await open_store(disk, metadata, tmp_path)
    foreign = QueueRef(1, 2, 7, 0)
    await append(store, messages([b"a"]), msgspec.structs.replace(messages([b"b"]), queue=foreign))
    asked = ReceiveRequest(GroupRef(1, 1, 5), [queue()], "latest", 10, 1 << 20, 30_000)
    kept = msgspec.structs.replace(asked, group=GroupRef(1, 1, 6))
    of_foreign = ReceiveRequest(GroupRef(1, 2, 8), [foreign], "latest", 10, 1 << 20, 30_000)
    for request in (asked, kept, of_foreign):
        await store.receive(request)
    metadata.settings = {1: TopicSettings(queues=1)}
    metadata.deleted_groups = {5, 8}
    async with asyncio.timeout(10):
        waiting = asyncio.create_task(store.receive(msgspec.structs.replace(asked, wait_ms=30_000)))
        await turns()
        assert store.engine.delivery.waiting == 1
        await store.engine.retention.trim()
        with pytest.raises(NotFound) as error:
            await waiting
    assert error.value.code == "group_not_found"
    for _ in range(2):
        assert sorted(group.group_id for group in store.engine.delivery.groups()) == [6, 8]
        await store.close()
        store = await open_store(disk, metadata, tmp_path)
    await store.close()
