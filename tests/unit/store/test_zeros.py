"""Blocks behind the tail are zeroed beforehand, and never a byte that was appended."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.disks import MemoryDisk, MemoryFile
from support.stores import StoreMetadata, append, bodies_of, messages, open_store

from millpond.core.limits import KIB, MIB
from millpond.store import housekeeping
from millpond.store.client import ReadRequest
from millpond.store.commitlog import Blank, Segment, segment_name
from millpond.store.local import LocalStore

SEGMENT = MIB
STEP = SEGMENT // 8


class Zeroed(MemoryFile):
    """Notes what is zeroed, and zeroes when it may."""

    def zero(self, position: int, length: int) -> None:
        disk = self._disk
        assert isinstance(disk, ZeroDisk)
        disk.begun.set()
        assert disk.may.wait(10)
        disk.zeroed.append((self.inode, position, length))
        super().zero(position, length)


class ZeroDisk(MemoryDisk):
    """A disk whose zeroing the test holds up."""

    def __init__(self) -> None:
        super().__init__()
        self.zeroed: list[tuple[int, int, int]] = []
        self.may, self.begun = threading.Event(), threading.Event()
        self.may.set()

    def open(self, name: str, *, create: bool = False) -> MemoryFile:
        return Zeroed(self, super().open(name, create=create).inode)


@pytest.fixture
def disk() -> ZeroDisk:
    return ZeroDisk()


@pytest.fixture
def metadata() -> StoreMetadata:
    return StoreMetadata()


@pytest.fixture
async def store(
    disk: ZeroDisk, metadata: StoreMetadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LocalStore]:
    """In its second segment, which is only reserved; nothing zeroes it but the test."""
    monkeypatch.setattr(housekeeping, "CALM_SECONDS", 3_600.0)
    monkeypatch.setattr(housekeeping, "CALM_BYTES_PER_SECOND", 0)  # however slow the machine: no calm segment
    store = await open_store(disk, metadata, tmp_path, segment_bytes=SEGMENT)
    while store.engine.log.tail < SEGMENT:
        await append(store, messages([b"x" * 60 * KIB]))
    yield store
    if store.engine.log.segments:
        await store.close()


async def append_in_turn(store: LocalStore) -> None:
    """Like a client's append: whatever the answer, other tasks run before the next. One refused is answered at once."""
    await append(store, messages([b"x" * 60 * KIB]))
    await asyncio.sleep(0)


def blank_of(store: LocalStore) -> Blank:
    blank = store.engine.log.next_blank()
    assert blank is not None
    return blank


async def zero(store: LocalStore, blank: Blank) -> None:
    await store.engine.writer.zero(blank, store.engine.housekeeping._threads)


async def bodies(store: LocalStore) -> list[bytes]:
    found: list[bytes] = []
    while True:
        result = await store.read(ReadRequest(1, len(found), 1_000, 8 * MIB))
        if not result.frames:
            return found
        found += [body for frame in result.frames for body in bodies_of(frame)]


async def test_what_reaches_blocks_that_are_being_zeroed_waits(
    store: LocalStore, disk: ZeroDisk, metadata: StoreMetadata, tmp_path: Path
) -> None:
    """It is written behind the zeros, also when the append came first; all of it is there after a restart."""
    before = len(await bodies(store))
    disk.may.clear()
    zeroing = asyncio.ensure_future(zero(store, blank_of(store)))
    await asyncio.to_thread(disk.begun.wait, 10)
    large = b"y" * (2 * STEP)
    appended = asyncio.ensure_future(append(store, messages([large])))
    _, pending = await asyncio.wait({appended}, timeout=0.05)
    assert pending, "it stands where zeros are being written"
    disk.may.set()
    await zeroing
    await appended
    await store.close()
    again = await open_store(disk, metadata, tmp_path, segment_bytes=SEGMENT)
    assert (await bodies(again))[before:] == [large]
    await again.close()


async def test_what_stands_before_them_does_not_wait(store: LocalStore, disk: ZeroDisk) -> None:
    """A few messages are written and flushed meanwhile."""
    disk.may.clear()
    zeroing = asyncio.ensure_future(zero(store, blank_of(store)))
    await asyncio.to_thread(disk.begun.wait, 10)
    async with asyncio.timeout(5):
        await append(store, messages([b"z"]))
    assert not zeroing.done()
    disk.may.set()
    await zeroing


async def test_nobody_writes_there_after_a_cancel(store: LocalStore, disk: ZeroDisk) -> None:
    """The thread goes on, so the writer stays out until it has ended."""
    disk.may.clear()
    zeroing = asyncio.ensure_future(zero(store, blank_of(store)))
    await asyncio.to_thread(disk.begun.wait, 10)
    zeroing.cancel()
    appended = asyncio.ensure_future(append(store, messages([b"y" * (2 * STEP)])))
    _, pending = await asyncio.wait({appended}, timeout=0.05)
    assert pending
    disk.may.set()
    await appended


async def test_messages_of_any_size_beside_zeroing(
    store: LocalStore, disk: ZeroDisk, metadata: StoreMetadata, tmp_path: Path
) -> None:
    """Whatever the order, a restart finds every message that was acknowledged."""
    sent = await bodies(store)
    chance = random.Random(7)  # noqa: S311
    zeroings = 0
    for number in range(120):
        body = bytes([number]) * chance.choice([1, 700, 5_000, 40_000, 100_000])
        appended = asyncio.ensure_future(append(store, messages([body])))
        blank = store.engine.log.next_blank() if chance.random() < 0.7 else None
        if blank is not None:
            zeroings += 1
            await zero(store, blank)
        await appended
        sent.append(body)
    assert zeroings > 20
    assert await bodies(store) == sent
    await store.close()
    again = await open_store(disk, metadata, tmp_path, segment_bytes=SEGMENT)
    assert await bodies(again) == sent
    await again.close()


