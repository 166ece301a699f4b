"""The real disk: what is written comes back, whatever way it goes."""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from millpond.core.tier.gentle import SHRINK_BYTES, STEP_BYTES, Steps
from millpond.store import disk as disk_module
from millpond.store.disk import (
    _ALLOCATE_STEP,
    DIRECT_READ_BYTES,
    UNCACHED_WRITE_BYTES,
    File,
    SystemDisk,
    SystemFile,
    _split,
    _Uncached,
)


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Iterator[File]:
    file = SystemDisk(tmp_path).open("one", create=True)
    yield file
    file.close()


@pytest.fixture(name="flag")
def _flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Uncached, "flag", _Uncached.flag)


@pytest.mark.parametrize("position", [0, 1, 4_095, 4_096, 10_001])
@pytest.mark.parametrize("total", [10, UNCACHED_WRITE_BYTES, UNCACHED_WRITE_BYTES + 1, 3 * UNCACHED_WRITE_BYTES + 777])
def test_a_write_comes_back(file: File, position: int, total: int) -> None:
    """Of any size, at any place, in any pieces: cached, uncached, or both."""
    data = os.urandom(total)
    third = total // 3
    file.write(position, [data[:third], b"", memoryview(data)[third:]])
    assert file.read(position, total) == data
    assert file.read_once(position, total).to_pybytes() == data
    file.sync()
    assert file.read_once(position, total + 5).to_pybytes() == data


def _cached_pages(path: Path) -> list[int]:
    """The numbers of the file's pages that are in memory. mincore only looks: a read, also one that does not wait,
    begins to read ahead, and finds what it has brought itself."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = pa.py_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-view.size // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(view.address), ctypes.c_size_t(view.size), pages
        )
        del view  # holds the mapping open
        assert not failed, os.strerror(ctypes.get_errno())
    return [number for number, page in enumerate(pages) if page & 1]


@pytest.mark.parametrize("beyond", [100, 4_096])
def test_large_writes_leave_no_pages(file: File, tmp_path: Path, beyond: int) -> None:
    """Once they are on the disk, all but the last page of a large write have left the memory: the next begins in it."""
    total = 4 * UNCACHED_WRITE_BYTES + beyond
    file.write(0, [bytes(total)])
    file.sync()
    if not _Uncached.flag:
        pytest.skip("this kernel or filesystem has no RWF_DONTCACHE: pages stay")
    assert _cached_pages(tmp_path / "one") == [(total - 1) // mmap.PAGESIZE]


@pytest.mark.parametrize("gently", [False, True])
def test_zeros_beforehand_are_written_in_steps(file: File, monkeypatch: pytest.MonkeyPatch, *, gently: bool) -> None:
    """Each synced before the next, so that a flush waits for one: a short one where flushes are to be expected."""
    total, since = 3 * _ALLOCATE_STEP // 2, [0]
    zero, sync = SystemFile.zero, os.fdatasync

    def zeroed(self: SystemFile, position: int, length: int) -> None:
        zero(self, position, length)
        since[-1] += length

    def synced(fd: int) -> None:
        sync(fd)
        since.append(0)

    monkeypatch.setattr(SystemFile, "zero", zeroed)
    monkeypatch.setattr(os, "fdatasync", synced)
    assert file.allocate(total, written=True, hurry=(lambda: False) if gently else None)
    assert sum(since) == total == file.size()
    assert max(since) == (STEP_BYTES if gently else _ALLOCATE_STEP)


def test_zeros_end_once_there_is_a_hurry(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are there all the same, and what is not written to reads as zeros."""
    zeroed: list[int] = []
    monkeypatch.setattr(SystemFile, "zero", lambda _file, position, _length: zeroed.append(position))
    assert not file.allocate(8 * STEP_BYTES, written=True, hurry=lambda: len(zeroed) == 3)
    assert zeroed == [0, STEP_BYTES, 2 * STEP_BYTES]
    assert file.size() == 8 * STEP_BYTES
    assert bytes(file.read(0, 8 * STEP_BYTES)) == bytes(8 * STEP_BYTES)


