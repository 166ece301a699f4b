"""The last frames of the log, in memory: who follows the tail reads nothing from the disk.

Large writes leave no pages behind (`disk.py`), so without this every consumer that keeps up would read each byte back.
What is kept are the very buffers that were appended, not copies; the oldest go first. A frame is known by its position,
and no reader is shown one that is not confirmed: being here says nothing about being on the disk.
"""

from __future__ import annotations

from millpond.core.limits import KIB
from millpond.store.client import StoredFrame

_FRAME_BYTES = 1 * KIB  # what a frame costs beside its buffers, about


class Recent:
    """Frames by position, at most `most_bytes` of them; 0 keeps none."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._frames: dict[int, StoredFrame] = {}  # in order of position
        self.bytes = 0

    def add(self, frame: StoredFrame) -> None:
        """Keep the frame just appended."""
        self._frames[frame.position] = frame
        self.bytes += _size(frame)
        while self.bytes > self._most_bytes:
            self.bytes -= _size(self._frames.pop(next(iter(self._frames))))

    def clear(self) -> None:
        self._frames.clear()
        self.bytes = 0

    def get(self, position: int) -> StoredFrame | None:
        return self._frames.get(position)


def _size(frame: StoredFrame) -> int:
    return int(frame.sidecar.size + frame.payload.size) + _FRAME_BYTES
