"""Files beside a log: what is written comes back, whatever way it goes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from millpond.core.tier import gentle
from millpond.core.tier.gentle import ALLOCATE_BYTES, STEP_BYTES, GentleFile, read_through


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
def test_what_is_written_comes_back(tmp_path: Path, size: int, piece: int) -> None:
    """Of any size, in any pieces; the file is no longer than that."""
    memory = mmap(-1, size)
    memory.write(os.urandom(size))
    data = memoryview(memory)
    file = GentleFile(tmp_path / "one")
    for start in range(0, size, piece):
        file.write(data[start : start + piece])
    file.sync()
    file.close()
    file.close()
    assert (tmp_path / "one").read_bytes() == bytes(data)
    assert b"".join(bytes(each) for each in read_through(tmp_path / "one")) == bytes(data)


def test_a_failed_write_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only "not possible" is answered by another way."""
    file = GentleFile(tmp_path / "one")

    def full(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(gentle.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="full"):
        file.write(memoryview(bytes(STEP_BYTES)))
    file.close()
