"""Who writes to the log: the event loop's thread what it is done with before another would begin, as long as the disk
keeps up; a thread all else."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from support.disks import MemoryDisk, MemoryFile
from support.stores import StoreMetadata, append, messages, open_store

from millpond.core.limits import MIB
from millpond.store import writer
from millpond.store.client import Durability
from millpond.store.local import LocalStore

SMALL, LARGE = 2**16, 2**18


class NotedFile(MemoryFile):
    def write(self, position: int, buffers: Sequence[bytes]) -> None:
        assert isinstance(self._disk, NotedDisk)
        self._disk.here.append(threading.current_thread() is threading.main_thread())
        super().write(position, buffers)


class NotedDisk(MemoryDisk):
    """Notes of each write whether the event loop's thread did it; syncs nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.here: list[bool] = []
        self.may_sync = threading.Event()
        self.may_sync.set()

    def open(self, name: str, *, create: bool = False) -> MemoryFile:
        return NotedFile(self, super().open(name, create=create).inode)

    def before_sync(self) -> None:
        assert self.may_sync.wait(10)
        super().before_sync()


@pytest.fixture
def disk() -> NotedDisk:
    return NotedDisk()


@pytest.fixture
async def store(disk: NotedDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalStore]:
    """With sizes of which a test has many."""
    monkeypatch.setattr(writer, "INLINE_WRITE_BYTES", SMALL // 2)
    monkeypatch.setattr(writer, "INLINE_BYTES_MOST", SMALL + SMALL // 2)
    monkeypatch.setattr(writer, "INLINE_AWAITED_BYTES_MOST", LARGE + SMALL)
    monkeypatch.setattr(writer, "INLINE_UNFLUSHED_BYTES", SMALL)
    store = await open_store(disk, StoreMetadata(), tmp_path, segment_bytes=8 * MIB)
    await append(store, messages([b"first"]))
    disk.here.clear()
    yield store
    disk.may_sync.set()
    await store.close()


@pytest.mark.parametrize(
    ("size", "durability", "here"),
    [
        (SMALL, "memory", True),
        (2 * SMALL, "memory", False),
        (2 * SMALL, "flush", True),
        (LARGE, "flush", True),
        (2 * LARGE, "flush", False),
    ],
)
async def test_a_write_of_some_size(
    store: LocalStore, disk: NotedDisk, size: int, durability: Durability, here: bool
) -> None:
    """More is written at once, and by the loop's thread, of what somebody awaits on the disk."""
    await append(store, messages([b"x" * size], durability=durability))
    assert disk.here == [here]


async def test_a_disk_that_is_behind_is_waited_for_by_a_thread(store: LocalStore, disk: NotedDisk) -> None:
    """What is little goes on as ever; and so does all else once the disk has caught up."""
    disk.may_sync.clear()
    for body in (b"x" * SMALL, b"x" * SMALL, b"little"):
        await append(store, messages([body], durability="memory"))
    assert disk.here == [True, False, True]
    disk.may_sync.set()
    await store.engine.writer.flushed(store.engine.log.tail)
    await append(store, messages([b"x" * SMALL], durability="memory"))
    assert disk.here == [True, False, True, True]
