"""fdatasync by the kernel alone: what is said of it, and where there is none."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millpond.core.threads import Threads
from millpond.store import kernel_sync
from millpond.store.disk import SystemFile
from millpond.store.kernel_sync import KernelSync, Syncs

SECONDS = 10


@pytest.fixture
async def kernel() -> AsyncIterator[KernelSync]:
    try:
        opened = KernelSync.open()
    except OSError as error:
        pytest.skip(f"this kernel takes no asynchronous fdatasync: {error}")
    yield opened
    opened.close()


async def test_each_sync_ends_by_itself(kernel: KernelSync, tmp_path: Path) -> None:
    """One after another, each told once it is done."""
    with (tmp_path / "file").open("wb") as file:
        for _ in range(50):
            file.write(b"x" * 5000)
            file.flush()
            future = kernel.sync(file.fileno())
            assert future is not None
            assert not future.done()
            await asyncio.wait_for(future, SECONDS)


async def test_what_the_kernel_does_not_take_has_not_begun(kernel: KernelSync) -> None:
    """A pipe has nothing to be synced, and a closed file nobody to ask: a thread says which error that is."""
    end, other = os.pipe()
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        kernel.sync(end)
    os.close(end)
    os.close(other)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        kernel.sync(end)


async def test_an_error_is_that_of_fdatasync(kernel: KernelSync, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel says of a sync that failed is raised; `io_getevents` is told to say so here."""
    syscall = kernel._syscall

    def failing(number: int, *rest: object) -> int:
        count = int(syscall(number, *rest))
        if number == kernel._calls.getevents:
            kernel._events[0].res = -errno.EIO
        return count

    monkeypatch.setattr(kernel, "_syscall", failing)
    file = os.memfd_create("file")
    os.write(file, b"x")
    future = kernel.sync(file)
    assert future is not None
    with pytest.raises(OSError, match="Input/output error") as raised:
        await asyncio.wait_for(future, SECONDS)
    assert raised.value.errno == errno.EIO
    os.close(file)


@pytest.mark.parametrize(("number", "ends"), [(errno.EPERM, True), (errno.EINTR, False)])
async def test_a_kernel_that_does_not_say_how_it_went_is_an_error(
    kernel: KernelSync, monkeypatch: pytest.MonkeyPatch, number: int, ends: bool
) -> None:
    """A sandbox may forbid `io_getevents` alone: nobody waits for ever. Interrupted, there was nothing to say yet."""

    def refused(call: int, *_: object) -> int:
        ctypes.set_errno(number)
        return 1 if call == kernel._calls.submit else -1

    monkeypatch.setattr(kernel, "_syscall", refused)
    future = kernel.sync(0)
    assert future is not None
    os.eventfd_write(kernel._told, 1)
    kernel._look()
    assert future.done() == ends
    if ends:
        with pytest.raises(PermissionError):
            await future


async def test_who_left_is_told_nothing(kernel: KernelSync, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a sync whose caller was cancelled is not taken for that of the next one."""
    ended: list[int] = []

    def slow(number: int, *_: object) -> int:
        if number == kernel._calls.submit:
            return 1
        kernel._events[0].data, kernel._events[0].res = ended.pop(), 0
        return 1

    def end(sync: int) -> None:
        ended.append(sync)
        os.eventfd_write(kernel._told, 1)
        kernel._look()

    monkeypatch.setattr(kernel, "_syscall", slow)
    left = kernel.sync(0)
    assert left is not None
    left.cancel()
    following = kernel.sync(0)
    assert following is not None
    end(1)
    assert not following.done()
    end(2)
    await asyncio.wait_for(following, SECONDS)


async def test_it_says_so_where_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor, or a sandbox that forbids `io_setup`: said, and no descriptor is left behind."""
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        KernelSync.open()
    monkeypatch.undo()
    before = sorted(Path("/proc/self/fd").iterdir())
    unknown = kernel_sync._Calls(setup=100_000, destroy=0, getevents=0, submit=0)
    monkeypatch.setitem(kernel_sync._CALLS, platform.machine(), unknown)
    with pytest.raises(OSError, match="io_setup"):
        KernelSync.open()
    assert sorted(Path("/proc/self/fd").iterdir()) == before


async def test_a_thread_syncs_where_the_kernel_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel is asked once, and the log says once who does it."""
    asked: list[str] = []

    def refused() -> KernelSync:
        asked.append("kernel")
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(KernelSync, "open", refused)
    caplog.set_level("INFO", "millpond.store")
    synced: list[str] = []
    file = SystemFile(tmp_path / "file", create=True)
    monkeypatch.setattr(file, "sync", lambda: synced.append(threading.current_thread().name))
    threads = Threads(1, "syncing")
    syncs = Syncs(threads)
    for _ in range(2):
        await asyncio.wait_for(syncs.sync(file), SECONDS)
    syncs.close()
    threads.close(wait=False)
    file.close()
    assert synced == ["syncing_0"] * 2
    assert asked == ["kernel"]
    assert [line.split(":")[0] for line in caplog.messages] == ["flushes go through a thread"]


@pytest.mark.parametrize(
    ("error", "asked", "said"),
    [(errno.EAGAIN, 2, []), (errno.EPERM, 1, ["flushes go through a thread"])],
    ids=["busy", "forbidden"],
)
async def test_a_thread_syncs_what_the_kernel_refuses(
    kernel: KernelSync,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
    asked: int,
    said: list[str],
) -> None:
    """A busy kernel is asked again. One that forbids `io_submit` alone is not, and the log says so once."""
    calls: list[int] = []

    def refused(number: int, *_: object) -> int:
        calls.append(number)
        ctypes.set_errno(error)
        return -1

    monkeypatch.setattr(kernel, "_syscall", refused)
    monkeypatch.setattr(KernelSync, "open", lambda: kernel)
    caplog.set_level("INFO", "millpond.store")
    file = SystemFile(tmp_path / "file", create=True)
    synced: list[str] = []
    monkeypatch.setattr(file, "sync", lambda: synced.append(threading.current_thread().name))
    threads = Threads(1, "syncing")
    syncs = Syncs(threads)
    for _ in range(2):
        await asyncio.wait_for(syncs.sync(file), SECONDS)
    threads.close(wait=False)
    file.close()
    assert synced == ["syncing_0"] * 2
    assert len(calls) == asked
    assert [line.split(":")[0] for line in caplog.messages] == said


async def test_no_thread_syncs_what_the_kernel_does(kernel: KernelSync, tmp_path: Path) -> None:
    """`kernel` is asked for only to say whether this one has it."""
    threads = Threads(1, "syncing")
    syncs = Syncs(threads)
    threads.close()  # from here on a call of theirs raises
    file = SystemFile(tmp_path / "file", create=True)
    file.write(0, [b"x"])
    await asyncio.wait_for(syncs.sync(file), SECONDS)
    syncs.close()
    file.close()


def test_what_the_kernel_reads_has_its_size() -> None:
    """As linux/aio_abi.h says."""
    assert (ctypes.sizeof(kernel_sync._Iocb), ctypes.sizeof(kernel_sync._Event)) == (64, 32)
