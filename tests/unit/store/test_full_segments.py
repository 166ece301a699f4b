"""Indexes of full segments that wait to be written: how many there may be, and who waits for them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, bodies_of, messages, open_store

from millpond.core.errors import ErrorInfo
from millpond.store.client import ReadRequest
from millpond.store.housekeeping import INDEXES_MOST
from millpond.store.local import LocalStore


class IndexDisk(MemoryDisk):
    """Whose index files wait until they may be written, or are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.begun = threading.Event(), threading.Event()
        self.may.set()
        self.full = False
        self.hurried: list[bool] = []

    def write_whole(self, name: str, data: Sequence[bytes], *, hurry: bool = False) -> None:
        if name.endswith(".idx"):
            self.hurried.append(hurry)
            self.begun.set()
            assert self.may.wait(10)
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_whole(name, data, hurry=hurry)


@pytest.fixture(name="disk")
def _disk() -> IndexDisk:
    return IndexDisk()


@pytest.fixture(name="store")
async def _store(disk: IndexDisk, tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await open_store(disk, StoreMetadata(), tmp_path)
    yield store
    disk.may.set()
    await store.close()


async def fill(store: LocalStore, segments: int) -> None:
    """Append until there are so many, the open one and a spare included."""
    async with asyncio.timeout(20):
        while len(store.engine.log.segments) < segments:
            await append(store, messages([b"x" * 9_000]))


async def fill_until_refused(store: LocalStore) -> ErrorInfo:
    while (refused := (await append(store, messages([b"x" * 9_000]))).outcomes[0].error) is None:
        pass
    return refused


async def test_the_log_waits_for_indexes(store: LocalStore, disk: IndexDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is held in memory, so they are few; appends are refused meanwhile, and go on as before after it."""
    monkeypatch.setattr("millpond.store.append.UNFLUSHED_WAIT_MS", 100)
    disk.may.clear()
    assert (await fill_until_refused(store)).code == "flush_behind"
    assert INDEXES_MOST < len(store.engine.directory.closing()) <= INDEXES_MOST + 2  # a spare was there already
    disk.may.set()
    await fill(store, 3 * INDEXES_MOST)


async def test_an_index_alone_is_written_with_pauses(store: LocalStore, disk: IndexDisk) -> None:
    """Those of a burst are not: they would come later and later."""
    disk.may.clear()
    await fill(store, 5)
    disk.may.set()
    await fill(store, 6)
    while store.engine.directory.closing():
        await append(store, messages([b"x"]))
    assert disk.hurried[:2] == [False, True]
    disk.hurried.clear()
    await fill(store, len(store.engine.log.segments) + 1)
    while store.engine.directory.closing() or not disk.hurried:
        await append(store, messages([b"x" * 9_000]))
    assert disk.hurried[0] is False


async def test_indexes_that_a_full_disk_refuses_are_not_waited_for(
    store: LocalStore, disk: IndexDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that goes may make the room for them, and it only goes for a new one. Once there is room they are."""
    monkeypatch.setattr("millpond.store.append.UNFLUSHED_WAIT_MS", 100)
    monkeypatch.setattr("millpond.store.housekeeping.RETRY_SECONDS", 0.01)
    disk.may.clear()
    await fill_until_refused(store)
    disk.full = True
    disk.may.set()
    await fill(store, 3 * INDEXES_MOST)
    assert len(store.engine.directory.closing()) > INDEXES_MOST + 2
    disk.full = False
    while len(store.engine.directory.closing()) > INDEXES_MOST:  # until they are written again
        await append(store, messages([b"x"]))
    disk.may.clear()
    assert (await fill_until_refused(store)).code == "flush_behind"


async def test_a_reader_does_not_wait_for_an_index_to_be_written(store: LocalStore, disk: IndexDisk) -> None:
    """Of another segment: it may take a second."""
    await append(store, messages([b"first"]))
    await fill(store, 4)
    while store.engine.directory.closing():
        await append(store, messages([b"x"]))
    disk.begun.clear()
    disk.may.clear()
    while not disk.begun.is_set():
        await append(store, messages([b"x" * 9_000]))
    read = await store.read(ReadRequest(1, 0, 1, 1000))
    assert bodies_of(read.frames[0])[0] == b"first"
    assert not disk.may.is_set() and store.engine.directory.closing()
