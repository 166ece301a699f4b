"""Long polls that wait: what 5,000 of them take, and how soon a message reaches one of 100.

A poll is a kept-alive connection with a receive of 30 s, renewed when it ends, as a consumer does it. The polls begin
spread over 30 s; what is counted are 30 s once the service has tidied up behind that, so they hold one renewal of each.
They come from a process of its own (`python -m benchmarks.waiting URL CONNECTIONS`), in groups of 50 over as many
topics. The limit beside it: the same polls of a handler that does nothing else.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import numpy as np
import uvloop

from benchmarks import children, filling, harness, limits
from benchmarks.harness import Aim, Line, Setup
from benchmarks.process import anonymous_mib, cpu_seconds
from millpond.client.connection import Connection
from millpond.core.clock import SystemClock
from millpond.memory import LOOK_SECONDS

POLLS, WAITING, TOPICS, PER_GROUP = 5_000, 100, 100, 50
WAIT_MS = 30_000
CALM_SECONDS = WAIT_MS / 1000
TIDIED_SECONDS = 2.5 * LOOK_SECONDS
PER_SECOND = 100  # messages to those that wait
OPEN_FILES = 16_384
ONLY_WAITS = f"handler that only waits, {POLLS:,} polls"


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """MiB and % of a core for 5,000 polls; quantiles of the time from before a produce to the poll's answer."""
    _raise_open_files()
    async with harness.service(setup.folder) as service:
        async with Connection(service.url) as connection:
            await filling.create(connection, (f"t{number}" for number in range(TOPICS)), 1, "memory")
            await _visited(connection)
        await asyncio.sleep(1.0)
        before = anonymous_mib(service.pid)
        share, memory = await _held(service.pid, service.url, "long polls", tell)
        times = []
        for number in range(setup.rounds):
            tell(f"arrival to answer, {WAITING} waiting, round {number + 1} of {setup.rounds}")
            async with Connection(service.url) as connection:
                times.append(await _arrivals(connection, number, setup))
    async with limits.waiting(CALM_SECONDS) as handler:
        least, _ = await _held(handler.pid, handler.url, "polls of a handler that only waits", tell)
    note = f"{POLLS:,} polls of {CALM_SECONDS:.0f} s"
    return [
        Line(f"memory with {POLLS:,} long polls (RssAnon)", "MiB", [memory], note=note, aim=_at_most(300)),
        Line("memory before them (RssAnon)", "MiB", [before]),
        Line(f"{POLLS:,} long polls", "% of a core", [share], ONLY_WAITS, note=note, aim=_at_most(2)),
        Line(ONLY_WAITS, "% of a core", [least]),
        *(
            Line(f"arrival to answer {name}, {WAITING} waiting", "ms", [float(np.quantile(one, q)) for one in times])
            for name, q in (("p50", 0.5),)
        ),
        Line(
            f"arrival to answer p99, {WAITING} waiting", "ms", [float(np.quantile(one, 0.99)) for one in times],
            aim=_at_most(10),
        ),
    ]  # fmt: skip


async def _held(pid: int, url: str, what: str, tell: Callable[[str], None]) -> tuple[float, float]:
    """% of a core that a process takes while so many polls wait there, and its MiB."""
    tell(f"{POLLS:,} {what} begin over {CALM_SECONDS:.0f} s, then wait as long")
    async with _polls(url, POLLS):
        await asyncio.sleep(TIDIED_SECONDS)
        began = cpu_seconds(pid)
        await asyncio.sleep(CALM_SECONDS)
        return 100 * (cpu_seconds(pid) - began) / CALM_SECONDS, anonymous_mib(pid)


def _at_most(value: float) -> Aim:
    return Aim(at_most=value, of="value")


def _raise_open_files() -> None:
    """For this process and those it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _path(topic: int) -> str:
    return f"/v1/topics/t{topic}/groups/g/messages/receive"


async def _visited(connection: Connection) -> None:
    """Every group is there."""
    for topic in range(TOPICS):
        await connection.json("POST", _path(topic), {"wait_ms": 0})


@asynccontextmanager
async def _polls(url: str, connections: int) -> AsyncIterator[Process]:
    """That many polls wait."""
    async with children.running(sys.executable, "-m", "benchmarks.waiting", url, str(connections)) as process:
        assert process.stdout is not None
        async with asyncio.timeout(2 * CALM_SECONDS):
            assert await process.stdout.readline() == b"waiting\n", "the polls failed: see above"
        yield process


async def _arrivals(connection: Connection, number: int, setup: Setup) -> list[float]:
    """Milliseconds from before a message is produced to the end of the answer that holds it."""
    clock = SystemClock()
    sent: dict[str, float] = {}
    took: list[float] = []
    group = f"/v1/topics/t0/groups/arrivals{number}/messages/receive"

    asked = {"wait_ms": WAIT_MS, "lease_ms": 60_000}

    async def poll() -> None:
        while True:
            found = await connection.json("POST", group, asked, timeout_seconds=2 * CALM_SECONDS)
            now = clock.monotonic()
            took.extend((now - sent.pop(one["body"])) * 1000 for one in found["messages"] if one["body"] in sent)

    await connection.json("POST", group, {"wait_ms": 0})
    polls = [asyncio.create_task(poll()) for _ in range(WAITING)]
    await asyncio.sleep(1.0)
    begin = clock.monotonic()
    for at in range(int(setup.seconds * PER_SECOND)):
        await asyncio.sleep(max(0.0, begin + at / PER_SECOND - clock.monotonic()))
        body = f"{number}-{at}"
        sent[body] = clock.monotonic()
        await connection.json("POST", "/v1/topics/t0/messages", {"messages": [{"body": body}]})
    await asyncio.sleep(0.5)
    for one in polls:
        one.cancel()
    await asyncio.wait(polls)
    assert len(took) == int(setup.seconds * PER_SECOND), f"{len(took)} messages reached a poll"
    return took


class _Poll(asyncio.Protocol):
    """Sends its request again when the answer is there."""

    def __init__(self, request: bytes) -> None:
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        assert data.startswith(b"HTTP/1.1 200"), data
        self._transport.write(self._request)


async def _hold(url: str, connections: int) -> None:
    where = urlsplit(url)
    body = b'{"wait_ms":%d}' % WAIT_MS
    loop = asyncio.get_running_loop()
    begin = loop.time()
    for number in range(connections):
        head = (
            f"POST {_path(number // PER_GROUP % TOPICS)} HTTP/1.1\r\nHost: {where.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await loop.create_connection(partial(_Poll, head.encode() + body), where.hostname or "", where.port or 80)
        await asyncio.sleep(max(0.0, begin + CALM_SECONDS * number / connections - loop.time()))
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_hold(sys.argv[1], int(sys.argv[2])))
