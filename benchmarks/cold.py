"""A consumer that reads old data as fast as it can, beside a producer at a steady rate.

Two services with the same `OLD_BYTES`: one has all of it in its local log (hot), the other only what `--local-bytes`
leaves, so that what is read there comes from the tier (sealed). A reader in a process of its own goes through the old
topic again and again while a probe produces to another topic. Two processes beside the service on the same cores: so
also with a process that only turns a core, as a reader that costs the service nothing would; and with a second one at
a lower priority, as the service's decoding for a reader of the tier is.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from benchmarks import children, filling, harness, probe
from benchmarks.harness import Aim, Line, Service, Setup
from benchmarks.probe import Probe
from millpond.client.connection import Connection
from millpond.client.reader import Reader
from millpond.client.topics import Topics
from millpond.core.clock import SystemClock
from millpond.core.limits import MIB, READ_MESSAGES
from millpond.core.priority import LATER

OLD_BYTES = 1_500_000_000
LOCAL_BYTES = 512 * MIB  # so that the oldest GB is in the tier only
QUEUES = 4
OLD, NEW = "old", "new"
RECYCLED_SECONDS = 90.0
BUSY, NICE = "busy", "nice"  # processes that only turn a core


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """Produce quantiles beside those with no reader; MB/s of the reader."""
    local = ("--local-bytes", str(LOCAL_BYTES))
    async with harness.service(setup.folder) as hot, harness.service(setup.folder, *local) as sealed:
        tell(f"filling {2 * OLD_BYTES / 1e9:.1f} GB")
        for service in (hot, sealed):
            await _prepare(service, setup)
        await _recycled(sealed)
        cases: dict[str, tuple[str, list[str]]] = {
            "alone": (hot.url, []),
            "beside a reader, hot": (hot.url, [hot.url]),
            "beside a reader, sealed": (sealed.url, [sealed.url]),
            "beside a busy process": (hot.url, [BUSY]),
            "beside a busy and a nice process": (hot.url, [BUSY, NICE]),
        }
        found: dict[str, list[Probe]] = {name: [] for name in cases}
        rates: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(setup.rounds):
            for name, (url, others) in cases.items():
                tell(f"{name}, round {number + 1} of {setup.rounds}")
                one, rate = await _beside(others, url, setup)
                found[name].append(one)
                rates[name].append(rate)
    alone = next(iter(cases))
    lines = [
        Line(
            f"produce {field[:3]}, {name}", "ms", [getattr(one.produce, field) for one in probes],
            f"produce {field[:3]}, {alone}" if name != alone else "",
            aim=Aim(at_most=1.5) if "reader" in name and field == "p99_ms" else None,
        )
        for field in ("p50_ms", "p99_ms")
        for name, probes in found.items()
    ]  # fmt: skip
    return lines + [Line(name.removeprefix("beside a "), "MB/s", rates[name]) for name in list(cases)[1:3]]


async def _prepare(service: Service, setup: Setup) -> None:
    async with Connection(service.url) as connection:
        await filling.create(connection, [OLD], QUEUES, "memory")
        await filling.create(connection, [NEW], QUEUES, "flush")
        await filling.fill_topic(service.url, OLD, OLD_BYTES // setup.message_bytes, setup.message_bytes, QUEUES)
        await Topics(connection).flush(OLD)


async def _recycled(service: Service) -> None:
    """Until the local log is no larger than it may be."""
    log = Path(service.data) / "store" / "log"
    async with asyncio.timeout(RECYCLED_SECONDS):
        while sum(file.stat().st_size for file in log.glob("*.seg")) > LOCAL_BYTES + 256 * MIB:  # noqa: ASYNC110
            await asyncio.sleep(0.5)


async def _beside(others: Sequence[str], url: str, setup: Setup) -> tuple[Probe, float]:
    """What the probe finds, and MB/s of the reader when that is the other."""
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(children.running(sys.executable, "-m", "benchmarks.cold", one))
            for one in others
        ]
        one = await probe.steady(url, NEW, setup.seconds, setup.per_second, setup.message_bytes)
        out = b""
        for process in processes:
            process.terminate()
            out = (await process.communicate())[0]
    return one, float(out.split()[-1]) if out.split() else 0.0


async def _read_on(url: str) -> None:
    """Read the old topic from its start, queue after queue, over and over; a line of MB/s so far after each page."""
    clock = SystemClock()
    begin, taken = clock.monotonic(), 0
    async with Connection(url) as connection:
        while True:
            for queue in range(QUEUES):
                async for page in Reader(connection, OLD, queue).pages(offset=0, limit=READ_MESSAGES):
                    taken += page.messages.nbytes
                    sys.stdout.write(f"{taken / 1e6 / (clock.monotonic() - begin):.1f}\n")
                    sys.stdout.flush()
                    if url and page.start_offset * QUEUES * 1024 > OLD_BYTES // 2:
                        break  # the newer half may still be local


def _turn(niceness: int) -> None:
    os.nice(niceness)
    while True:
        pass


if __name__ == "__main__":
    if sys.argv[1] in {BUSY, NICE}:
        _turn(LATER if sys.argv[1] == NICE else 0)
    uvloop.run(_read_on(sys.argv[1]))
