"""What only a directory must do: hold its promise across a power cut, and say clearly why it cannot write."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.errors import NotFound, Unavailable
from millpond.core.limits import OBJECT_TEMPORARY_MS
from millpond.core.tier.directory import DirectoryObjects
from millpond.core.tier.gentle import STEP_BYTES


@pytest.fixture
async def objects(tmp_path: Path) -> AsyncIterator[DirectoryObjects]:
    objects = DirectoryObjects(tmp_path / "tier", SystemClock(), SystemRandom())
    yield objects
    await objects.close()


async def put(objects: DirectoryObjects, key: str, data: bytes) -> None:
    await objects.put_new(key, data, hashlib.sha256(data).hexdigest())


def fail(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, refuse)


async def test_the_order_of_a_put(objects: DirectoryObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are durable before the name exists, and the name before the call returns: every directory is synced."""
    calls: list[str] = []
    fsync, link = os.fsync, os.link

    def record_fsync(handle: int) -> None:
        path = str(Path(f"/proc/self/fd/{handle}").readlink()).removeprefix(str(tmp_path))
        calls.append("sync " + ("file" if path.startswith("/tier/.tmp/") else path))
        fsync(handle)

    def record_link(source: Any, target: Any) -> None:
        calls.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "link", record_link)
    await put(objects, "v1/a/x", b"data")
    assert calls == ["sync ", "sync /tier", "sync /tier/v1", "sync /tier", "sync file", "link", "sync /tier/v1/a"]


@pytest.mark.parametrize("step", ["fsync", "link"])
@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission")]
)
async def test_a_disk_that_refuses(
    objects: DirectoryObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, reason: str
) -> None:
    """A full or read-only disk is tier_unavailable with the reason in words; nothing half-written stays."""
    await put(objects, "v1/there", b"1")
    with monkeypatch.context() as patch:
        fail(patch, step, number)
        with pytest.raises(Unavailable) as refused:
            await put(objects, "v1/k", b"data")
        assert refused.value.code == "tier_unavailable"
        assert reason in refused.value.detail
        with pytest.raises(Unavailable, match=reason):
            await objects.check()
    with pytest.raises(NotFound):
        await objects.get("v1/k")
    assert list((tmp_path / "tier" / ".tmp").iterdir()) == []
    await put(objects, "v1/k", b"data")


async def test_a_root_that_cannot_be(tmp_path: Path) -> None:
    """A root below a file is refused in words."""
    (tmp_path / "file").write_bytes(b"")
    objects = DirectoryObjects(tmp_path / "file" / "tier", SystemClock(), SystemRandom())
    with pytest.raises(Unavailable, match="not a directory"):
        await objects.check()
    await objects.close()


async def test_what_a_crash_left_is_swept(objects: DirectoryObjects, tmp_path: Path) -> None:
    """A temporary file of a day ago is nobody's; a young one may be another process's work."""
    await objects.check()
    folder = tmp_path / "tier" / ".tmp"
    for name, age_ms in (("old", OBJECT_TEMPORARY_MS + 60_000), ("young", 60_000)):
        (folder / name).write_bytes(b"half")
        stamp = SystemClock().wall_ms() / 1000 - age_ms / 1000
        os.utime(folder / name, (stamp, stamp))
    await objects.check()
    assert [path.name for path in folder.iterdir()] == ["young"]
    assert await objects.list("") == []


async def test_head_sees_the_bytes_that_are_there(objects: DirectoryObjects, tmp_path: Path) -> None:
    """The checksum is of the file's content, not of what somebody once claimed."""
    await put(objects, "k", b"data")
    (tmp_path / "tier" / "k").write_bytes(b"dama")
    assert (await objects.head("k")).sha256 == hashlib.sha256(b"dama").hexdigest()


async def test_a_large_object_is_put_in_steps(objects: DirectoryObjects, tmp_path: Path) -> None:
    """What takes several steps, the last one short, is there byte by byte, also when it is a view."""
    data = bytes(range(256)) * (3 * 4096) + b"end"
    await objects.put_new("v1/large", memoryview(data), hashlib.sha256(data).hexdigest())
    assert await objects.get("v1/large") == data
    assert (await objects.head("v1/large")).bytes == len(data)


@pytest.mark.parametrize("size", [0, 10, 256 * 1024, 256 * 1024 + 1, 1_000_003])
async def test_any_part_of_an_object(objects: DirectoryObjects, size: int) -> None:
    """Small or of many steps; what is behind its end is not there."""
    data = os.urandom(size)
    await put(objects, "v1/a/x", data)
    for first, end in [(0, None), (0, size), (size // 3, None), (size // 3, size // 2), (1, size + 100)]:
        assert bytes(await objects.get("v1/a/x", first, end)) == data[first:end]


async def test_a_staged_object_that_is_dropped(objects: DirectoryObjects, tmp_path: Path) -> None:
    """Nothing of it stays, and nothing more can be written or published."""
    staged = objects.stage()
    await asyncio.to_thread(staged.write, memoryview(b"half"))
    assert len(list((tmp_path / "tier" / ".tmp").iterdir())) == 1
    await asyncio.to_thread(staged.drop)
    with pytest.raises(Unavailable):
        await asyncio.to_thread(staged.write, memoryview(b"more"))
    with pytest.raises(Unavailable):
        await staged.publish("v1/k", "")
    assert list((tmp_path / "tier" / ".tmp").iterdir()) == []
    assert await objects.list("") == []


async def test_a_write_under_way_keeps_its_file(
    objects: DirectoryObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is dropped while a thread still writes goes when that write has ended: its handle is no other's before."""
    staged = objects.stage()
    begun, go = threading.Event(), threading.Event()
    write, handles = os.pwrite, []

    def slow(handle: int, data: Any, at: int) -> int:
        begun.set()
        assert go.wait(10)
        handles.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        return write(handle, data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    writing = asyncio.create_task(asyncio.to_thread(staged.write, memoryview(bytes(STEP_BYTES))))
    await asyncio.to_thread(begun.wait, 10)
    await asyncio.to_thread(staged.drop)
    go.set()
    await writing
    assert [str(tmp_path / "tier" / ".tmp") in one for one in handles] == [True]
    assert list((tmp_path / "tier" / ".tmp").iterdir()) == []


async def test_a_staged_object_and_a_full_disk(
    objects: DirectoryObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason in words; nothing half-written stays."""
    staged = objects.stage()
    with monkeypatch.context() as patch:
        fail(patch, "posix_fallocate", errno.ENOSPC)
        with pytest.raises(Unavailable, match="disk is full"):
            await asyncio.to_thread(staged.write, memoryview(bytes(STEP_BYTES)))
    await asyncio.to_thread(staged.drop)
    assert list((tmp_path / "tier" / ".tmp").iterdir()) == []
