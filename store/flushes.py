"""When the disk is wanted for a flush: told by the writer, heeded by whoever reads much of it.

A flush is a few small writes that somebody waits for. Each goes to the end of what the disk has to do: behind 8 MiB
that the kernel reads ahead for a reader of old messages it takes 3 to 9 ms instead of 0.1. So while flushes are
awaited, large reads go in small steps (`disk.py`), and none begins while a flush is in flight.
"""

from __future__ import annotations

import asyncio
import threading

AWAITED_SECONDS = 0.25  # after the last wait for a flush, others that use the disk still make room for the next one
STAND_BACK_SECONDS = 0.001  # a step of a read waits no longer: under a steady load a flush is always in flight


class Flushes:
    """`awaited` and `lately` belong to the event loop, all else to any thread."""

    def __init__(self) -> None:
        self._awaited_at = float("-inf")
        self._none = threading.Event()
        self._none.set()

    def awaited(self) -> None:
        """Somebody waits for a flush now."""
        self._awaited_at = asyncio.get_running_loop().time()

    def lately(self) -> bool:
        """Whether somebody has waited for a flush just now, so that it is likely to happen again."""
        return asyncio.get_running_loop().time() - self._awaited_at < AWAITED_SECONDS

    def begin(self) -> None:
        """A flush is in flight, until `end`. There is one at a time."""
        self._none.clear()

    def end(self) -> None:
        self._none.set()

    def stand_back(self) -> None:
        """Let the flush that is in flight go first. Blocks for STAND_BACK_SECONDS at most."""
        self._none.wait(STAND_BACK_SECONDS)