async def test_each_block_is_zeroed_once_some_way_behind_the_tail(store: LocalStore, disk: ZeroDisk) -> None:
    """One step after the other, and none more once there are enough."""
    log = store.engine.log
    ends = [log.tail]
    while (blank := log.next_blank()) is not None:
        assert ends[-1] <= blank.start
        assert blank.start % 4_096 == 0
        await zero(store, blank)
        ends.append(blank.start + blank.length)
    assert STEP <= log.zeroed - log.tail <= 2 * STEP + STEP // 8
    assert not log.lacks_zeros


async def test_recycled_segments_and_the_first_are_not_zeroed(disk: ZeroDisk, tmp_path: Path) -> None:
    """Their blocks were written to before; unless a burst is to be written to a recycled one."""
    store = await open_store(disk, StoreMetadata(), tmp_path, segment_bytes=SEGMENT)
    log = store.engine.log
    assert log.next_blank() is None
    assert not log.lacks_zeros, "nobody looks again before its end is near"
    old = log.allocate_segment(written=False)
    assert old.reserved
    assert not log.recycle_segment(old).reserved
    assert log.recycle_segment(log.allocate_segment(), written=False).reserved
    await store.close()


def recycle(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> MemoryFile:
    """From now on the first segment, and no other, may go once it is closed, needed or not: its file."""
    log, directory = store.engine.log, store.engine.tail.directory
    first = log.segments[0]

    def oldest() -> Segment | None:
        return first if log.segments[0] is first and directory.is_closed(first.base) else None

    monkeypatch.setattr(store.engine.housekeeping, "_recyclable", oldest)
    assert isinstance(first.file, MemoryFile)
    return first.file


@pytest.mark.parametrize("calm", [False, True], ids=["burst", "calm"])
async def test_a_burst_has_recycled_segments_made_unwritten(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, calm: bool
) -> None:
    """Large writes to written blocks leave their pages in memory; after a calm segment short flushes matter more."""
    if calm:
        monkeypatch.setattr(housekeeping, "CALM_BYTES_PER_SECOND", 1 << 60)
    file, log = recycle(store, monkeypatch), store.engine.log
    async with asyncio.timeout(10):
        while not (again := [segment for segment in log.segments[1:] if segment.file is file]):
            await append_in_turn(store)
    assert [segment.reserved for segment in again] == [not calm]


@pytest.mark.parametrize("burst", [False, True])
async def test_a_burst_ends_the_zeroing_of_the_next_segment(
    disk: ZeroDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, burst: bool
) -> None:
    """Else whoever needs that segment would wait for all of its zeros. What is left of them is the burst's rest."""
    monkeypatch.setattr(housekeeping, "CALM_BYTES_PER_SECOND", 1 << 60)
    begun, may = threading.Event(), threading.Event()
    allocate = MemoryFile.allocate

    def held(self: MemoryFile, length: int, written: bool, *, hurry: Callable[[], bool] | None = None) -> bool:
        allocate(self, length, written)
        if hurry is None:
            return written
        begun.set()
        assert may.wait(10)
        return not hurry()

    monkeypatch.setattr(MemoryFile, "allocate", held)
    segment_bytes = 32 * MIB  # so that more than a quarter of it is for messages when three are full
    store = await open_store(disk, StoreMetadata(), tmp_path, segment_bytes=segment_bytes)
    log = store.engine.log
    while log.tail < (3 if burst else 2) * segment_bytes // 4:
        await append(store, messages([b"x" * MIB]))
    assert await asyncio.to_thread(begun.wait, 10)
    may.set()
    async with asyncio.timeout(10):
        while not log.has_spare:  # noqa: ASYNC110  # nothing tells, and to ask would be a hurry
            await asyncio.sleep(0)
    assert log.segments[-1].reserved == burst
    await store.close()


async def test_a_segment_that_cannot_be_made_again_is_given_up(
    store: LocalStore, disk: ZeroDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may give blocks back first and then have no room: the disk is full until there is some again."""
    file, log = recycle(store, monkeypatch), store.engine.log

    def no_room() -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file, "unwrite", no_room)
    async with asyncio.timeout(10):
        while log.tail < 4 * SEGMENT:
            await append_in_turn(store)
    assert (log.segments[0].base, store.engine.housekeeping.disk_full) == (SEGMENT, False)
    files = [f"log/{name}" for name in disk.names("log") if name.endswith(".seg")]
    assert files == [segment_name(segment.base) for segment in log.segments]
    inodes = [segment.file.inode for segment in log.segments if isinstance(segment.file, MemoryFile)]
    assert inodes and file.inode not in inodes, "the room that it still takes is given back"


async def test_a_store_at_rest_zeroes_what_comes_next(
    disk: ZeroDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once little is appended, by itself; and nothing while it is much."""
    monkeypatch.setattr(housekeeping, "CALM_SECONDS", 0.01)
    monkeypatch.setattr(housekeeping, "CALM_BYTES_PER_SECOND", -1)
    store = await open_store(disk, StoreMetadata(), tmp_path, segment_bytes=SEGMENT)
    while store.engine.log.tail < SEGMENT:
        await append(store, messages([b"x" * 60 * KIB]))
    assert not await asyncio.to_thread(disk.begun.wait, 0.2)
    monkeypatch.setattr(housekeeping, "CALM_BYTES_PER_SECOND", 32 * MIB)
    await append(store, messages([b"x"]))
    await asyncio.to_thread(disk.begun.wait, 10)
    await store.close()
    assert disk.zeroed
