"""Whether sealing waits because producers need the cores now: `Postponement`.

Sealing costs about as much of a core as taking the same messages in. A burst is taken at full speed when its sealing
comes after it; a load that stays must be sealed beside it, or the local disk fills up. So full runs wait while bytes
are appended fast, for a bounded time and a bounded number of bytes, and the next wait begins only after a quieter
moment. What is due for its age, at midnight, on demand, or for room on the disk never waits.
"""

from __future__ import annotations

from millpond.core.limits import SEAL_BUSY_BYTES_PER_SECOND, SEAL_POSTPONE_SECONDS

LOOK_SECONDS = 0.5  # a rate is counted over at least so long


class Postponement:
    def __init__(self, most_bytes: int) -> None:
        """At most `most_bytes` are appended during one wait."""
        self._most_bytes = most_bytes
        self._looked: tuple[float, int] | None = None
        self._since: tuple[float, int] | None = None  # when the busy time began, and what had been appended by then

    def stale(self, now: float) -> bool:
        """Whether nobody has looked for a while."""
        return self._looked is None or now - self._looked[0] > 2 * LOOK_SECONDS

    def begin(self, now: float, appended_bytes: int) -> None:
        """Count from here: over all of a long rest, the first moment of a burst is no rate. A rest in which nobody
        looked ends the wait of the burst before it."""
        self.waits(now, appended_bytes)
        self._looked = (now, appended_bytes)

    def waits(self, now: float, appended_bytes: int) -> bool:
        """Whether full runs wait. `now` in seconds, of a clock that only goes on; `appended_bytes` so far."""
        if self._looked is None:
            self._looked = (now, appended_bytes)
        at, bytes_then = self._looked
        if now - at >= LOOK_SECONDS:
            if appended_bytes - bytes_then <= SEAL_BUSY_BYTES_PER_SECOND * (now - at):
                self._since = None
            elif self._since is None:
                self._since = self._looked
            self._looked = (now, appended_bytes)
        if self._since is None:
            return False
        began, first = self._since
        return now - began < SEAL_POSTPONE_SECONDS and appended_bytes - first < self._most_bytes
