"""Disks for tests: one in memory, and one that records every write, so that any crash can be shown.

A power cut keeps everything that was synced, and of what was written since any subset of 4 KiB pages: some old,
some new. Renames, removals and whole files are durable when their call returns, as `Disk` promises; until then
a crash may show either.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pyarrow as pa

PAGE = 4096


class MemoryFile:
    def __init__(self, disk: MemoryDisk, inode: int) -> None:
        self._disk = disk
        self.inode = inode

    @property
    def _data(self) -> bytearray:
        return self._disk.inodes[self.inode]

    def read(self, position: int, length: int) -> bytes:
        return bytes(self._data[position : position + length])

    def read_once(self, position: int, length: int, *, still: bool = False) -> pa.Buffer:
        return pa.py_buffer(self.read(position, length))

    def read_gently(self, position: int, length: int, before_step: Callable[[], None], still: bool) -> pa.Buffer:
        before_step()
        return self.read_once(position, length)

    def read_cached(self, position: int, length: int) -> bytes | None:
        data = self.read(position, length)
        return data if len(data) == length else None

    def write(self, position: int, buffers: Sequence[bytes]) -> None:
        data = b"".join(bytes(buffer) for buffer in buffers)
        self._disk.note(Wrote(self.inode, position, data))
        end = position + len(data)
        if len(self._data) < end:
            self._data.extend(bytes(end - len(self._data)))
        self._data[position:end] = data

    def allocate(self, length: int, written: bool, *, hurry: Callable[[], bool] | None = None) -> bool:
        if self._disk.allocated + length > self._disk.capacity:
            raise OSError(errno.ENOSPC, "no space left on the test's disk")
        self._data[:] = bytes(length)
        self._disk.note(Allocated(self.inode, length))
        return written

    def zero(self, position: int, length: int) -> None:
        self.write(position, [bytes(length)])

    def unwrite(self) -> bool:
        """As writing zeros: until the next sync a power cut may leave any of the old pages."""
        self.write(0, [bytes(len(self._data))])
        return True

    def sync(self) -> None:
        self._disk.before_sync()
        self._disk.note(Synced(self.inode))

    def fileno(self) -> None:
        return None

    def size(self) -> int:
        return len(self._data)

    def close(self) -> None:
        pass


class Wrote(NamedTuple):
    inode: int
    position: int
    data: bytes


class Allocated(NamedTuple):
    inode: int
    length: int


class Synced(NamedTuple):
    inode: int


class Named(NamedTuple):
    """A name was given to a file (None: taken away), durably."""

    name: str
    inode: int | None


class Whole(NamedTuple):
    name: str
    inode: int
    data: bytes


class Noted(NamedTuple):
    """Something the test wants to know about this moment: what had been promised."""

    what: object


Event = Wrote | Allocated | Synced | Named | Whole | Noted


class MemoryDisk:
    """A `Disk` in memory. `capacity` bounds what can be allocated; `trace` holds all events when `record` is set."""

    def __init__(self, capacity: int = 1 << 40, record: bool = False) -> None:
        self.inodes: dict[int, bytearray] = {}
        self.named: dict[str, int] = {}
        self.capacity = capacity
        self.trace: list[Event] = []
        self._record = record
        self._next = 0
        self.fail_syncs_after: int | None = None

    @property
    def allocated(self) -> int:
        return sum(len(self.inodes[inode]) for inode in self.named.values())

    def note(self, event: Event) -> None:
        if self._record:
            self.trace.append(event)

    def before_sync(self) -> None:
        if self.fail_syncs_after is not None:
            self.fail_syncs_after -= 1
            if self.fail_syncs_after < 0:
                raise OSError(errno.EIO, "sync failed, as the test wants")

    def go_on_after(self, trace: list[Event]) -> None:
        """New files get numbers that the trace has not used."""
        self._next = max((event.inode or 0 for event in trace if not isinstance(event, Noted)), default=0)

    def _new_inode(self) -> int:
        self._next += 1
        self.inodes[self._next] = bytearray()
        return self._next

    def open(self, name: str, *, create: bool = False) -> MemoryFile:
        if name not in self.named:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
            self.named[name] = self._new_inode()
            self.note(Named(name, self.named[name]))
        return MemoryFile(self, self.named[name])

    def names(self, folder: str) -> list[str]:
        prefix = folder + "/"
        return sorted(name[len(prefix) :] for name in self.named if name.startswith(prefix))

    def make_folder(self, folder: str) -> None:
        pass

    def write_whole(self, name: str, data: Sequence[bytes], *, hurry: bool = False) -> None:
        whole = b"".join(bytes(piece) for piece in data)
        inode = self._new_inode()
        self.inodes[inode][:] = whole
        self.named[name] = inode
        self.note(Whole(name, inode, whole))

    def read_whole(self, name: str) -> bytes:
        return bytes(self.inodes[self._inode(name)])

    def _inode(self, name: str) -> int:
        if name not in self.named:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self.named[name]

    def rename(self, name: str, to: str) -> None:
        inode = self._inode(name)
        if name != to:
            del self.named[name]
            self.named[to] = inode
            self.note(Named(name, None))
            self.note(Named(to, inode))

    def remove(self, name: str) -> None:
        if self.named.pop(name, None) is not None:
            self.note(Named(name, None))

    def free_bytes(self) -> int:
        return self.capacity - self.allocated

    def lock(self) -> None:
        pass

    def close(self) -> None:
        pass


class Crashed(NamedTuple):
    """What a power cut left, and everything noted before it."""

    disk: MemoryDisk
    noted: list[object]


def crash(trace: list[Event], at: int, chance: random.Random, *, keep_unsynced: bool | None = None) -> Crashed:
    """The disk after the first `at` events and a power cut.

    Unsynced pages: each kept or lost by `chance`; `keep_unsynced` True keeps all of them (a killed process).
    """
    disk = MemoryDisk()
    unsynced: dict[int, list[Wrote]] = {}
    noted: list[object] = []
    for event in trace[:at]:
        match event:
            case Wrote(inode):
                unsynced.setdefault(inode, []).append(event)
            case Allocated(inode, length):
                disk.inodes[inode] = bytearray(length)
            case Synced(inode):
                for write in unsynced.pop(inode, []):
                    _put(disk.inodes[inode], write.position, write.data)
            case Named(name, None):
                disk.named.pop(name, None)
            case Named(name, int(inode)):
                disk.inodes.setdefault(inode, bytearray())
                disk.named[name] = inode
            case Whole(name, inode, data):
                disk.inodes[inode] = bytearray(data)
                disk.named[name] = inode
            case Noted(what):
                noted.append(what)
    for inode, writes in unsynced.items():
        _keep_some(disk.inodes[inode], writes, chance, keep_unsynced)
    disk.go_on_after(trace)
    return Crashed(disk, noted)


def _keep_some(data: bytearray, writes: list[Wrote], chance: random.Random, keep: bool | None) -> None:
    likely = chance.choice((0.0, 0.3, 0.5, 0.9, 1.0))
    pages: dict[int, bool] = {}
    for write in writes:
        position, rest = write.position, write.data
        while rest:
            page = position // PAGE
            step = min(len(rest), (page + 1) * PAGE - position)
            if pages.setdefault(page, chance.random() < likely if keep is None else keep):
                _put(data, position, rest[:step])
            position, rest = position + step, rest[step:]


def _put(data: bytearray, position: int, piece: bytes) -> None:
    end = position + len(piece)
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    data[position:end] = piece
