"""The real disk: what is written comes back, whatever way it goes."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.store import disk as disk_module
from millpond.store.disk import UNCACHED_WRITE_BYTES, File, SystemDisk, _split, _Uncached


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


@pytest.mark.parametrize("beyond", [100, 4_096])
def test_large_writes_leave_no_pages(file: File, beyond: int) -> None:
    """Once they are on the disk, all but the last page of a large write have left the memory: the next begins in it."""
    total = 4 * UNCACHED_WRITE_BYTES + beyond
    file.write(0, [bytes(total)])
    file.sync()
    if not _Uncached.flag:
        pytest.skip("this kernel or filesystem has no RWF_DONTCACHE: pages stay")
    assert file.read_cached(0, UNCACHED_WRITE_BYTES) is None
    assert file.read_cached(total - beyond, beyond) is not None


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
