"""What every benchmark shares: a service of its own in a fresh directory, repeated runs, one table, one JSON file.

Run from the repository: `python -m benchmarks` (`make bench`). Figures are medians over interleaved runs, and stand
beside the machine's own limits measured in the same run; a ratio counts, not a figure.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.process import Memory
from millpond.core.clock import SystemClock

START_SECONDS = 60.0
STOP_SECONDS = 60.0
RESULTS = Path(__file__).parent / "results"


class Setup(msgspec.Struct, frozen=True):
    """How long and how often each is measured, and with what."""

    seconds: float = 4.0
    rounds: int = 3
    message_bytes: int = 1024
    queues: int = 4
    connections: int = 64
    per_second: int = 1000
    folder: str = ""


class Line(msgspec.Struct, frozen=True):
    """One measurement: `values` of its rounds in `unit`; `limit` names the line it is compared with."""

    name: str
    unit: str
    values: list[float]
    limit: str = ""
    note: str = ""

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


@asynccontextmanager
async def service(folder: str, *options: str) -> AsyncIterator[Service]:
    """A `millpond standalone` with these command line options, in a fresh directory below `folder` (default: the
    system's)."""
    with tempfile.TemporaryDirectory(prefix="millpond-bench-", dir=folder or None) as data:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "millpond", "standalone", "--data", f"{data}/data", "--port", "0",
            "--log-level", "warning", *options, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            url = await address_of(process)
            memory = Memory(process.pid)
            try:
                yield Service(url, f"{data}/data", process.pid, memory)
            finally:
                await memory.close()
                most_mib.append(memory.most_mib)
        finally:
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()


async def address_of(process: asyncio.subprocess.Process) -> str:
    """Where a service that was just started listens, once it is ready."""
    assert process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        async for line in process.stdout:
            if line.startswith(b"ready "):
                return line.split()[1].decode()
    raise RuntimeError("the service did not start: see above")


async def interleaved(
    rounds: int, runs: Mapping[str, Callable[[], Awaitable[float]]], tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Each of `runs` once a round, so that a change of the machine's mood meets all of them."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            tell(f"{name}, round {number + 1} of {rounds}")
            found[name].append(await run())
    return found


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    memory = next((int(line.split()[1]) // 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model, "cores": os.cpu_count(), "memory_mib": memory, "kernel": platform.release(),
        "python": platform.python_version(),
    }  # fmt: skip


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def write(lines: list[Line], setup: Setup) -> Path:
    """All of a run as JSON, named by its time."""
    RESULTS.mkdir(exist_ok=True)
    now_ms = SystemClock().wall_ms()
    path = RESULTS / f"{now_ms}.json"
    told = [{**msgspec.to_builtins(line), "median": line.median} for line in lines]
    whole = {"at_ms": now_ms, "machine": machine(), "setup": setup, "lines": told}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1))
    return path
