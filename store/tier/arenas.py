"""Memory that objects are encoded into, used again for the next ones: `Arenas`.

Fresh memory is not free: the kernel clears it page by page while it is first written to, and that stalled producers
for tens of milliseconds beside an encoder that took 80 MiB anew for every object.
"""

from __future__ import annotations

import pyarrow as pa

from millpond.core.limits import MIB

STEP_BYTES = 16 * MIB  # sizes are rounded up to it, so that runs of about the same size fit each other's memory


class Arenas:
    """Buffers that are not in use. `take` may be called in a thread."""

    def __init__(self, most: int) -> None:
        """At most `most` are kept."""
        self._most = most
        self._free: list[pa.Buffer] = []

    def take(self, size: int) -> pa.Buffer:
        """A buffer of at least `size` bytes, its content undefined, for the caller alone."""
        while self._free:
            kept = self._free.pop()
            if kept.size >= size:
                return kept
        return pa.allocate_buffer(-(-size // STEP_BYTES) * STEP_BYTES)

    def give_back(self, memory: pa.Buffer) -> None:
        """Nobody looks at `memory` any more."""
        if len(self._free) < self._most:
            self._free.append(memory)

    def release(self) -> None:
        """Nothing is kept: the memory is free."""
        self._free.clear()
