"""Frames that are read before they are asked for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, bodies_of, messages, open_store, queue

from millpond.core.errors import Internal
from millpond.core.limits import AHEAD_LEAST_BYTES, MIB
from millpond.core.tasks import Tasks
from millpond.store.ahead import FramesAhead
from millpond.store.client import GroupRef, ReadRequest, ReceiveRequest, StoredFrame
from millpond.store.flushes import Flushes
from millpond.store.local import LocalStore
from millpond.store.reader import Extent, FrameReader
from millpond.store.recent import Recent

ROWS = 1_024
BODY = b"x" * (AHEAD_LEAST_BYTES // ROWS)  # a frame of ROWS is large enough
FRAMES = 12


class CountingReader(FrameReader):
    """Says which positions it has read from the disk, and reads when it may."""

    def __init__(self, store: LocalStore) -> None:
        self.recent = Recent(64 * MIB)  # nothing is in it unless a test puts it there
        super().__init__(store.engine.log, self.recent, lambda position, end: None, Flushes())
        self.loaded: list[int] = []
        self.may = threading.Event()
        self.may.set()

    def _load(self, extents: list[Extent], gently: bool) -> list[StoredFrame]:
        self.may.wait(10)
        self.loaded += [spot.position for extent in extents for spot in extent.spots]
        return super()._load(extents, gently)


class Ahead(FramesAhead):
    """One over a store's queue 1, with tasks of its own."""

    def __init__(self, store: LocalStore) -> None:
        self.reader = CountingReader(store)
        self.flushes = Flushes()
        self.died: list[str] = []
        self.directory = store.engine.directory
        super().__init__(store.engine.fold.queues, self.directory, self.reader, self.flushes)
        self._tasks = self.own = Tasks(lambda name, error: self.died.append(name))

    async def rows(self, first: int, end: int) -> list[StoredFrame]:
        """What stands at [first, end), whatever is read ahead then."""
        return await self.frames(1, await self.directory.spots(1, first, end - first))

    async def frame(self, number: int) -> StoredFrame:
        """The `number`-th frame; returns when nothing is being read any more."""
        [frame] = await self.rows(number * ROWS, (number + 1) * ROWS)
        await self.still()
        return frame

    async def still(self) -> None:
        async with asyncio.timeout(10):
            while len(self.own):  # noqa: ASYNC110
                await asyncio.sleep(0)

    def count(self, number: int, frames: list[StoredFrame]) -> int:
        """How often the `number`-th of `frames` was read."""
        return self.reader.loaded.count(frames[number].position)


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalStore]:
    monkeypatch.setattr("millpond.store.engine.RECENT_BYTES", 0)
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path, segment_bytes=32 * MIB)
    for number in range(FRAMES):
        await append(store, messages([bytes([number]) + BODY] * ROWS))
    yield store
    await store.close()


@pytest.fixture
async def ahead(store: LocalStore) -> AsyncIterator[Ahead]:
    ahead = Ahead(store)
    yield ahead
    await ahead.close()
    await asyncio.to_thread(ahead.reader.close)
    assert not ahead.died


@pytest.mark.parametrize("at_once", [1, 2, 3])
async def test_who_reads_on_finds_the_next_frames_in_memory(ahead: Ahead, at_once: int) -> None:
    """Each frame is read once and comes once, in its order, however many are asked for at once."""
    frames: list[StoredFrame] = []
    for number in range(0, FRAMES, at_once):
        frames += await ahead.rows(number * ROWS, (number + at_once) * ROWS)
        await ahead.still()
    assert [frame.first_offset for frame in frames] == [number * ROWS for number in range(FRAMES)]
    assert [bodies_of(frame)[0][0] for frame in frames] == list(range(FRAMES))
    assert sorted(ahead.reader.loaded) == [frame.position for frame in frames]
    assert ahead.bytes == 0