def test_what_is_unwritten_is_empty_and_leaves_no_pages_again(file: File, tmp_path: Path) -> None:
    """Pages of large writes to blocks that were written to before stay in memory (ext4); unwritten ones do not have
    any. The blocks stay taken, and the file as long as it was."""
    total = 4 * UNCACHED_WRITE_BYTES
    file.allocate(total, written=True)
    blocks = (tmp_path / "one").stat().st_blocks
    file.write(0, [os.urandom(total)])
    file.sync()
    if not file.unwrite():
        pytest.skip("this kernel or filesystem cannot take back what was written")
    assert (tmp_path / "one").stat().st_blocks == blocks
    file.write(0, [bytes(total // 2)])
    file.sync()
    assert _cached_pages(tmp_path / "one") == [total // 2 // mmap.PAGESIZE - 1]
    assert file.read(0, total + 1) == bytes(total)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EPERM])
def test_what_cannot_be_unwritten_stays(file: File, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A file system without it, or a sandbox: nothing has changed."""
    monkeypatch.setattr(disk_module, "_fallocate", lambda: lambda *_: ctypes.set_errno(number) or -1)
    file.write(0, [b"there"])
    assert not file.unwrite()
    assert file.read(0, 10) == b"there"


def test_a_failure_to_unwrite_is_not_swallowed(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems give the blocks back first, and then have no room."""
    monkeypatch.setattr(disk_module, "_fallocate", lambda: lambda *_: ctypes.set_errno(errno.ENOSPC) or -1)
    monkeypatch.setattr(_Uncached, "flag", 0x80)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        file.unwrite()


@pytest.mark.usefixtures("flag")
def test_an_older_kernel_is_written_to_the_usual_way(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the flag is refused, the same bytes go without it, and it is not tried again."""
    asked: list[int] = []
    real = os.pwritev

    def old(fd: int, buffers: list[bytes], position: int, flags: int = 0) -> int:
        asked.append(flags)
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(fd, buffers, position)

    monkeypatch.setattr(disk_module, "_pwritev_uncached", lambda *args: disk_module._uncached(old, *args))
    monkeypatch.setattr(_Uncached, "flag", 0x80)
    data = os.urandom(UNCACHED_WRITE_BYTES)
    file.write(0, [data])
    file.write(0, [data])
    assert file.read(0, len(data)) == data
    assert asked == [0x80, 0, 0]


def test_any_other_failure_is_not_swallowed(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only "not supported" is answered by another try: a failed write is final."""

    def broken(fd: int, buffers: list[bytes], position: int, flags: int = 0) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk_module, "_pwritev_uncached", lambda *args: disk_module._uncached(broken, *args))
    with pytest.raises(OSError, match="broken"):
        file.write(0, [bytes(UNCACHED_WRITE_BYTES)])


@pytest.mark.parametrize("length", range(13))
def test_split(length: int) -> None:
    """Both halves together are the whole, cut at any byte."""
    pieces = [b"abc", b"", b"defgh", b"ijkl"]
    before, after = _split(pieces, length)
    assert b"".join(before) == b"abcdefghijkl"[:length]
    assert b"".join(before) + b"".join(after) == b"abcdefghijkl"


@pytest.mark.parametrize("still", [True, False])
@pytest.mark.parametrize("position", [0, 1, 4_095, 4_096, 10_001])
@pytest.mark.parametrize("length", [1, 4_096, STEP_BYTES, 2 * STEP_BYTES + 777])
def test_a_gentle_read_gives_the_same(file: File, position: int, length: int, still: bool) -> None:
    """Of any size, at any place, in memory or not; what is behind the end of the file is not there."""
    data = os.urandom(position + length)
    file.write(0, [data])
    assert file.read_gently(position, length, lambda: None, still).to_pybytes() == data[position:]
    file.sync()
    assert file.read_gently(position, length + 5_000, lambda: None, still).to_pybytes() == data[position:]
    assert file.read_gently(position + length + 9_000, 10, lambda: None, still).to_pybytes() == b""


@pytest.mark.parametrize("position", [0, 1, 4_096, 10_001])
@pytest.mark.parametrize("beyond", [0, 1, 5_000])
def test_a_large_read_gives_the_same(file: File, position: int, beyond: int) -> None:
    """At any place, in memory or not, and up to the end of the file."""
    data = os.urandom(position + DIRECT_READ_BYTES + 777)
    file.write(0, [data])
    for _ in range(2):
        found = file.read_once(position, len(data) - position + beyond, still=True)
        assert found.to_pybytes() == data[position:]
        file.sync()


def test_a_large_read_goes_past_the_kernel(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step, into the memory where it stays; a smaller one, and one of a file that is written to, do not."""
    if not _Uncached.flag:
        pytest.skip("this kernel or filesystem has no RWF_DONTCACHE: what was written is in memory")
    file.write(0, [bytes(DIRECT_READ_BYTES)])
    file.sync()
    direct: list[int] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], position: int, flags: int = 0) -> int:
        got = real(fd, buffers, position, flags)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(got)
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    file.read_once(0, DIRECT_READ_BYTES)
    file.read_once(0, DIRECT_READ_BYTES - 1, still=True)
    assert direct == []
    file.read_once(0, DIRECT_READ_BYTES, still=True)
    assert direct == [DIRECT_READ_BYTES]


@pytest.mark.parametrize("still", [True, False])
def test_a_gentle_read_stands_back_before_each_step(file: File, still: bool) -> None:
    """No step is larger than it may be."""
    file.write(0, [bytes(3 * STEP_BYTES)])
    steps: list[None] = []
    file.read_gently(0, 3 * STEP_BYTES, lambda: steps.append(None), still)
    assert len(steps) == 3


@pytest.mark.parametrize("still", [True, False])
def test_a_gentle_read_reads_nothing_ahead_and_leaves_nothing(file: File, tmp_path: Path, still: bool) -> None:
    """Neither what was read nor what stands behind it is in memory afterwards."""
    total = 8 * STEP_BYTES
    file.write(0, [bytes(total)])
    file.sync()
    if not _Uncached.flag:
        pytest.skip("this kernel or filesystem has no RWF_DONTCACHE: pages stay")
    file.read_gently(0, 2 * STEP_BYTES, lambda: None, still)
    assert _cached_pages(tmp_path / "one") == [total // mmap.PAGESIZE - 1]  # the last page of a write stays


@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_without_direct_reads_it_goes_the_usual_way(file: File, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that has none says so when the file is opened, or when it is read."""
    data = os.urandom(DIRECT_READ_BYTES + 777)
    file.write(0, [data])
    file.sync()
    real_open, real_read = os.open, os.preadv
    direct: set[int] = set()

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "no direct reads")
        fd = real_open(path, flags, mode)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def preadv(fd: int, buffers: list[memoryview], position: int, flags: int = 0) -> int:
        if fd in direct and refused == "preadv":
            raise OSError(errno.EINVAL, "other blocks")
        return real_read(fd, buffers, position, flags)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    for _ in range(2):
        assert file.read_once(1, len(data) - 1, still=True).to_pybytes() == data[1:]
        assert file.read_gently(1, len(data) - 1, lambda: None, True).to_pybytes() == data[1:]


def test_a_direct_read_that_ends_early_goes_on(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give less than it was asked for."""
    data = os.urandom(DIRECT_READ_BYTES)
    file.write(0, [data])
    file.sync()
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], position: int, flags: int = 0) -> int:
        return real(fd, [buffers[0][: mmap.PAGESIZE]], position, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    assert file.read_once(0, len(data), still=True).to_pybytes() == data
    assert file.read_gently(0, len(data), lambda: None, True).to_pybytes() == data


def test_a_closed_file_is_not_read(tmp_path: Path) -> None:
    """Its number may be another file's by then."""
    file = SystemDisk(tmp_path).open("one", create=True)
    file.write(0, [b"x" * 5_000])
    file.read_gently(0, 10, lambda: None, True)
    file.close()
    with pytest.raises(OSError, match="closed"):
        file.read_gently(0, 10, lambda: None, True)


class _PowerCut(Exception):
    """The machine went off before this call."""


@pytest.fixture(name="large")
def _large(tmp_path: Path) -> Path:
    """A file of several steps of removal."""
    path = tmp_path / "log" / "0.seg"
    path.parent.mkdir()
    path.write_bytes(b"x" * (3 * SHRINK_BYTES))
    return path


def test_what_is_removed_is_gone(tmp_path: Path, large: Path) -> None:
    """Large or small, and whatever it was called; what was never there as well."""
    small = tmp_path / "log" / "small"
    small.write_bytes(b"x")
    disk = SystemDisk(tmp_path)
    for name in ("log/0.seg", "log/small", "log/absent"):
        disk.remove(name)
    assert list(large.parent.iterdir()) == []


@pytest.mark.parametrize("syncs", range(1, 4))
def test_a_power_cut_leaves_no_part_of_a_file_under_its_name(
    tmp_path: Path, large: Path, syncs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever sync it comes before; and what it leaves is gone once the directory is locked again."""
    real, left = os.fsync, syncs

    def fsync(handle: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise _PowerCut
        real(handle)

    with monkeypatch.context() as patch, pytest.raises(_PowerCut):
        patch.setattr(os, "fsync", fsync)
        SystemDisk(tmp_path).remove("log/0.seg")
    assert not large.exists()
    assert len(list(large.parent.iterdir())) == 1
    disk = SystemDisk(tmp_path)
    disk.lock()
    disk.close()
    assert list(large.parent.iterdir()) == []


@pytest.mark.parametrize("total", [10, 2 * SHRINK_BYTES])
def test_a_power_cut_while_a_file_is_written_leaves_nothing_for_good(
    tmp_path: Path, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint's name comes once, so nobody would write over what is left. What lies deeper is not the disk's."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "tier" / "v1").mkdir(parents=True)
    other = tmp_path / "tier" / "v1" / "other.tmp"
    other.write_bytes(b"x")

    def fsync(_: int) -> None:
        raise _PowerCut

    with monkeypatch.context() as patch, pytest.raises(_PowerCut):
        patch.setattr(os, "fsync", fsync)
        SystemDisk(tmp_path).write_whole("checkpoint/1.ckpt", [bytes(total)])
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["1.ckpt.tmp"]
    disk = SystemDisk(tmp_path)
    disk.lock()
    disk.close()
    assert list((tmp_path / "checkpoint").iterdir()) == []
    assert other.exists()


WHOLE = [0, 10, SHRINK_BYTES, SHRINK_BYTES + 1, 2 * SHRINK_BYTES + 4_097]


@pytest.mark.parametrize("total", WHOLE)
def test_a_whole_file_takes_the_place_of_another(tmp_path: Path, total: int) -> None:
    """Of any size, in any pieces, whatever an attempt before has left."""
    disk, data = SystemDisk(tmp_path), os.urandom(total)
    (tmp_path / "one").write_bytes(b"old")
    (tmp_path / "one.tmp").write_bytes(b"half of it")
    third = total // 3
    disk.write_whole("one", [data[:third], pa.py_buffer(data[third : 2 * third]), memoryview(data)[2 * third :]])
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert disk.read_whole("one") == data


@pytest.mark.parametrize("hurry", [False, True])
@pytest.mark.parametrize("total", WHOLE)
def test_a_large_whole_file_is_written_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, hurry: bool
) -> None:
    """A flush of the log beside it waits for one of them at most; but for one in a hurry."""
    steps: list[int] = []
    monkeypatch.setattr(Steps, "pause", lambda _: steps.append(1))
    disk, data = SystemDisk(tmp_path), os.urandom(total)
    disk.write_whole("one", [data], hurry=hurry)
    assert len(steps) == (-(-total // STEP_BYTES) if total > SHRINK_BYTES and not hurry else 0)
    assert disk.read_whole("one") == data


@pytest.mark.parametrize("total", WHOLE)
def test_a_whole_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    """And takes no room: the disk may be full."""
    disk = SystemDisk(tmp_path)
    (tmp_path / "one").write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        disk.write_whole("one", [bytes(total)])
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert disk.read_whole("one") == b"old"
