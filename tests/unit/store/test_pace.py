"""When a message of a `memory` topic is shown: its flush is put off only while nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, bodies_of, messages, open_store, queue

from millpond.store.client import GroupRef, ReadRequest, ReceiveRequest
from millpond.store.local import LocalStore

READ = ReadRequest(1, 0, 10, 1 << 20, wait_ms=5_000)
RECEIVE = ReceiveRequest(GroupRef(1, 1, 5), [queue()], "earliest", 10, 1 << 20, 30_000, wait_ms=5_000)


@pytest.fixture(name="store")
async def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalStore]:
    """Puts flushes off for longer than any test takes."""
    monkeypatch.setattr("millpond.store.writer.PACE_SECONDS", 600)
    monkeypatch.setattr("millpond.store.writer.STATE_PACE_SECONDS", 600)
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    yield store
    await store.close()


async def _confirmed(store: LocalStore) -> int:
    return (await store.queues([1]))[0].end_offset


async def _until_confirmed(store: LocalStore, end_offset: int) -> None:
    async with asyncio.timeout(3):
        while await _confirmed(store) < end_offset:  # noqa: ASYNC110 - there is no event that would not itself end the wait
            await asyncio.sleep(0.01)


async def test_a_flush_that_nobody_awaits_is_put_off(store: LocalStore) -> None:
    """The producer of a `memory` topic has its answer, and the message is not shown yet."""
    await append(store, messages([b"a"], durability="memory"))
    await asyncio.sleep(0.05)
    assert await _confirmed(store) == 0


async def test_a_producer_that_awaits_it_ends_the_wait(store: LocalStore) -> None:
    """A `flush` append confirms what stands before it, too."""
    await append(store, messages([b"a"], durability="memory"))
    await append(store, messages([b"b"]))
    assert await _confirmed(store) == 2


async def test_a_reader_at_the_end_is_shown_at_once(store: LocalStore) -> None:
    """A read that waits already has the message without the pause."""
    await append(store, messages([b"first"]))
    waiting = asyncio.create_task(store.read(ReadRequest(1, 1, 10, 1 << 20, wait_ms=5_000)))
    await asyncio.sleep(0)
    await append(store, messages([b"a"], durability="memory"))
    async with asyncio.timeout(3):
        assert (await waiting).next_offset == 2


async def test_a_reader_that_comes_later_ends_the_wait(store: LocalStore) -> None:
    """A read that begins to wait after the append has the message without the pause."""
    await append(store, messages([b"a"], durability="memory"))
    async with asyncio.timeout(3):
        assert (await store.read(READ)).next_offset == 1


@pytest.mark.parametrize("before", [True, False])
async def test_a_receive_is_served_at_once(store: LocalStore, before: bool) -> None:
    """A long poll of a group has the message without the pause, whichever came first."""
    first = append(store, messages([b"a"], durability="memory"))
    if before:
        waiting = asyncio.create_task(store.receive(RECEIVE))
        await asyncio.sleep(0.05)
        await first
    else:
        await first
        waiting = asyncio.create_task(store.receive(RECEIVE))
    async with asyncio.timeout(3):
        assert [bodies_of(frame) for grant in (await waiting).grants for frame in grant.frames] == [[b"a"]]


async def test_a_consumer_that_has_waited_is_expected_back(store: LocalStore) -> None:
    """Between two receives of a consumer at the end, messages are confirmed at once: the next one finds them."""
    waiting = asyncio.create_task(store.receive(RECEIVE))
    await asyncio.sleep(0.05)
    await append(store, messages([b"a"], durability="memory"))
    await waiting
    await append(store, messages([b"b"], durability="memory"))
    await _until_confirmed(store, 2)


async def test_a_receive_that_waits_hurries_no_state(store: LocalStore) -> None:
    """What was granted to the one before it is flushed with the next message: nobody waits for it."""
    await append(store, messages([b"a"]))
    await store.receive(RECEIVE)
    flushes = (await store.status()).counters["flushes_total"]
    waiting = asyncio.create_task(store.receive(RECEIVE))
    await asyncio.sleep(0.05)
    assert (await store.status()).counters["flushes_total"] == flushes
    await append(store, messages([b"b"]))
    assert [bodies_of(frame) for grant in (await waiting).grants for frame in grant.frames] == [[b"b"]]


async def test_state_alone_is_put_off_for_longer(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a `memory` topic are flushed by themselves soon; what is granted of them is not."""
    monkeypatch.setattr("millpond.store.writer.PACE_SECONDS", 0)
    await append(store, messages([b"a"], durability="memory"))
    await _until_confirmed(store, 1)
    flushes = (await store.status()).counters["flushes_total"]
    assert (await store.receive(RECEIVE)).grants
    await asyncio.sleep(0.05)
    assert (await store.status()).counters["flushes_total"] == flushes