@pytest.mark.parametrize("rows", [ROWS // 2, ROWS // 4, ROWS * 3 // 8])
async def test_who_takes_frames_in_parts_finds_the_next_one(ahead: Ahead, rows: int) -> None:
    """Each frame is read once, and but for the first before somebody waits for it."""
    frames: list[StoredFrame] = []
    for first in range(0, FRAMES * ROWS, rows):
        read = len(ahead.reader.loaded)
        frames += await ahead.frames(1, await ahead.directory.spots(1, first, rows), goes_on=True)
        assert first == 0 or len(ahead.reader.loaded) == read
        await ahead.still()
    positions = list(dict.fromkeys(frame.position for frame in frames))
    assert len(positions) == FRAMES and sorted(ahead.reader.loaded) == positions == sorted(positions)
    assert ahead.bytes == 0


async def test_they_are_read_before_they_are_asked_for(ahead: Ahead) -> None:
    """The second of two reads in a row brings more than it answers."""
    await ahead.frame(0)
    assert len(ahead.reader.loaded) == 1
    await ahead.frame(1)
    assert len(ahead.reader.loaded) == 3
    assert ahead.bytes > 0


async def test_a_read_somewhere_else_brings_nothing_along(ahead: Ahead) -> None:
    """Only who goes on where a read ended wants what follows."""
    for number in (5, 2, 9):
        await ahead.frame(number)
    assert len(ahead.reader.loaded) == 3
    assert ahead.bytes == 0


async def test_small_reads_bring_nothing_along(store: LocalStore, ahead: Ahead) -> None:
    """What follows a few messages is read when it is asked for, also while something else is kept."""
    for _ in range(4):
        await append(store, messages([BODY]))
    await ahead.frame(0)
    await ahead.frame(1)
    kept = ahead.bytes
    for offset in range(FRAMES * ROWS, FRAMES * ROWS + 3):
        await ahead.rows(offset, offset + 1)
        await ahead.still()
    assert ahead.bytes == kept


async def test_frames_in_memory_are_not_kept_twice(ahead: Ahead) -> None:
    """Whoever follows the end of a queue reads no disk: nothing is read ahead of it."""
    for frame in await ahead.reader.frames(await ahead.directory.spots(1, 2 * ROWS, 2 * ROWS)):
        ahead.reader.recent.add(frame)
    await ahead.frame(0)
    await ahead.frame(1)
    assert ahead.bytes == 0
    await ahead.rows(2 * ROWS, 3 * ROWS)
    assert not len(ahead.own)


async def test_nothing_is_read_ahead_while_producers_wait_for_flushes(ahead: Ahead) -> None:
    """A flush would wait for the disk."""
    await ahead.frame(0)
    ahead.flushes.awaited()
    await ahead.frame(1)
    assert len(ahead.reader.loaded) == 2


async def test_who_asks_for_what_is_being_read_waits_for_it(ahead: Ahead) -> None:
    """It is not read twice."""
    await ahead.frame(0)
    await ahead.rows(ROWS, 2 * ROWS)
    ahead.reader.may.clear()
    await asyncio.sleep(0)
    asked = asyncio.ensure_future(ahead.rows(2 * ROWS, 3 * ROWS))
    await asyncio.sleep(0)
    assert not asked.done()
    ahead.reader.may.set()
    [frame] = await asked
    assert ahead.count(0, [frame]) == 1


async def test_a_frame_that_was_read_ahead_may_be_taken_in_parts(ahead: Ahead) -> None:
    """It is kept until its last row was asked for."""
    await ahead.frame(0)
    await ahead.frame(1)
    parts = [await ahead.rows(2 * ROWS + row, 2 * ROWS + row + ROWS // 2) for row in (0, ROWS // 2)]
    assert ahead.count(0, parts[0]) == 1
    assert parts[0][0].position == parts[1][0].position


async def test_it_keeps_no_more_than_it_may(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit beside what is kept is not read at all: frames in memory are never pushed out unread."""
    monkeypatch.setattr("millpond.store.ahead.AHEAD_BYTES", 3 * AHEAD_LEAST_BYTES // 2)
    await ahead.frame(0)
    await ahead.frame(1)
    assert 0 < ahead.bytes <= 3 * AHEAD_LEAST_BYTES // 2
    await ahead.frame(5)
    await ahead.frame(6)
    assert len(ahead.reader.loaded) == 5
    frame = await ahead.frame(2)
    assert ahead.count(0, [frame]) == 1


async def test_frames_that_were_read_at_once_are_counted_until_the_last_has_gone(ahead: Ahead) -> None:
    """They share memory."""
    for first in (0, 2):
        await ahead.rows(first * ROWS, (first + 2) * ROWS)
        await ahead.still()
    held = ahead.bytes
    ahead.flushes.awaited()  # so that no more is read
    await ahead.rows(4 * ROWS, 6 * ROWS)
    assert ahead.bytes == held
    await ahead.rows(6 * ROWS, 7 * ROWS)
    assert ahead.bytes == 0


async def test_what_nobody_asks_for_is_let_go(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """After AHEAD_SECONDS."""
    monkeypatch.setattr("millpond.store.ahead.AHEAD_SECONDS", 0.01)
    await ahead.frame(0)
    await ahead.frame(1)
    async with asyncio.timeout(10):
        while ahead.bytes:  # noqa: ASYNC110
            await asyncio.sleep(0)
    frame = await ahead.frame(2)
    assert ahead.count(0, [frame]) == 2


async def test_what_is_damaged_is_met_by_who_asks_for_it(store: LocalStore, ahead: Ahead) -> None:
    """The reads before it are answered as ever."""
    [spot] = await ahead.directory.spots(1, 2 * ROWS, ROWS)
    segment = store.engine.log.segments[0]
    segment.file.write(spot.position - segment.base + 100, [b"damaged"])
    await ahead.frame(0)
    await ahead.frame(1)
    assert ahead.bytes == 0
    with pytest.raises(Internal, match="damaged"):
        await ahead.frame(2)


async def test_a_deleted_queue_ends_it(store: LocalStore, ahead: Ahead) -> None:
    """Nothing is looked for where nothing is."""
    await ahead.frame(0)
    spots = await ahead.directory.spots(1, ROWS, ROWS)
    await store.delete_topic(queue().topic_id)
    await ahead.frames(1, spots)
    await ahead.still()
    assert len(ahead.reader.loaded) == 2


async def test_direct_reads_and_receives_have_it(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both bring along what follows: reads once they go on where they ended, receives from the first on."""
    monkeypatch.setattr("millpond.store.flushes.AWAITED_SECONDS", 0.0)  # of the appends of the fixture
    brought: list[int] = []
    monkeypatch.setattr(store.engine.ahead, "_keep", lambda frames, size: brought.append(len(frames)))
    for number in range(2):
        await store.read(ReadRequest(1, number * ROWS, ROWS, 8 * MIB))
    await _until(brought)
    for group, rows in ((5, 2 * ROWS), (6, 1_000)):  # whole frames, and parts of them
        brought.clear()
        await store.receive(ReceiveRequest(GroupRef(1, 1, group), [queue()], "earliest", rows, 8 * MIB, 30_000))
        await _until(brought)


async def _until(brought: list[int]) -> None:
    async with asyncio.timeout(10):
        while not brought:  # noqa: ASYNC110
            await asyncio.sleep(0)
