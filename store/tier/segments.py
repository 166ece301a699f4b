"""The store's segments as its sealing process reads them: `SegmentFiles`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from millpond.core.frame import HEADER_BYTES, FrameHeader, unpack_header
from millpond.core.tier.gentle import Steps
from millpond.store.commitlog import Segment, segment_name
from millpond.store.disk import SystemFile
from millpond.store.tier.channel import Place

OPEN_SEGMENTS = 4


class SealFile(SystemFile):
    """Reads gently, always, and is closed when nobody has it any more: steps that are read ahead may. `written_to`: the
    store writes to it just now; a direct read would hold a lock then that a write waits for, and this process may lose
    the core meanwhile."""

    _fd = -1  # while it was not opened

    def __init__(self, path: Path, steps: Steps) -> None:
        super().__init__(path, create=False)
        self.written_to = True
        self._steps = steps

    def __del__(self) -> None:
        if self._fd >= 0:
            self.close()

    @property
    def step_bytes(self) -> int:
        return self._steps.bytes

    def read_cached(self, _position: int, _length: int) -> bytes | None:
        return None

    def read_gently(self, position: int, length: int, _before_step: Callable[[], None], _still: bool) -> pa.Buffer:
        return super().read_gently(position, length, self._steps.pause, not self.written_to)


class SegmentFiles:
    """Opened when they are wanted. A file may be another segment by then, or gone: frames prove themselves by their
    position. `open_from`: segments are written to from this position on, but not while the log is `still`."""

    def __init__(self, place: Place, steps: Steps) -> None:
        self.seed = place.seed
        self.first_position = 0
        self.open_from = 0
        self._still = False
        self._place = place
        self._steps = steps
        self._open: OrderedDict[int, Segment] = OrderedDict()

    def segment_of(self, position: int) -> Segment | None:
        base = position - position % self._place.segment_bytes
        segment = self._open.pop(base, None)
        if segment is None:
            try:
                file = SealFile(Path(self._place.data) / segment_name(base), self._steps)
            except FileNotFoundError:
                return None
            segment = Segment(base, self._place.segment_bytes, file)
        self._open[base] = segment
        self._tell(segment)
        return segment

    @property
    def still(self) -> bool:
        return self._still

    @still.setter
    def still(self, still: bool) -> None:
        """Heeded by what waits for its turn to be read, too."""
        self._still = still
        for segment in self._open.values():
            self._tell(segment)

    def _tell(self, segment: Segment) -> None:
        assert isinstance(segment.file, SealFile)
        segment.file.written_to = segment.base >= self.open_from and not self._still

    def read_header(self, position: int) -> FrameHeader | None:
        segment = self.segment_of(position)
        if segment is None:
            return None
        header = unpack_header(segment.file.read(position - segment.base, HEADER_BYTES), self.seed)
        return header if header is not None and header.position == position else None

    def trim(self, most: int = OPEN_SEGMENTS) -> None:
        """Keep at most so many open, beside those that are being read: those used last."""
        while len(self._open) > most:
            self._open.popitem(last=False)
