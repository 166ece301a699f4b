"""How fast sealing may go beside what is served: `Pace`.

The sealing process takes a core only when nobody wants it, but the memory, the caches and the disk are everybody's: at
full speed it is noticed. Nothing is gained by that speed while the store is at work, as long as sealing keeps up.
"""

from __future__ import annotations

from millpond.core.limits import SEAL_GENTLE_BYTES_PER_SECOND

LOOK_SECONDS = 0.25
STIR_SECONDS = 0.05  # until the first look after a rest: a message that came alone takes less than BUSY_SHARE of it
BUSY_SHARE = 0.15  # of a core. What the store itself does for sealing at full speed takes less


class Pace:
    """In bytes per second; 0: no limit. `now` in seconds of a clock that only goes on; `cpu_seconds` and
    `appended_bytes`: what this process has used and appended so far."""

    def __init__(self) -> None:
        self._looked = (0.0, 0.0, 0)

    def begin(self, now: float, cpu_seconds: float, appended_bytes: int) -> int:
        """Until something is known; what is known of before counts no longer."""
        self._looked = (now, cpu_seconds, appended_bytes)
        return SEAL_GENTLE_BYTES_PER_SECOND

    def look(self, now: float, cpu_seconds: float, appended_bytes: int) -> int:
        """By what was done since the last look, or since it began."""
        at, cpu_then, bytes_then = self._looked
        self._looked = (now, cpu_seconds, appended_bytes)
        if cpu_seconds - cpu_then <= BUSY_SHARE * (now - at):
            return 0
        return max(SEAL_GENTLE_BYTES_PER_SECOND, int(2 * (appended_bytes - bytes_then) / (now - at)))
