"""A disk that fails or is full, under a running standalone.

Failing: the first fdatasync that returns EIO ends the process, loudly, and recovery brings back all that was
acknowledged. Full: messages are refused with 507, everything else goes on, and messages too once there is room.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checker import Checker
from support.cuts import SmallDisk
from support.load import FLUSHED, GROUPS, Http, Load
from support.processes import Process

Start = Callable[..., Process]
Client = Callable[[Process], Http]
MIB = 1 << 20
STRACE_SECONDS = 30
NTH = 60  # flush of the log that fails, and all after it


@pytest.fixture(scope="module")
def strace() -> list[str]:
    """The start of a command that fails system calls; skips where that is not permitted."""
    path = shutil.which("strace")
    if path is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run(  # noqa: S603  # found above
        [path, "-f", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", "/bin/true"],
        capture_output=True,
        check=False,
        timeout=STRACE_SECONDS,
    )
    if tried.returncode:
        pytest.skip(f"strace may not trace here: {tried.stderr.decode(errors='replace').strip()}")
    return [path, "-f", "--seccomp-bpf", "-qq"]


THREAD = ("inject=io_setup:error=EPERM", f"inject=fdatasync:error=EIO:when={NTH}+")
EVENT = struct.pack("<QQqq", NTH, 0, -errno.EIO, 0).hex()  # what io_getevents gives for the nth: io_event
KERNEL = (f"inject=io_getevents:poke_exit=@arg4={EVENT}:when={NTH}",)


@pytest.mark.parametrize("injected", [THREAD, KERNEL], ids=["thread", "kernel"])
async def test_a_failed_fdatasync_ends_the_process(
    strace: list[str], start: Start, tmp_path: Path, injected: tuple[str, ...]
) -> None:
    """EIO at the nth flush of the log: the process says so and ends with 1; nothing acknowledged is lost. By a thread
    where the kernel's asynchronous I/O is forbidden, else by the kernel."""
    trace = tmp_path / "trace"
    data = tmp_path / "data"
    faults = [word for fault in injected for word in ("-e", fault)]
    service = start(data=data, wrapper=[*strace, "-o", str(trace), *faults])
    await service.start()
    checker = Checker()
    async with Load(service.url, checker, (FLUSHED,)) as load:
        load.start()
        assert await service.exited() == 1
        assert all(f"{fault.split(':')[0].removeprefix('inject=')}(" in trace.read_text() for fault in injected)
        assert "INJECTED" in trace.read_text()
        checker.fault("EIO")
        assert "a part died" in service.log()
        assert "Input/output error" in service.log()
        service.wrapper.clear()
        await service.start()
        await load.acknowledged(300)
        await load.finish()
    checker.check(GROUPS, least=10, faults=1)


# -- a full disk -----------------------------------------------------------------------------------------------


@pytest.fixture
async def full(small_disk: SmallDisk, start: Start, client: Client) -> AsyncIterator[tuple[Http, Path]]:
    """Standalone on a disk that has been filled while it ran, until it refused a message; and the ballast."""
    service = await start(data=small_disk.path / "data").start()
    http = client(service)
    await http.ok("PUT", "/v1/topics/kept", {"queues": 1})
    await http.ok("PUT", "/v1/topics/kept/groups/readers", {"start": "earliest"})
    ballast = small_disk.ballast(leave_bytes=2 * MIB)
    yield http, ballast
    assert service.running, service.log()
    assert await service.stop() == 0, service.log()


async def produce_until_refused(http: Http) -> tuple[int, Any]:
    """How many messages of 100 KiB were taken, and the first refusal."""
    body = {"messages": [{"body": "x" * 102_400}]}
    for taken in range(1000):
        answer = await http.call("POST", "/v1/topics/kept/messages", body)
        if answer.outcome != "ok":
            return taken, answer
    raise AssertionError("the disk never got full")


