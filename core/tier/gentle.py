"""Files written, read and removed beside a log on the same disk: `GentleFile`, `read_through`, `give_back`, and how
much at once: `Steps`.

What a log's fdatasync waits for is the file system's journal and pages that wait to be written. So a file that nobody
reads soon goes to the disk past the page cache (O_DIRECT), in steps, into blocks taken many at a time, and is synced
once, at its end. Beside 250 MB/s of it a log's fdatasync of 4 KiB took 0.25 to 0.6 ms at p99 (0.22 alone); through the
page cache with a sync after each MiB 5 to 8 ms. Reads go the same way: 4 MiB through the page cache, with
RWF_DONTCACHE, 30 times a second, put a producer's p99 from 2.3 to 8 ms, in direct steps of 256 KiB to 3.3. What a file
system cannot do is done the usual way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from millpond.core.limits import KIB, MIB

STEP_BYTES = 256 * KIB  # written or read at once, 0.25 ms of a disk that makes 1 GB/s: larger ones held up others
LONG_STEP_BYTES = 4 * MIB  # .. while there are no others: whoever waited for one waits for a core next
ALLOCATE_BYTES = 8 * MIB  # taken at once, or as much as there is: what is not written to goes back to the disk
SHRINK_BYTES = 4 * MIB  # given back at once: a sync beside it waits for 1 to 3 ms
_BLOCK_BYTES = 4096
_NOT_POSSIBLE = (errno.EINVAL, errno.EOPNOTSUPP)


class Steps:
    """How much is written or read at once, and how far apart, by all that have it."""

    def __init__(self) -> None:
        self.bytes = STEP_BYTES
        self._pause_seconds = 0.0
        self._freely = threading.Event()
        self._freely.set()

    @property
    def long(self) -> bool:
        """Nobody else is at work."""
        return self.bytes == LONG_STEP_BYTES

    def take(self, bytes_per_second: int, *, long: bool) -> None:
        """Spread over half of the time that so much takes; without pauses when it is 0. Sixteen steps in a row are
        noticed by a log beside them where one each few milliseconds is not."""
        self.bytes = LONG_STEP_BYTES if long else STEP_BYTES
        if bytes_per_second:
            self._pause_seconds = STEP_BYTES / bytes_per_second / 2
            self._freely.clear()
        else:
            self._freely.set()

    def pause(self) -> None:
        """Between two steps. Blocks."""
        self._freely.wait(self._pause_seconds)


class GentleFile:
    """A new file that only grows. With `read_back` each step is compared with what the disk has of it: for files whose
    readers have nothing else when it is damaged. All calls block and may raise OSError."""

    def __init__(self, path: Path, steps: Steps, *, read_back: bool) -> None:
        """Raises FileExistsError."""
        self._steps = steps
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o640)
        except OSError as error:
            if error.errno not in _NOT_POSSIBLE:
                raise
            path.unlink(missing_ok=True)  # some make the file before they refuse
            self._fd = os.open(path, flags, 0o640)
        self._buffer = memoryview(mmap.mmap(-1, STEP_BYTES))  # begins at a page, as O_DIRECT wants it
        self._back = memoryview(mmap.mmap(-1, LONG_STEP_BYTES)) if read_back else None
        self._held = 0
        self._written = 0
        self._allocated = 0

    def write(self, data: memoryview) -> None:
        """Whole steps that begin at a page are written as they are, all else is copied."""
        while data:
            if not self._held and len(data) >= STEP_BYTES and _address(data) % _BLOCK_BYTES == 0:
                self._held = min(len(data) // STEP_BYTES * STEP_BYTES, self._steps.bytes)
                step, data = data[: self._held], data[self._held :]
                self._step(step)
                continue
            taken = min(len(data), STEP_BYTES - self._held)
            self._buffer[self._held : self._held + taken] = data[:taken]
            self._held += taken
            data = data[taken:]
            if self._held == STEP_BYTES:
                self._step(self._buffer)

    def sync(self) -> None:
        """What was written is durable, and all there is; nothing is written after it. May be called again."""
        if self._held:
            whole = -(-self._held // _BLOCK_BYTES) * _BLOCK_BYTES
            self._buffer[self._held : whole] = bytes(whole - self._held)
            self._step(self._buffer[:whole])
        if os.fstat(self._fd).st_size != self._written:
            os.ftruncate(self._fd, self._written)
        os.fsync(self._fd)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _step(self, data: memoryview) -> None:
        """Write `data`, of which the first `_held` bytes count."""
        if self._written + len(data) > self._allocated:
            more = max(len(data), min(ALLOCATE_BYTES, self._allocated))
            os.posix_fallocate(self._fd, self._allocated, more)
            self._allocated += more
        done = 0
        while done < len(data):
            done += self._put(data[done:], self._written + done)
        if self._back is not None:
            back = self._back[: len(data)]
            if os.preadv(self._fd, [back], self._written) < len(data) or not _equal(back, data):
                raise OSError(errno.EIO, "what is read back is not what was written")
        self._steps.pause()
        self._written += self._held
        self._held = 0

    def _put(self, data: memoryview, at: int) -> int:
        try:
            return os.pwrite(self._fd, data, at)
        except OSError as error:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            if error.errno not in _NOT_POSSIBLE or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return os.pwrite(self._fd, data, at)


def _equal(one: memoryview, other: memoryview) -> bool:
    """Of whole blocks."""
    return np.array_equal(np.frombuffer(one, np.uint64), np.frombuffer(other, np.uint64))


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def read_through(path: Path, steps: Steps) -> Iterator[memoryview]:
    """All of a file, in steps; what was given is overwritten by the next one."""
    buffer = memoryview(mmap.mmap(-1, LONG_STEP_BYTES))
    handle = _opened(path)
    at = 0
    try:
        while got := os.preadv(handle, [buffer[: steps.bytes]], at):
            yield buffer[:got]
            at += got
            if got % _BLOCK_BYTES:
                return
    finally:
        os.close(handle)


def give_back(path: Path) -> None:
    """Unlink a file that nobody wants any more, its blocks before its name. Blocks, for 0.5 ms a MiB where the disk is
    told of them. Raises FileNotFoundError."""
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(handle).st_size
        while size > SHRINK_BYTES:
            size -= SHRINK_BYTES
            os.ftruncate(handle, size)
            os.fsync(handle)
    finally:
        os.close(handle)
    path.unlink()


def _opened(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NOT_POSSIBLE:
            raise
        return os.open(path, flags)
