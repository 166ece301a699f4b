"""Memory that nobody uses any more is given back to the system: once the process has become quiet, and under load
whenever it has piled up.

Arrow's allocator and the C library keep what is freed for the next time, which is right under load (fresh pages cost
more than a write of the same bytes) and wrong afterwards: 360 MB stayed after a minute of batches, 190 without it.
It is kept by size and by place, so under many sizes at once it grows: 390 MB with 50 in use, into 256 topics in turn.
Each thread has its own share of Arrow's memory: the loop's, by far the largest, is given back from the loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from millpond.core.limits import MIB

LOOK_SECONDS = 5.0
QUIET_SHARE = 0.1  # of one core
CROWD_LOOK_SECONDS = 0.25
CALM_LOOK_SECONDS = 1.25  # below three quarters of a crowd: a look into cold caches takes 0.4 ms
CROWD_BYTES = 256 * MIB  # a service with its newest frames and what it reads ahead of a reader has up to 250
CROWD_GROWTH = 9 / 8  # of what was in use the last time: that is not looked through again and again in vain
_STATM = Path("/proc/self/statm")


def used_cpu() -> float:
    """Seconds of CPU that this process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def held_bytes() -> int:
    """Anonymous memory of this process; 0 where the system does not tell."""
    try:
        _, resident, of_files, *_ = _STATM.read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(of_files)) * resource.getpagesize()


def give_back_free() -> None:
    """What is free in this process goes back to the system: 1 to 10 ms for 100 MB."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def give_back() -> None:
    """The same, and what hangs in a cycle: the usual collections are so rare (`process.GC_THRESHOLD`) that it stays."""
    gc.collect()
    give_back_free()


class Tidier:
    """Calls `give_back` once after each time of work, and `give_back_free` while memory piles up."""

    def __init__(
        self,
        cpu: Callable[[], float] = used_cpu,
        release: Callable[[], None] = give_back,
        held: Callable[[], int] = held_bytes,
        release_free: Callable[[], None] = give_back_free,
    ) -> None:
        self._cpu = cpu
        self._release = release
        self._held = held
        self._release_free = release_free
        self._before = cpu()
        self._worked = False
        self._in_use = 0

    async def run(self) -> None:
        while True:
            waited = 0.0
            while waited < LOOK_SECONDS:
                pause = self.look_for_crowd()
                await asyncio.sleep(pause)
                waited += pause
            self.look()

    def look_for_crowd(self) -> float:
        """Has memory grown by an eighth beyond what was in use the last time? Answers when to ask again, in seconds."""
        held = self._held()
        self._in_use = min(self._in_use, held)
        if held >= max(CROWD_BYTES, self._in_use * CROWD_GROWTH):
            self._release_free()
            self._in_use = self._held()
        return CROWD_LOOK_SECONDS if 4 * held >= 3 * CROWD_BYTES else CALM_LOOK_SECONDS

    def look(self) -> None:
        """Called every LOOK_SECONDS: was there work, and is it over?"""
        now = self._cpu()
        busy = now - self._before > QUIET_SHARE * LOOK_SECONDS
        self._before = now
        if self._worked and not busy:
            self._release()
            self._before = self._cpu()
        self._worked = busy
