"""What every benchmark shares: a service of its own in a fresh directory, and repeated, interleaved runs.

Run from the repository: `python -m benchmarks` (`make bench`). Figures are medians over interleaved runs, and stand
beside the machine's own limits measured in the same run; a ratio counts, not a figure.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Literal, NamedTuple

import msgspec

from benchmarks import children
from benchmarks.process import Memory, discarded, family_cpu_seconds
from millpond.core.clock import SystemClock

START_SECONDS = 60.0
STOP_SECONDS = 60.0
QUIET_SECONDS = 0.25  # a process that takes next to nothing for so long has no backlog
QUIET_SHARE = 0.08  # of a core
SETTLE_SECONDS = 30.0  # .. but no longer is waited for it


class Setup(msgspec.Struct, frozen=True):
    """How long and how often each is measured, and with what."""

    seconds: float = 4.0
    rounds: int = 3
    message_bytes: int = 1024
    queues: int = 4
    connections: int = 64
    per_second: int = 1000
    folder: str = ""
    backlog: int = 10_000_000
    fill_queues: int = 10_000
    fill_messages: int = 10_000_000


class Aim(msgspec.Struct, frozen=True):
    """What a figure should be: at least or at most so much; of the median itself, or of its ratio to the limit, or of
    its difference to the limit."""

    at_least: float | None = None
    at_most: float | None = None
    of: Literal["ratio", "value", "difference"] = "ratio"


class Line(msgspec.Struct, frozen=True):
    """One measurement: `values` of its rounds in `unit`; `limit` names the line it is compared with.

    Lines of the same `work` by different systems (`who`) stand in one chart. `aim` puts a line into the page's table
    of aims.
    """

    name: str
    unit: str
    values: list[float]
    limit: str = ""
    note: str = ""
    aim: Aim | None = None
    work: str = ""
    who: str = "millpond"

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Service(NamedTuple):
    """A running `millpond standalone`: its address, its data directory, its process, and what memory it takes."""

    url: str
    data: str
    pid: int
    memory: Memory


most_mib: list[float] = []  # the greatest anonymous memory of each service that has ended


def standalone(data: str, *options: str) -> list[str]:
    """The command of a service over the directory `data`, at a free port."""
    return [sys.executable, "-m", "millpond", "standalone", "--data", data, "--port", "0", *options]


@asynccontextmanager
async def service(folder: str, *options: str) -> AsyncIterator[Service]:
    """A `millpond standalone` with these command line options, in a fresh directory below `folder` (default: the
    system's)."""
    with tempfile.TemporaryDirectory(prefix="millpond-bench-", dir=folder or None) as data:
        command = standalone(f"{data}/data", "--log-level", "warning", *options)
        async with children.running(*command, friendly_seconds=STOP_SECONDS) as process:
            url = await address_of(process)
            memory = Memory(process.pid)
            try:
                yield Service(url, f"{data}/data", process.pid, memory)
            finally:
                await memory.close()
                most_mib.append(memory.most_mib)


async def address_of(process: asyncio.subprocess.Process) -> str:
    """Where a service that was just started listens, once it is ready."""
    assert process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        async for line in process.stdout:
            if line.startswith(b"ready "):
                return line.split()[1].decode()
    raise RuntimeError("the service did not start: see above")


async def interleaved(
    rounds: int,
    runs: Mapping[str, Callable[[], Awaitable[float]]],
    tell: Callable[[str], None],
    settle: Callable[[], Awaitable[object]] | None = None,
    warm: bool = False,
) -> dict[str, list[float]]:
    """Each of `runs` once a round, so that a change of the machine's mood meets all of them; `settle` before each, so
    that none pays for what the one before it left. `warm`: a round before them that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(0 if warm else 1, rounds + 1):
        for name, run in runs.items():
            tell(f"{name}, round {number} of {rounds}" if number else f"{name}, warming up")
            if settle is not None:
                await settle()
            figure = await run()
            if number:
                found[name].append(figure)
    return found


async def settled(*pids: int) -> bool:
    """Wait until the disk has what was written so far and has forgotten what was unlinked, and these processes have
    nothing to do; False when that took too long. What a round leaves behind (dirty pages, batches to be sealed,
    garbage, blocks to be discarded) is not the next one's bill.
    """
    clock = SystemClock()
    until = clock.monotonic() + SETTLE_SECONDS
    await asyncio.to_thread(os.sync)
    before, forgotten = _cpu_seconds(pids), discarded()
    while clock.monotonic() < until:
        await asyncio.sleep(QUIET_SECONDS)
        now, gone = _cpu_seconds(pids), discarded()
        if now - before <= QUIET_SECONDS * QUIET_SHARE * max(1, len(pids)) and gone == forgotten:
            return True
        before, forgotten = now, gone
    return False


def _cpu_seconds(pids: Iterable[int]) -> float:
    return sum(map(family_cpu_seconds, pids))
