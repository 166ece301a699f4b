"""The disk of a store, as an argument: every byte a store writes goes through a `Disk`.

`SystemDisk` is the real one. Tests give a recording disk, which can replay any state that a power cut may
leave: any subset of the writes since the last `sync`, cut at any page. So nothing in the store opens a file
by itself. All calls block; the engine makes the long ones in its threads.

An `OSError` is never swallowed here. ENOSPC comes out of `allocate` and `write_whole` only: segments are
allocated before they are written.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from millpond.core.gathered import Buffer
from millpond.core.limits import KIB, MIB
from millpond.core.tier.gentle import SHRINK_BYTES, STEP_BYTES, GentleFile, Steps, give_back

_VECTOR = 1024  # IOV_MAX of Linux
_ZEROS = bytes(MIB)
_ALLOCATE_STEP = 8 * MIB
_WHOLE_BYTES_PER_SECOND = 256 * MIB  # of large files: one step each half millisecond, with a pause behind it
_GONE = ".gone"  # behind the name of a file whose blocks are being given back
_HALF = ".tmp"  # behind the name of one that is being written whole
UNCACHED_WRITE_BYTES = 128 * KIB  # smaller writes share pages with what follows: those stay
DIRECT_READ_BYTES = 256 * KIB  # less is often there already: the kernel reads ahead


class File(Protocol):
    """One open file. Positions and lengths are bytes."""

    def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        ...

    def read_once(self, position: int, length: int, *, still: bool = False) -> pa.Buffer:
        """The same for what nobody is likely to want again soon: leaves no pages in memory that were not there.
        `still`: nobody writes to this file now."""
        ...

    def read_gently(self, position: int, length: int, before_step: Callable[[], None], still: bool) -> pa.Buffer:
        """The same in steps of STEP_BYTES, each after a call of `before_step`, and nothing ahead of them: a sync
        waits for one step at most. `still`: nobody writes to this file now."""
        ...

    def read_cached(self, position: int, length: int) -> bytes | None:
        """As `read` when it is in memory already, else None: never waits for the disk."""
        ...

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        """All of the buffers, one after another."""
        ...

    def allocate(self, length: int, written: bool, *, hurry: Callable[[], bool] | None = None) -> bool:
        """Make the file `length` zero bytes long, blocks taken, so that later writes do not fail for want of room.

        With `written` the zeros are written too: later syncs then change none of the file's metadata (measured:
        fdatasync of 4 KiB 92 us, against 180-215 us on blocks that are only taken), for writing every byte twice.
        `hurry`: in steps that a flush beside it waits 1 ms for, not 12, in twice the time; asked before each, and once
        it says so the rest of the blocks is only taken. Returns whether all zeros are written.
        """
        ...

    def zero(self, position: int, length: int) -> None: ...

    def unwrite(self) -> bool:
        """Zeros again, as after `allocate` without `written`: the blocks stay taken, and what is written to them anew
        leaves no pages in memory. False when the file system cannot: nothing has changed then. Raises OSError."""
        ...

    def sync(self) -> None:
        """Everything written is on the disk once this returns. A failure is final: the kernel has dropped the pages."""
        ...

    def fileno(self) -> int | None:
        """Its descriptor; None when it is no file of the kernel's."""
        ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Disk(Protocol):
    """Files of one data directory, by name relative to it (`log/000.seg`)."""

    def open(self, name: str, *, create: bool = False) -> File: ...

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder; none when there is no such folder."""
        ...

    def make_folder(self, folder: str) -> None: ...

    def write_whole(self, name: str, data: Sequence[Buffer], *, hurry: bool = False) -> None:
        """Replace the file by `data`, or leave the old one: temporary name, sync, rename, sync of the folder. What a
        power cut leaves of it goes with the next `lock`.

        A large one in steps with pauses, so that flushes of the log come in between; with `hurry` all at once, a
        quarter of the time while the interpreter has other work.
        """
        ...

    def read_whole(self, name: str) -> bytes: ...

    def rename(self, name: str, to: str) -> None:
        """Durable when it returns."""
        ...

    def remove(self, name: str) -> None:
        """Durable when it returns; absent is fine. What a power cut leaves of it goes with the next `lock`."""
        ...

    def free_bytes(self) -> int: ...

    def lock(self) -> None:
        """Hold the directory against a second process until the process ends. Raises BlockingIOError."""
        ...

    def close(self) -> None: ...


class _Uncached:
    """RWF_DONTCACHE (Linux 6.14): pages are dropped once they are on the disk, or were read. 0 where there is none.

    A log is written once and read at its end: cached, it pushes everything else out of memory, and finding a fresh
    page for each 4 KiB can cost more than the write itself (docs/performance.md).
    """

    flag = 0x80


Transfer = Callable[[int, Sequence[Buffer], int, int], int]


def _uncached(transfer: Transfer, fd: int, buffers: Sequence[Buffer], at: int) -> int:
    """`transfer` (preadv or pwritev) without leaving pages behind, where the kernel and the filesystem can."""
    try:
        return transfer(fd, buffers, at, _Uncached.flag)
    except OSError as error:
        if not _Uncached.flag or error.errno != errno.EOPNOTSUPP:
            raise
        _Uncached.flag = 0
        return transfer(fd, buffers, at, 0)


_preadv_uncached = partial(_uncached, os.preadv)
_pwritev_uncached = partial(_uncached, os.pwritev)


_ZERO_RANGE = 0x10 | 0x01  # FALLOC_FL_ZERO_RANGE, FALLOC_FL_KEEP_SIZE
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)  # file systems, kernels, sandboxes


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2), whose modes Python does not have; None where there is none."""
    found = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if found is None or sys.maxsize <= 1 << 32:  # there offsets are not those of the C library's type
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call: Callable[[int, int, int, int], int] = found
    return call


