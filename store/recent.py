"""The last frames of the log, in memory: who follows the tail reads nothing from the disk.

Large writes leave no pages behind (`disk.py`), so without this every consumer that keeps up would read each byte back.
What is kept are the very buffers that were appended, not copies; the oldest go first. A frame is known by its position,
and no reader is shown one that is not confirmed: being here says nothing about being on the disk.

While nobody follows the tail they are let go: the memory of a frame that is kept is not at hand for the next one, which
is then put together in some that no cache holds (0.15 ms of CPU a MB). Reading one from the disk costs five times that
and more, so they stay until keeping has cost about what reading them once does.
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
        self._keep(frame, self._most_bytes)

    def _keep(self, frame: StoredFrame, most_bytes: int) -> None:
        self._frames[frame.position] = frame
        self.bytes += _size(frame)
        while self.bytes > most_bytes:
            self.bytes -= _size(self._frames.pop(next(iter(self._frames))))

    def clear(self) -> None:
        self._frames.clear()
        self.bytes = 0

    def get(self, position: int) -> StoredFrame | None:
        return self._frames.get(position)


class Newest(Recent):
    """Those at the end of the log. When `unasked_bytes` were added since anyone asked for one that it holds, or would
    hold, two go for each that comes, until none is kept; with the next one asked for it keeps them again."""

    def __init__(self, most_bytes: int, unasked_bytes: int) -> None:
        super().__init__(most_bytes)
        self._unasked_bytes = unasked_bytes
        self._last_position = 0
        self._unasked = 0

    def add(self, frame: StoredFrame) -> None:
        self._last_position = frame.position
        self._unasked += _size(frame)
        self._keep(frame, min(self._most_bytes, max(0, self._unasked_bytes + self._most_bytes - self._unasked)))

    def get(self, position: int) -> StoredFrame | None:
        if position > self._last_position - self._most_bytes:
            self._unasked = 0
        return super().get(position)


def _size(frame: StoredFrame) -> int:
    return int(frame.sidecar.size + frame.payload.size) + _FRAME_BYTES
