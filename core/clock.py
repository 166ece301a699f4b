"""Clocks and randomness, as arguments.

Everything that needs time or chance takes a `Clock` or a `Random` in its constructor, so that a test can
stand still and a simulation can be repeated. `time.*` and `random.*` are banned elsewhere by the linter.
"""

from __future__ import annotations

import os
import time
from typing import Protocol


class Clock(Protocol):
    def wall_ms(self) -> int:
        """Milliseconds since 1970 UTC. May step in either direction."""
        ...

    def boot_ns(self) -> int:
        """Nanoseconds since boot, suspend included; never steps."""
        ...

    def monotonic(self) -> float:
        """Seconds, for deadlines inside one process; the event loop's own time base."""
        ...


class Random(Protocol):
    def bytes(self, count: int) -> bytes: ...

    def uniform(self, low: float, high: float) -> float: ...


class SystemClock:
    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def monotonic(self) -> float:
        return time.monotonic()


class SystemRandom:
    def bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * int.from_bytes(os.urandom(7), "little") / (1 << 56)
