"""The machine's own limits: what no service on it can pass. Each figure is one round.

nothing       an aiohttp low-level handler that reads the body and answers 200, in a process of its own
waiting       the same, which waits before it answers; waits that end at about the same time end together, as ours do
pwrite        16 MiB blocks into a fresh file, each followed by fdatasync
fdatasync     of one 4 KiB write
crc32c        of 16 MiB blocks in memory
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import IO, NamedTuple

import google_crc32c
import uvloop
from aiohttp import web

from benchmarks import children
from benchmarks.harness import Line, Setup
from millpond.core.clock import SystemClock
from millpond.core.limits import KEEP_FREED
from millpond.store.waiters import Ends, Waiter

FDATASYNC = "fdatasync 4 KiB"
START_SECONDS = 30.0
BLOCK = 16 * 1024 * 1024
FILE_BYTES = 512 * 1024 * 1024


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """The limits that no kind of work measures beside itself."""
    tell("fdatasync, CRC32C")
    return [
        Line(FDATASYNC, "ms", [fdatasync(setup.folder) for _ in range(setup.rounds)]),
        Line("CRC32C, one core", "MB/s", [crc32c() for _ in range(setup.rounds)]),
    ]


class Handler(NamedTuple):
    """A process of its own, and where it listens."""

    url: str
    pid: int


def nothing() -> AbstractAsyncContextManager[Handler]:
    """A handler that does nothing."""
    return answering("benchmarks.limits")


def waiting(seconds: float) -> AbstractAsyncContextManager[Handler]:
    """A handler that waits so long before it answers."""
    return answering("benchmarks.limits", str(seconds))


@asynccontextmanager
async def answering(module: str, *arguments: str) -> AsyncIterator[Handler]:
    """A module's `answer`. It keeps its memory: bodies of 1.4 MB that glibc gives back cost half of its rate."""
    async with children.running(sys.executable, "-m", module, *arguments, env=KEEP_FREED) as process:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            address = (await process.stdout.readline()).decode().strip()
        yield Handler(address, process.pid)


async def answer(handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
    """Have requests to a free port of loopback handled, and print where; for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    await asyncio.get_running_loop().create_server(web.Server(handle), sock=listener)
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def pwrite(folder: str) -> float:
    """MB/s (10**6) of 16 MiB blocks with fdatasync into a fresh file."""
    block = os.urandom(BLOCK)

    def write(file: IO[bytes]) -> None:
        for at in range(0, FILE_BYTES, BLOCK):
            os.pwrite(file.fileno(), block, at)
            os.fdatasync(file.fileno())

    return FILE_BYTES / 1e6 / _timed(folder, write)


def fdatasync(folder: str, times: int = 200) -> float:
    """Milliseconds of one 4 KiB write with fdatasync, the median."""
    clock = SystemClock()
    took = []
    with tempfile.TemporaryFile(dir=folder or None) as file:
        for number in range(times):
            begin = clock.monotonic()
            os.pwrite(file.fileno(), b"x" * 4096, number * 4096)
            os.fdatasync(file.fileno())
            took.append(clock.monotonic() - begin)
    return sorted(took)[times // 2] * 1000


def crc32c() -> float:
    """MB/s (10**6) of one core."""
    block = os.urandom(BLOCK)
    clock = SystemClock()
    begin = clock.monotonic()
    for _ in range(16):
        google_crc32c.value(block)
    return 16 * BLOCK / 1e6 / (clock.monotonic() - begin)


def _timed(folder: str, work: Callable[[IO[bytes]], None]) -> float:
    clock = SystemClock()
    with tempfile.TemporaryFile(dir=folder or None) as file:
        begin = clock.monotonic()
        work(file)
        return clock.monotonic() - begin


async def _nothing(request: web.BaseRequest) -> web.Response:
    await request.read()
    return web.Response(body=b'{"results":[]}', content_type="application/json")


async def _waits(seconds: float) -> None:
    ends, loop = Ends(), asyncio.get_running_loop()

    async def wait(request: web.BaseRequest) -> web.Response:
        await request.read()
        over: asyncio.Future[bool | Exception] = loop.create_future()
        waiter = Waiter([])
        waiter.rises = over.set_result
        ends.add(waiter, seconds)
        try:
            await over
        finally:
            waiter.get_up()
        return web.Response(body=b'{"messages":[]}', content_type="application/json")

    await answer(wait)


if __name__ == "__main__":
    uvloop.run(_waits(float(sys.argv[1])) if len(sys.argv) > 1 else answer(_nothing))
