"""What a process takes, as Linux tells it: anonymous memory, seconds of a core; and a sampler of both."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

SAMPLE_SECONDS = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


def family_mib(pid: int) -> float:
    """`anonymous_mib` of a process and of those that it has started (a store seals in one of its own)."""
    try:
        children = [child for one in Path(f"/proc/{pid}/task").glob("*/children") for child in one.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        children = []
    return anonymous_mib(pid) + sum(family_mib(int(child)) for child in children)


def anonymous_mib(pid: int) -> float:
    """RssAnon of a process: what it has of its own, without files and the page cache. 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:")), 0.0)


def cpu_seconds(pid: int) -> float:
    """Seconds of a core that a process has taken so far, in user and kernel mode, all threads together."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS


class Memory:
    """Looks at the anonymous memory of a process and its children ten times a second: `rest_mib` at first, `most_mib`
    since `begin`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.rest_mib = family_mib(pid)
        self.most_mib = self.rest_mib
        self._task = asyncio.create_task(self._sample(), name="memory sampler")

    def begin(self) -> None:
        """Count the most from here on."""
        self.most_mib = family_mib(self.pid)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.most_mib = max(self.most_mib, family_mib(self.pid))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
