"""Files beside a log: what is written comes back, whatever way it goes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from millpond.core.tier import gentle
from millpond.core.tier.gentle import (
    ALLOCATE_BYTES,
    SHRINK_BYTES,
    STEP_BYTES,
    GentleFile,
    Steps,
    give_back,
    read_through,
)


@pytest.fixture(name="ways", params=["direct", "refused at open", "refused at write"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With O_DIRECT, and on file systems that have no such thing."""
    opening, writing = os.open, os.pwrite

    def no_open(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return opening(path, flags, mode)

    def no_write(handle: int, data: Any, at: int) -> int:
        if refusals.pop() if refusals else False:
            raise OSError(errno.EINVAL, "no")
        return writing(handle, data, at)

    refusals = [True]
    if request.param == "refused at open":
        monkeypatch.setattr(gentle.os, "open", no_open)
    elif request.param == "refused at write":
        monkeypatch.setattr(gentle.os, "pwrite", no_write)
    yield


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize("size", [1, 4096, STEP_BYTES - 1, STEP_BYTES, 2 * STEP_BYTES + 5, ALLOCATE_BYTES + 4097])
@pytest.mark.parametrize("piece", [3000, STEP_BYTES + 77, 1 << 30])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("read_back", [False, True])
def test_what_is_written_comes_back(tmp_path: Path, size: int, piece: int, long: bool, read_back: bool) -> None:
    """Of any size, in any pieces, in short steps and long ones; the file is no longer than that."""
    steps = Steps()
    steps.take(0, long=long)
    memory = mmap(-1, size)
    memory.write(os.urandom(size))
    data = memoryview(memory)
    file = GentleFile(tmp_path / "one", steps, read_back=read_back)
    for start in range(0, size, piece):
        file.write(data[start : start + piece])
    file.sync()
    file.close()
    file.close()
    assert (tmp_path / "one").read_bytes() == bytes(data)
    assert b"".join(bytes(each) for each in read_through(tmp_path / "one", steps)) == bytes(data)


@pytest.mark.parametrize("size", [4096, STEP_BYTES, 5 * STEP_BYTES, 3 * ALLOCATE_BYTES])
@pytest.mark.parametrize("long", [False, True])
def test_blocks_beforehand_are_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, long: bool
) -> None:
    """At most as many again as are written, and no more than ALLOCATE_BYTES: the others are given back, and a disk that
    is told of them has work with each."""
    taking, taken = os.posix_fallocate, []

    def take(handle: int, start: int, length: int) -> None:
        assert start == sum(taken), "behind those before"
        taken.append(length)
        taking(handle, start, length)

    monkeypatch.setattr(gentle.os, "posix_fallocate", take)
    steps = Steps()
    steps.take(0, long=long)
    file = GentleFile(tmp_path / "one", steps, read_back=False)
    file.write(memoryview(mmap(-1, size)))
    file.sync()
    file.close()
    assert size <= sum(taken) <= size + min(size, ALLOCATE_BYTES)


def test_a_failed_write_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only "not possible" is answered by another way."""
    file = GentleFile(tmp_path / "one", Steps(), read_back=True)

    def full(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(gentle.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        file.write(memoryview(bytes(STEP_BYTES)))
    file.close()


@pytest.mark.parametrize("aligned", [False, True])
def test_a_disk_that_keeps_other_bytes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool) -> None:
    """One bit that is not as it was written: an error of the write, not of a reader years later."""
    writing = os.pwrite

    def flipped(handle: int, data: memoryview, at: int) -> int:
        written = writing(handle, data, at)
        os.preadv(handle, [page], at + 8192)
        page[100] ^= 1
        writing(handle, page, at + 8192)
        return written

    page = mmap(-1, 4096)
    data = memoryview(mmap(-1, STEP_BYTES + 8))[0 if aligned else 8 :][:STEP_BYTES]
    file = GentleFile(tmp_path / "one", Steps(), read_back=True)
    monkeypatch.setattr(gentle.os, "pwrite", flipped)
    with pytest.raises(OSError, match="not what was written"):
        file.write(data)
    file.close()


def test_steps_are_spread_until_somebody_may_hurry() -> None:
    """Half of the time that so many bytes take; whoever waits goes on at once when there is nobody to wait for."""
    steps = Steps()
    assert steps._freely.is_set()
    steps.take(STEP_BYTES * 50, long=False)
    assert (steps._pause_seconds, steps.bytes) == (0.01, STEP_BYTES)
    assert not steps._freely.is_set()
    steps.take(1, long=False)
    waiting = threading.Thread(target=steps.pause)
    waiting.start()
    steps.take(0, long=True)
    waiting.join(10)
    assert not waiting.is_alive()
    assert steps.long


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_file_is_given_back_step_by_step(tmp_path: Path, beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than SHRINK_BYTES between two syncs, so that a sync of another file waits for no more than that."""
    path, real = tmp_path / "one", os.fsync
    path.write_bytes(b"x" * (3 * SHRINK_BYTES + beyond))
    sizes = [path.stat().st_size]

    def fsync(handle: int) -> None:
        real(handle)
        sizes.append(os.fstat(handle).st_size)

    monkeypatch.setattr(gentle.os, "fsync", fsync)
    give_back(path)
    assert {before - after for before, after in pairwise(sizes)} == {SHRINK_BYTES}
    assert 0 < sizes[-1] <= SHRINK_BYTES
    assert not path.exists()
