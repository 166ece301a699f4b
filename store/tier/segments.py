"""The store's segments as its sealing process reads them: `SegmentFiles`."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from millpond.core.frame import HEADER_BYTES, FrameHeader, unpack_header
from millpond.core.limits import KIB, MIB
from millpond.core.tier.gentle import READ_BYTES, open_direct, read_direct
from millpond.store.commitlog import Segment, segment_name
from millpond.store.disk import SystemFile
from millpond.store.tier.channel import Place

OPEN_SEGMENTS = 4
SMALL_BYTES = 64 * KIB  # read at once of what is still written to
LARGE_BYTES = 2 * MIB  # .. when nobody else is at work


class SealFile(SystemFile):
    """Reads without being noticed. A segment that is closed is read past the page cache; one that is written to is not,
    because such a read holds a lock that a write waits for, and this process may lose the core meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, create=False)
        self._direct = open_direct(path)
        self.written_to = True
        self.hurry = False

    def read_cached(self, _position: int, _length: int) -> bytes | None:
        return None

    def read_once(self, position: int, length: int) -> pa.Buffer:
        if self._direct >= 0 and not self.written_to:
            return read_direct(self._direct, position, length, LARGE_BYTES if self.hurry else READ_BYTES)
        step_bytes = LARGE_BYTES if self.hurry else SMALL_BYTES
        data = pa.allocate_buffer(length)
        view, done = memoryview(data), 0
        while done < length:
            got = self.read_into(view[done : done + step_bytes], position + done)
            if not got:
                break
            done += got
        return data.slice(0, done)

    def read_gently(self, position: int, length: int, _before_step: Callable[[], None], _still: bool) -> pa.Buffer:
        return self.read_once(position, length)

    def close(self) -> None:
        super().close()
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1


class SegmentFiles:
    """Opened when they are wanted. A file may be another segment by then, or gone: frames prove themselves by their
    position. `open_from`: segments are written to from this position on; `hurry`: nobody else is at work."""

    def __init__(self, place: Place) -> None:
        self.seed = place.seed
        self.first_position = 0
        self.open_from = 0
        self.hurry = False
        self._place = place
        self._open: OrderedDict[int, Segment] = OrderedDict()

    @property
    def segments(self) -> list[Segment]:
        """Those that are open here."""
        return list(self._open.values())

    def segment_of(self, position: int) -> Segment | None:
        base = position - position % self._place.segment_bytes
        segment = self._open.pop(base, None)
        if segment is None:
            try:
                file = SealFile(Path(self._place.data) / segment_name(base))
            except FileNotFoundError:
                return None
            segment = Segment(base, self._place.segment_bytes, file)
        assert isinstance(segment.file, SealFile)
        segment.file.written_to = base >= self.open_from
        segment.file.hurry = self.hurry
        self._open[base] = segment
        return segment

    def read_header(self, position: int) -> FrameHeader | None:
        segment = self.segment_of(position)
        if segment is None:
            return None
        header = unpack_header(segment.file.read(position - segment.base, HEADER_BYTES), self.seed)
        return header if header is not None and header.position == position else None

    def trim(self, most: int = OPEN_SEGMENTS) -> None:
        """Keep at most so many open: those used last. Not while one is being read."""
        while len(self._open) > most:
            self._open.popitem(last=False)[1].file.close()