async def test_a_full_disk_refuses_messages_only(full: tuple[Http, Path]) -> None:
    """507 disk_full with the remedy; receives, acks, reads and metrics go on; with room, produce comes back."""
    http, ballast = full
    taken, answer = await produce_until_refused(http)
    assert taken > 20
    assert (answer.status, answer.code) == (507, "disk_full")
    assert answer.body["retryable"] is True
    at = "/v1/topics/kept/groups/readers"
    seen = 0
    while seen < taken:
        got = await http.ok("POST", f"{at}/messages/receive", {"max_messages": 10, "lease_ms": 60_000})
        assert got["messages"], f"{seen} of {taken} were handed out"
        acks = {"acks": [one["lease_id"] for one in got["messages"]]}
        settled = await http.ok("POST", f"{at}/messages/ack", acks)
        assert {one["status"] for one in settled["results"]} == {"ok"}
        seen += len(got["messages"])
    assert (await http.ok("GET", f"{at}/lag"))["total"] == 0
    start, end, found = await http.whole("kept", 0)
    assert (start, end) == (0, taken)
    assert {len(one["body"]) for one in found} == {102_400}
    ready = await http.call("GET", "/readyz")
    assert ready.status == 503
    assert any("disk_full" in reason for reason in ready.body["reasons"])
    ballast.unlink()
    taken_again = 0
    for _ in range(100):
        answer = await http.call("POST", "/v1/topics/kept/messages", {"messages": [{"body": "after"}]})
        if answer.outcome == "ok":
            taken_again += 1
            if taken_again == 3:
                break
        else:
            assert answer.code in {"disk_full", "flush_behind"}, answer
            await http.call("GET", "/v1/topics/kept/queues/0/messages?tail=1&wait_ms=100")
    assert taken_again == 3
    assert (await http.queues("kept"))[0]["end_offset"] == taken + 3, "what was refused has no offset"


async def test_a_full_disk_survives_a_kill(small_disk: SmallDisk, start: Start, client: Client) -> None:
    """Killed while full and started while full: what was acknowledged is read, messages are still refused."""
    service = await start(data=small_disk.path / "data").start()
    http = client(service)
    await http.ok("PUT", "/v1/topics/kept", {"queues": 1})
    ballast = small_disk.ballast(leave_bytes=2 * MIB)
    taken, answer = await produce_until_refused(http)
    assert answer.code == "disk_full"
    service.kill()
    await service.start()
    start_offset, end, _ = await http.whole("kept", 0)
    assert (start_offset, end) == (0, taken)
    again = await http.call("POST", "/v1/topics/kept/messages", {"messages": [{"body": "x" * 102_400}]})
    assert again.code in {"disk_full", "flush_behind"}, again
    ballast.unlink()


async def test_a_disk_too_small_to_start_on(small_disk: SmallDisk, start: Start) -> None:
    """No room for the first segment: one line that says so."""
    small_disk.ballast(leave_bytes=MIB)
    service = start(data=small_disk.path / "data")
    service.launch()
    assert await service.exited() == 1
    lines = service.log().splitlines()
    assert len(lines) == 1, service.log()
    assert "disk is full" in lines[0]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory that nobody may write, root neither: mounted read-only."""
    path = tmp_path / "read-only"
    path.mkdir()
    if os.geteuid():
        path.chmod(0o500)
        yield path
        path.chmod(0o700)
        return
    for command in (["mount", "--bind", str(path), str(path)], ["mount", "-o", "remount,bind,ro", str(path)]):
        done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=STRACE_SECONDS)  # noqa: S603
        if done.returncode:
            pytest.skip(f"no read-only mount here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=STRACE_SECONDS)  # noqa: S603, S607


@pytest.mark.parametrize("data", [".", "new"])
async def test_a_read_only_directory(read_only: Path, start: Start, data: str) -> None:
    """As the data directory, or as its parent: one line with the remedy."""
    service = start(data=read_only / data)
    service.launch()
    assert await service.exited() == 1
    lines = service.log().splitlines()
    assert len(lines) == 1, service.log()
    assert str(read_only) in lines[0]
    reason = lines[0].replace(str(read_only), "")
    assert "ead-only file system" in reason or "ermission denied" in reason
