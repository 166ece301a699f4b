"""How fast sealing may go beside what is served: `Pace`.

The sealing process takes a core only when nobody wants it, but the memory, the caches and the disk are everybody's: at
full speed it is noticed. Nothing is gained by that speed while the store is at work, as long as sealing keeps up.
"""

from __future__ import annotations

from millpond.core.limits import SEAL_GENTLE_BYTES_PER_SECOND

LOOK_SECONDS = 0.25
BUSY_SHARE = 0.15  # of a core. What the store itself does for sealing at full speed takes less


class Pace:
    def __init__(self) -> None:
        self._looked: tuple[float, float, int] | None = None
        self._bytes_per_second = SEAL_GENTLE_BYTES_PER_SECOND  # until something is known

    def bytes_per_second(self, now: float, cpu_seconds: float, appended_bytes: int) -> int:
        """0: no limit. `now` in seconds of a clock that only goes on; what this process has used and appended."""
        if self._looked is None:
            self._looked = (now, cpu_seconds, appended_bytes)
        at, cpu_then, bytes_then = self._looked
        if now - at >= LOOK_SECONDS:
            busy = cpu_seconds - cpu_then > BUSY_SHARE * (now - at)
            appended = int((appended_bytes - bytes_then) / (now - at))
            self._bytes_per_second = max(SEAL_GENTLE_BYTES_PER_SECOND, 2 * appended) if busy else 0
            self._looked = (now, cpu_seconds, appended_bytes)
        return self._bytes_per_second
