"""The store's own time: what every timestamp, due time and lease end of a store is measured in.

It starts at max(wall clock, last frame's timestamp) and advances by the boot clock, so it never goes back and
never jumps. A difference to the wall clock is worked off at a bounded rate: at most 1 % faster, or 1 % slower.
What it cannot know: a step of the wall clock while the node was down looks like down-time.
"""

from __future__ import annotations

from millpond.core.clock import Clock

SLEW = 100  # one part in a hundred


class StoreTime:
    def __init__(self, clock: Clock, last_ts: int) -> None:
        """`last_ts`: milliseconds; the timestamp of the last frame in the log, 0 when there is none."""
        self._clock = clock
        self._boot_ns = clock.boot_ns()
        self._now_us = max(clock.wall_ms(), last_ts) * 1000
        self._now_ms = self._now_us // 1000

    def now_ms(self) -> int:
        """Milliseconds since 1970 UTC; never less than any earlier answer."""
        elapsed_us = (self._clock.boot_ns() - self._boot_ns) // 1000
        if elapsed_us < 1000:  # asked several times for each message
            return self._now_ms
        self._boot_ns += elapsed_us * 1000
        ahead_us = self._now_us + elapsed_us - self._clock.wall_ms() * 1000
        slew_us = max(-elapsed_us // SLEW, min(elapsed_us // SLEW, -ahead_us))
        self._now_us += elapsed_us + (slew_us if abs(ahead_us) > 1000 else 0)
        self._now_ms = max(self._now_ms, self._now_us // 1000)
        return self._now_ms
