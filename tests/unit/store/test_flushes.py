"""Who reads much of the disk knows when somebody waits for a flush."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, bodies_of, messages, open_store, queue

from millpond.store.client import AppendRequest, GroupRef, ReceiveRequest
from millpond.store.flushes import Flushes
from millpond.store.local import LocalStore


class WatchedDisk(MemoryDisk):
    """Asks before each sync whether it is announced, and waits for `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes: Flushes | None = None
        self.announced: list[bool] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def before_sync(self) -> None:
        assert self.go_on.wait(30)
        if self.flushes is not None:
            self.announced.append(not self.flushes._none.is_set())
        super().before_sync()


@pytest.fixture(name="disk")
def _disk() -> WatchedDisk:
    return WatchedDisk()


@pytest.fixture(name="store")
async def _store(disk: WatchedDisk, tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await open_store(disk, StoreMetadata(), tmp_path)
    yield store
    await store.close()


async def test_a_wait_is_remembered_for_a_while() -> None:
    """Nobody has waited before the first does."""
    flushes = Flushes()
    assert not flushes.lately()
    flushes.awaited()
    assert flushes.lately()


async def test_a_reader_stands_back_until_the_flush_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on when the flush in flight has ended, and at once when there is none."""
    monkeypatch.setattr("millpond.store.flushes.STAND_BACK_SECONDS", 60)
    flushes = Flushes()
    flushes.stand_back()
    flushes.begin()
    reading = threading.Thread(target=flushes.stand_back)
    reading.start()
    assert reading.is_alive()
    flushes.end()
    await asyncio.to_thread(reading.join, 5)
    assert not reading.is_alive()


def test_a_flush_that_does_not_end_stops_no_reader() -> None:
    """After a moment the reader goes on all the same."""
    flushes = Flushes()
    flushes.begin()
    flushes.stand_back()


async def test_a_produce_that_waits_is_known(store: LocalStore) -> None:
    """Its topic's durability is `flush`."""
    flushes = store.engine.writer.awaiting
    flushes._awaited_at = float("-inf")  # the start waited for one, too
    await append(store, messages([b"a"], durability="memory"))
    assert not flushes.lately()
    await append(store, messages([b"b"]))
    assert flushes.lately()


async def test_each_flush_is_announced(store: LocalStore, disk: WatchedDisk) -> None:
    """Readers stand back while the disk syncs the log, and not afterwards."""
    disk.flushes = store.engine.writer.awaiting
    await append(store, messages([b"a"]))
    assert disk.announced
    assert all(disk.announced)
    assert disk.flushes._none.is_set()
    disk.flushes = None


async def test_a_flush_that_failed_has_ended(store: LocalStore, disk: WatchedDisk) -> None:
    """A store that has stopped holds no reader up."""
    disk.fail_syncs_after = 0
    with pytest.raises(Exception, match="stopped"):
        await append(store, messages([b"a"]))
    assert store.engine.writer.awaiting._none.is_set()


async def test_producers_make_readers_give_way_and_acks_do_not(store: LocalStore) -> None:
    """Who drains a backlog acks all the time: it would slow itself down."""
    await store.engine.writer.flushed(store.engine.log.tail)
    store.engine.tail.open_queue(queue(7), 0)
    store.engine.writer.wake()
    await store.engine.delivery_log.state_flushed()
    assert not store.engine.writer.awaiting.lately()
    await append(store, messages([b"x"]))
    assert store.engine.writer.awaiting.lately()


async def test_a_disk_that_is_behind_holds_messages_back(
    store: LocalStore, disk: WatchedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is unflushed is bounded: the next append waits for a flush, and is refused whole when none comes in time."""
    monkeypatch.setattr("millpond.store.writer.UNFLUSHED_BYTES", 1_000)
    await store.engine.writer.flushed(store.engine.log.tail)
    disk.go_on.clear()
    await append(store, messages([b"x" * 2_000], durability="memory"))
    with monkeypatch.context() as patch:
        patch.setattr("millpond.store.append.UNFLUSHED_WAIT_MS", 10)
        refused = (await append(store, messages([b"refused"], durability="memory"))).outcomes[0]
    assert refused.error is not None and refused.error.code == "flush_behind"
    waiting = asyncio.create_task(append(store, messages([b"waits"], durability="memory")))
    disk.go_on.set()
    assert (await waiting).outcomes[0].first_offset == 1


async def test_appends_of_one_call_wait_together(
    store: LocalStore, disk: WatchedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another they would outlast the call, and nobody would know what became of them."""
    monkeypatch.setattr("millpond.store.writer.UNFLUSHED_BYTES", 1_000)
    monkeypatch.setattr("millpond.store.append.UNFLUSHED_WAIT_MS", 100)
    await store.engine.writer.flushed(store.engine.log.tail)
    disk.go_on.clear()
    await append(store, messages([b"x" * 2_000], durability="memory"))
    many = [messages([b"refused"], number=number, durability="memory") for number in range(50)]
    outcomes = (await store.append(AppendRequest(many, 2_000))).outcomes
    assert [outcome.error.code for outcome in outcomes if outcome.error is not None] == ["flush_behind"] * 50
    disk.go_on.set()


async def test_a_receive_is_served_during_the_flush_and_shown_behind_it(store: LocalStore, disk: WatchedDisk) -> None:
    """The lease stands in the log while the disk is still at work; the message is given when it is done."""
    receive = ReceiveRequest(GroupRef(1, 1, 5), [queue()], "earliest", 10, 1 << 20, 30_000, wait_ms=30_000)
    waiting = asyncio.create_task(store.receive(receive))
    await _until(lambda: store.engine.delivery.waiting == 1 and store.engine.log.flushed == store.engine.log.tail)
    [cursor] = store.engine.fold.cursors.by_key.values()
    disk.go_on.clear()
    appending = asyncio.create_task(append(store, messages([b"a"])))
    await _until(lambda: cursor.in_flight == 1 and store.engine.log.written == store.engine.log.tail)
    await asyncio.sleep(0)
    assert (waiting.done(), appending.done(), (await store.queues([1]))[0].end_offset) == (False, False, 0)
    disk.go_on.set()
    [frame] = (await waiting).grants[0].frames
    assert bodies_of(frame) == [b"a"]
    await appending


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)
