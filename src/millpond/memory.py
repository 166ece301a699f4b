"""Memory that a burst has left behind is given back to the system once the process has become quiet.

Arrow's allocator and the C library keep what is freed for the next time, which is right under load (fresh pages cost
more than a write of the same bytes) and wrong afterwards: 360 MB stayed after a minute of batches, 190 without it.
Each thread has its own share of Arrow's memory: the loop's, by far the largest, is given back from the loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from collections.abc import Callable

import pyarrow as pa

LOOK_SECONDS = 5.0
QUIET_SHARE = 0.1  # of one core


def used_cpu() -> float:
    """Seconds of CPU that this process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def give_back() -> None:
    """What is free in this process goes back to the system. Some milliseconds for each 100 MB.

    Collects first: the usual collections are so rare (`process.GC_THRESHOLD`) that what hangs in a cycle stays.
    """
    gc.collect()
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


class Tidier:
    """Calls `give_back` once after each time of work."""

    def __init__(self, cpu: Callable[[], float] = used_cpu, release: Callable[[], None] = give_back) -> None:
        self._cpu = cpu
        self._release = release
        self._before = cpu()
        self._worked = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Called every LOOK_SECONDS: was there work, and is it over?"""
        now = self._cpu()
        busy = now - self._before > QUIET_SHARE * LOOK_SECONDS
        self._before = now
        if self._worked and not busy:
            self._release()
            self._before = self._cpu()
        self._worked = busy