def _split(buffers: Sequence[Buffer], length: int) -> tuple[list[Buffer], list[Buffer]]:
    """The first `length` bytes of `buffers`, and the rest."""
    before: list[Buffer] = []
    for number, buffer in enumerate(buffers):
        if len(buffer) > length:
            view = memoryview(buffer)
            after: list[Buffer] = [view[length:], *buffers[number + 1 :]]
            return ([*before, view[:length]] if length else before), after
        before.append(buffer)
        length -= len(buffer)
    return before, []


class _Gentle:
    """Descriptors of an open file that the kernel reads nothing ahead for.

    Direct reads go into the memory that they are for: 0.13 ms of CPU a MB in steps of 256 KiB, where copies out of
    fresh pages of the page cache take 0.45. But each holds up writes to its file, so not while it is being written to;
    and not on a kernel that keeps what was written in memory.
    """

    def __init__(self, fd: int) -> None:
        self._path = f"/proc/self/fd/{fd}"
        self._making = threading.Lock()
        self._fds: dict[bool, int | None] = {}
        self._closed = False

    def direct(self) -> int | None:
        """The descriptor for direct reads; None where there are none."""
        return self._opened(direct=True) if _Uncached.flag else None

    def read(self, position: int, into: memoryview, *, direct: bool) -> int:
        """Whole pages at a position of whole pages; how many bytes, fewer only at the end of the file."""
        done = self._read_direct(position, into) if direct else 0
        fd = self._opened(direct=False)
        assert fd is not None
        while done < len(into):
            got = _preadv_uncached(fd, [into[done:]], position + done)
            if not got:
                break
            done += got
        return done

    def _read_direct(self, position: int, into: memoryview) -> int:
        fd = self.direct()
        if fd is None:
            return 0
        try:
            return os.preadv(fd, [into], position)
        except OSError as error:
            if error.errno != errno.EINVAL:  # blocks of another size than pages
                raise
            self._fds[True] = None
            return 0

    def _opened(self, *, direct: bool) -> int | None:
        """None: this filesystem has no direct reads."""
        with self._making:
            if self._closed:
                raise OSError(errno.EBADF, "the file was closed")
            if direct not in self._fds:
                self._fds[direct] = self._open(direct=direct)
            return self._fds[direct]

    def _open(self, *, direct: bool) -> int | None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            return None
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def close(self) -> None:
        with self._making:
            for fd in self._fds.values():
                if fd is not None:
                    os.close(fd)
            self._fds.clear()
            self._closed = True


