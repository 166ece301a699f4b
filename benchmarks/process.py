"""What a process takes, as Linux tells it: anonymous memory, seconds of a core; and a sampler of both."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from pathlib import Path

SAMPLE_SECONDS = 0.1
FAMILY_SAMPLES = 10  # to find the children of each thread takes 1.4 ms, one sample of them 0.03
DISKSTATS = Path("/proc/diskstats")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _children(pid: int) -> list[int]:
    """Those that it has started and that are there (a store seals in a process of its own)."""
    try:
        return [int(one) for task in Path(f"/proc/{pid}/task").glob("*/children") for one in task.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _family(pid: int) -> list[int]:
    """A process and those that it has started."""
    return [pid, *(one for child in _children(pid) for one in _family(child))]


def family_mib(pid: int) -> float:
    """`anonymous_mib` of a process and of those that it has started."""
    return sum(map(anonymous_mib, _family(pid)))


def anonymous_mib(pid: int) -> float:
    """RssAnon of a process: what it has of its own, without files and the page cache. 0 when it is gone."""
    try:
        _, resident, of_files, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(resident) - int(of_files)) * _PAGE_BYTES / (1 << 20)


def cpu_seconds(pid: int) -> float:
    """Seconds of a core that a process has taken so far, in user and kernel mode, all threads together."""
    return sum(_ticks(pid)[:2]) / _TICKS


def family_cpu_seconds(pid: int) -> float:
    """`cpu_seconds` of a process and of those that it has started, also of those that have ended. 0 when it is gone."""
    try:
        ticks = sum(_ticks(pid))
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return ticks / _TICKS + sum(map(family_cpu_seconds, _children(pid)))


def _ticks(pid: int) -> list[int]:
    """User and kernel time, and both of the children that have ended."""
    return [int(one) for one in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]]


def discarded() -> int:
    """How many sectors all disks were told to forget so far: files that are unlinked go on for a while."""
    fields = map(str.split, DISKSTATS.read_text().splitlines()) if DISKSTATS.exists() else ()
    return sum(int(one[16]) for one in fields if len(one) > 16)


class Memory:
    """Looks at the anonymous memory of a process and its children ten times a second, for new children each second:
    `rest_mib` at first, `most_mib` since `begin`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.rest_mib = family_mib(pid)
        self.most_mib = self.rest_mib
        self._task = asyncio.create_task(self._sample(), name="memory sampler")

    def begin(self) -> None:
        """Count the most from here on."""
        self.most_mib = family_mib(self.pid)

    async def _sample(self) -> None:
        for number in count():
            if number % FAMILY_SAMPLES == 0:
                family = _family(self.pid)
            self.most_mib = max(self.most_mib, sum(map(anonymous_mib, family)))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
