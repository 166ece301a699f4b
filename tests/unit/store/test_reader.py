"""What the reader of frames keeps for who reads on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pyarrow as pa
import pytest
from support.disks import MemoryDisk, MemoryFile
from support.stores import StoreMetadata, append, bodies_of, messages, open_store

from millpond.core.errors import BelowLocal, Internal
from millpond.core.limits import BEGUN_BYTES
from millpond.store import reader as reader_module
from millpond.store.directory import FrameSpot
from millpond.store.flushes import Flushes
from millpond.store.local import LocalStore
from millpond.store.reader import INLINE_READ_BYTES, Extent, FrameReader
from millpond.store.recent import Recent

BODY = b"x" * 1024
ROWS = 2 * INLINE_READ_BYTES // len(BODY)  # frames that are read in a thread


class CountingReader(FrameReader):
    """Says which positions it has read from the disk."""

    def __init__(self, store: LocalStore) -> None:
        self.flushes = Flushes()
        super().__init__(store.engine.log, Recent(0), lambda position, end: None, self.flushes)
        self.loaded: list[int] = []
        self.gently: list[bool] = []

    def _load(self, extents: list[Extent], gently: bool) -> list:  # type: ignore[type-arg]  # as in the base
        self.loaded += [spot.position for extent in extents for spot in extent.spots]
        self.gently.append(gently)
        return super()._load(extents, gently)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path, segment_bytes=8 * 1024 * 1024)
    for number in range(3):
        await append(store, messages([bytes([number]) + BODY] * ROWS))
    yield store
    await store.close()


@pytest.fixture
async def reader(store: LocalStore) -> AsyncIterator[CountingReader]:
    reader = CountingReader(store)
    yield reader
    await asyncio.to_thread(reader.close)


async def spots(store: LocalStore, first: int, end: int) -> list[FrameSpot]:
    return await store.engine.directory.spots(1, first, end - first)


async def test_a_frame_is_read_once_for_all_its_parts(store: LocalStore, reader: CountingReader) -> None:
    """Who takes a frame in quarters costs one read of it, and gets the same as who takes it whole."""
    quarter = ROWS // 4
    for first in range(0, ROWS, quarter):
        [frame] = await reader.frames(await spots(store, first, first + quarter))
        assert bodies_of(frame) == [bytes([0]) + BODY] * ROWS
    assert len(reader.loaded) == 1


async def test_a_frame_that_is_wanted_whole_is_not_kept(store: LocalStore, reader: CountingReader) -> None:
    """Who reads everything does not push out what others have begun."""
    whole = await spots(store, 0, ROWS)
    await reader.frames(whole)
    await reader.frames(whole)
    assert len(reader.loaded) == 2


async def test_begun_frames_are_forgotten_at_rest(
    store: LocalStore, reader: CountingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once none was begun for a while: each that is sets the timer anew."""
    await reader.frames(await spots(store, 0, 10))
    first = reader._forgetting
    assert first is not None
    forgotten, clear = asyncio.Event(), reader._begun.clear
    monkeypatch.setattr(reader._begun, "clear", lambda: forgotten.set() or clear())
    monkeypatch.setattr(reader_module, "BEGUN_SECONDS", 0.01)
    await reader.frames(await spots(store, ROWS, ROWS + 10))
    assert first.cancelled()
    async with asyncio.timeout(10):
        await forgotten.wait()
    assert reader._begun.bytes == 0
    await reader.frames(await spots(store, 10, 20))
    assert len(reader.loaded) == 3


async def test_a_begun_frame_does_not_keep_its_neighbours(store: LocalStore, reader: CountingReader) -> None:
    """The last of several that were read in one go stands in buffers of its own."""
    frames = await reader.frames(await spots(store, 0, 2 * ROWS + 1))
    [kept] = await reader.frames(await spots(store, 2 * ROWS + 1, 2 * ROWS + 2))
    assert len(reader.loaded) == 3
    assert kept.payload.equals(frames[2].payload)
    assert kept.payload.address != frames[2].payload.address


async def test_what_is_kept_is_bounded(store: LocalStore, reader: CountingReader) -> None:
    """Two readers that begin the same frame at once count it once."""
    begun = await spots(store, 0, 1)
    frames = await reader._stored(begun)
    reader._keep_begun(begun, frames)
    assert reader._begun.bytes < 2 * frames[0].payload.size < BEGUN_BYTES


async def test_the_disk_is_read_gently_while_flushes_are_awaited(store: LocalStore, reader: CountingReader) -> None:
    """At full speed else; what nobody waits for always gently."""
    whole = await spots(store, 0, ROWS)
    await reader.frames(whole)
    await reader.frames(whole, background=True)
    reader.flushes.awaited()
    await reader.frames(whole)
    assert reader.gently == [False, True, True]


async def test_a_read_knows_whether_its_segment_is_closed(
    store: LocalStore, reader: CountingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody writes to one that is full; the next one is there before that."""
    told: list[tuple[bool, bool]] = []  # and whether there was a next one
    log, real = reader._log, MemoryFile.read_once

    def read_once(self: MemoryFile, position: int, length: int, *, still: bool = False) -> pa.Buffer:
        if self is log.segments[0].file:
            told.append((still, len(log.segments) > 1))
        return real(self, position, length, still=still)

    monkeypatch.setattr(MemoryFile, "read_once", read_once)
    while log.tail < log.segments[0].end:
        await append(store, messages([BODY] * ROWS))
        await reader.frames(await spots(store, 0, ROWS))
    assert [still for still, _ in told] == [False] * (len(told) - 1) + [True]
    assert (False, True) in told


@pytest.mark.parametrize("background", [False, True])
async def test_a_gentle_read_gives_the_same(store: LocalStore, reader: CountingReader, background: bool) -> None:
    """Frame for frame, from closed segments and from the one that is written to."""
    reader.flushes.awaited()
    frames = await reader.frames(await spots(store, 0, 3 * ROWS), background=background)
    assert [bodies_of(frame) for frame in frames] == [[bytes([number]) + BODY] * ROWS for number in range(3)]


@pytest.mark.parametrize("gone", [False, True])
async def test_a_frame_whose_file_ends_within_it(
    store: LocalStore, reader: CountingReader, monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    """It is damaged; or its segment was given back to the disk while it was read, which is no damage."""
    log, [spot] = store.engine.log, await spots(store, 0, ROWS)

    async def run(call: Callable[..., object], *arguments: object) -> object:
        file = log.segments[0].file
        assert isinstance(file, MemoryFile)
        del file._data[spot.position + spot.length // 2 :]
        if gone:
            monkeypatch.setattr(log, "segment_of", lambda _position: None)
        return call(*arguments)

    monkeypatch.setattr(reader._threads, "run", run)
    with pytest.raises(BelowLocal if gone else Internal) as caught:
        await reader.frames([spot])
    assert caught.value.code == ("below_local" if gone else "corrupt_range")