class SystemFile:
    @property
    def step_bytes(self) -> int:
        """Of a gentle read."""
        return STEP_BYTES

    def __init__(self, path: Path, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = os.open(path, flags, 0o640)
        self._gentle = _Gentle(self._fd)

    def read(self, position: int, length: int) -> bytes:
        data = os.pread(self._fd, length, position)
        while 0 < len(data) < length:
            more = os.pread(self._fd, length - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    def read_once(self, position: int, length: int, *, still: bool = False) -> pa.Buffer:
        if still and length >= DIRECT_READ_BYTES and self._gentle.direct() is not None:
            return self._read_pages(position, length, direct=True)
        data = pa.allocate_buffer(length)
        view = memoryview(data)
        done = 0
        while done < length:
            got = _preadv_uncached(self._fd, [view[done:]], position + done)
            if not got:
                break
            done += got
        return data if done == length else data.slice(0, done)

    def read_gently(self, position: int, length: int, before_step: Callable[[], None], still: bool) -> pa.Buffer:
        return self._read_pages(position, length, direct=still, steps=(self.step_bytes, before_step))

    def _read_pages(
        self, position: int, length: int, *, direct: bool, steps: tuple[int, Callable[[], None]] | None = None
    ) -> pa.Buffer:
        """`steps`: how long each is at most, and what is called before it; None: all at once."""
        first = position - position % mmap.PAGESIZE
        whole = -(-(position + length - first) // mmap.PAGESIZE) * mmap.PAGESIZE
        space = pa.allocate_buffer(whole + mmap.PAGESIZE)
        skip = -space.address % mmap.PAGESIZE  # a direct read needs whole blocks in memory, too
        view = memoryview(space)[skip : skip + whole]
        step_bytes, before_step = steps or (whole, None)
        done = 0
        while done < whole:
            step = view[done : done + step_bytes]
            if before_step is not None:
                before_step()
            got = self._gentle.read(first + done, step, direct=direct)
            done += got
            if got < len(step):
                break  # the end of the file
        return space.slice(skip + position - first, max(0, min(length, first + done - position)))

    def read_cached(self, position: int, length: int) -> bytes | None:
        data = bytearray(length)
        try:
            got = os.preadv(self._fd, [data], position, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                return None
            raise
        return bytes(data) if got == length else None

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        total = sum(len(buffer) for buffer in buffers)
        if total < UNCACHED_WRITE_BYTES:
            self._write(position, buffers)
            return
        # The last page will be written to again by what follows: were it dropped, it would have to be read back.
        rest = (position + total - 1) % mmap.PAGESIZE + 1
        pages, last = _split(buffers, total - rest)
        self._write(position, pages, cached=False)
        self._write(position + total - rest, last)

    def _write(self, position: int, buffers: Sequence[Buffer], *, cached: bool = True) -> None:
        for start in range(0, len(buffers), _VECTOR):
            some = buffers[start : start + _VECTOR]
            total = sum(len(buffer) for buffer in some)
            transfer = os.pwritev if cached else _pwritev_uncached
            done = transfer(self._fd, some, position)
            if done < total:
                rest = memoryview(b"".join(some))
                while done < total:
                    done += os.pwrite(self._fd, rest[done:], position + done)
            position += total

    def allocate(self, length: int, written: bool, *, hurry: Callable[[], bool] | None = None) -> bool:
        os.posix_fallocate(self._fd, 0, length)  # takes all blocks at once: ENOSPC comes here or not at all
        os.ftruncate(self._fd, length)
        step = STEP_BYTES if hurry is not None else _ALLOCATE_STEP
        for start in range(0, length if written else 0, step):
            if hurry is not None and hurry():
                written = False
                break
            self.zero(start, min(step, length - start))
            os.fdatasync(self._fd)
        os.fsync(self._fd)
        return written

    def zero(self, position: int, length: int) -> None:
        end = position + length
        while position < end:
            step = min(end - position, len(_ZEROS))
            self.write(position, [memoryview(_ZEROS)[:step]])
            position += step

    def unwrite(self) -> bool:
        call = _fallocate()
        if call is None or not _Uncached.flag:  # without the flag pages stay whatever they are written to
            return False
        if call(self._fd, _ZERO_RANGE, 0, self.size()) == 0:
            return True
        error = ctypes.get_errno()
        if error not in _CANNOT:
            raise OSError(error, os.strerror(error))
        return False

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def fileno(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)
        self._gentle.close()


class SystemDisk:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock_fd: int | None = None
        root.mkdir(parents=True, exist_ok=True)

    def open(self, name: str, *, create: bool = False) -> SystemFile:
        return SystemFile(self.root / name, create)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(entry.name for entry in (self.root / folder).iterdir())
        except FileNotFoundError:
            return []

    def make_folder(self, folder: str) -> None:
        path = self.root / folder
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            _sync_folder(path.parent)

    def write_whole(self, name: str, data: Sequence[Buffer], *, hurry: bool = False) -> None:
        path = self.root / name
        temporary = path.with_name(path.name + _HALF)
        pieces = [memoryview(piece).cast("B") for piece in data]
        write = _write_new if hurry or sum(map(len, pieces)) <= SHRINK_BYTES else _write_gently
        try:
            temporary.unlink(missing_ok=True)
            write(temporary, pieces)
        except OSError:
            temporary.unlink(missing_ok=True)  # on a full disk it would keep what is left from everybody
            raise
        temporary.rename(path)
        _sync_folder(path.parent)

    def read_whole(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def rename(self, name: str, to: str) -> None:
        (self.root / name).rename(self.root / to)
        _sync_folder((self.root / to).parent)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            if (self.root / name).stat().st_size > SHRINK_BYTES:
                self.rename(name, name + _GONE)  # what is under the old name is whole, or not there
                name += _GONE
            give_back(self.root / name)
        _sync_folder((self.root / name).parent)

    def free_bytes(self) -> int:
        stat = os.statvfs(self.root)
        return stat.f_bavail * stat.f_frsize

    def lock(self) -> None:
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise
        self._lock_fd = fd
        for left in (*self.root.glob("*"), *self.root.glob("*/*")):  # no deeper: a tier may be in here
            if left.suffix in {_GONE, _HALF} and left.is_file():
                give_back(left)

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _write_new(path: Path, pieces: Sequence[memoryview]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        for piece in pieces:
            rest = piece
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_gently(path: Path, pieces: Sequence[memoryview]) -> None:
    """A checkpoint may have 100 MB, and flushes of the log go on beside it. Indexes and checkpoints have checksums, and
    are made again or have an older one."""
    steps = Steps()
    steps.take(_WHOLE_BYTES_PER_SECOND, long=False)
    file = GentleFile(path, steps, read_back=False)
    try:
        for piece in pieces:
            file.write(piece)
        file.sync()
    finally:
        file.close()


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
