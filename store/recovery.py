"""Recovery: what of the log is believed after a start.

    survey   walk the headers from the checkpoint on, past damage, and learn the highest confirmed position that
             any valid frame names
    replay   walk the frames again, checksums compared, and fold them, group by group

A bad frame *at or above* the highest confirmed position was never promised: the log is cut there, also when
valid frames follow (a power cut keeps pages in any order). *Below* it, it was promised: its range is quarantined
and never cut. An append group that is not whole at the cut is cut whole.

A header with a single flipped bit below the confirmed position is mended: its checksum tells which bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import google_crc32c
import numpy as np

from millpond.core.frame import (
    ALIGNMENT,
    FILLER,
    HEADER_BYTES,
    MAGIC,
    MORE,
    FrameHeader,
    unpack_header,
)
from millpond.core.limits import BATCH_BYTES, BATCH_OVERHEAD_BYTES, MIB, PENDING_APPEND_BYTES, UNFLUSHED_BYTES
from millpond.store.commitlog import CommitLog, Segment

_CHUNK = 4 * MIB
_MAGIC_WORD = np.uint32(int.from_bytes(MAGIC, "little"))
_FRAME_BYTES = BATCH_BYTES + BATCH_OVERHEAD_BYTES + MIB  # of the largest: header and sidecar take less than 1 MiB
_UNCONFIRMED_BYTES = UNFLUSHED_BYTES + PENDING_APPEND_BYTES  # how far frames can stand above the confirmed position


class Scanned(NamedTuple):
    """One valid frame of the replay."""

    header: FrameHeader
    sidecar: bytes
    payload: bytes


class Damage(NamedTuple):
    """A quarantined range. `header` when it could still be read: then it says whose messages these were."""

    position: int
    end: int
    header: FrameHeader | None


class Recovered(NamedTuple):
    """end: where the log goes on. confirmed: the highest position ever promised, as far as the log says."""

    end: int
    confirmed: int
    last_ts: int
    epochs: list[tuple[int, int]]
    damage: list[Damage]
    mended: list[int]
    frames: int
    last_header: int  # position of the last valid header seen, also above the cut; -1 when none


class _Window:
    """Reads a segment forward in chunks."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._start = 0
        self._data = b""

    def read(self, position: int, length: int) -> bytes:
        """Bytes of the log at `position`; fewer at the end of the segment."""
        at = position - self._segment.base
        if at < self._start or at + length > self._start + len(self._data):
            self._start = at
            self._data = self._segment.file.read(at, max(length, _CHUNK))
        return self._data[at - self._start : at - self._start + length]

    def find_magic(self, position: int, end: int) -> int | None:
        """The next aligned position below `end` in this segment that starts like a header."""
        end = min(end, self._segment.end)
        while end - position >= HEADER_BYTES:
            data = self.read(position, min(_CHUNK, end - position))
            starts = np.frombuffer(data, np.uint32, len(data) // 8 * 2)[::2]  # headers stand at multiples of 8
            hits = np.flatnonzero(starts == _MAGIC_WORD)
            if len(hits):
                return position + ALIGNMENT * int(hits[0])
            position += max(ALIGNMENT, len(data) // ALIGNMENT * ALIGNMENT)
        return None


class Survey(NamedTuple):
    headers: dict[int, FrameHeader]
    confirmed: int


def survey(log: CommitLog, start: int, confirmed: int, epoch: int, *, only: Segment | None = None) -> Survey:
    """All valid headers from `start` on, also behind damage, and the highest confirmed position known."""
    headers: dict[int, FrameHeader] = {}
    for segment in log.segments if only is None else [only]:
        if segment.end <= start:
            continue
        window = _Window(segment)
        position: int | None = max(start, segment.base)
        while position is not None and segment.end - position >= HEADER_BYTES:
            header = unpack_header(window.read(position, HEADER_BYTES), log.seed)
            if (
                header is None
                or header.position != position
                or header.epoch < epoch
                or position + header.length > segment.end
            ):
                # most of the newest segment is empty, and takes as long to be read as if it were full
                position = window.find_magic(position + ALIGNMENT, confirmed + _UNCONFIRMED_BYTES + HEADER_BYTES)
                continue
            headers[position] = header
            confirmed = max(confirmed, header.confirmed)
            position += header.length
    return Survey(headers, confirmed)


def recover(
    log: CommitLog, start: int, confirmed: int, epoch: int, fold: Callable[[list[Scanned]], None], *, mend: bool = True
) -> Recovered:
    """Fold every whole append group from `start` on and find the end of the log. Blocks."""
    found = survey(log, start, confirmed, epoch)
    walk = _Walk(log, found, start, epoch, mend)
    for group in walk.groups():
        fold(group)
    return Recovered(
        walk.end,
        found.confirmed,
        walk.last_ts,
        walk.epochs,
        walk.damage,
        walk.mended,
        walk.frames,
        max(found.headers, default=-1),
    )


class _Walk:
    def __init__(self, log: CommitLog, found: Survey, start: int, epoch: int, mend: bool) -> None:
        self._log = log
        self._headers = found.headers
        self._confirmed = found.confirmed
        self._mend = mend
        self.end = start
        self.last_ts = 0
        self.epoch = epoch
        self.epochs: list[tuple[int, int]] = []
        self.damage: list[Damage] = []
        self.mended: list[int] = []
        self.frames = 0

    def groups(self) -> Iterator[list[Scanned]]:
        group: list[Scanned] = []
        for segment in self._log.segments:
            if segment.end <= self.end:
                continue
            if segment.base > self.end and group:
                return  # a group never crosses a segment: this one is not whole
            window = _Window(segment)
            position = max(self.end, segment.base)
            while segment.end - position >= HEADER_BYTES:
                scanned = self._frame(window, position)
                if scanned is None:
                    beyond = self._beyond(segment, position)
                    if beyond is None:
                        return  # the end of the log; an unfinished group is left out, so cut
                    position = beyond
                    continue
                header = scanned.header
                if header.epoch < self.epoch:
                    return
                position += header.length
                if header.kind == FILLER:
                    self.end = position
                    continue
                group.append(scanned)
                if not header.flags & MORE:
                    self._note(group, position)
                    yield group
                    group = []
            if not group and position > segment.base:
                self.end = segment.end if segment.end - position < HEADER_BYTES else position

    def _note(self, group: list[Scanned], end: int) -> None:
        header = group[-1].header
        if header.epoch > self.epoch:
            self.epoch = header.epoch
            self.epochs.append((header.epoch, group[0].header.position))
        self.last_ts = max(self.last_ts, header.store_ts)
        self.frames += len(group)
        self.end = end

    def _frame(self, window: _Window, position: int) -> Scanned | None:
        header = self._headers.get(position)
        if header is None:
            header = self._mended_header(window, position)
            if header is None:
                return None
        if header.kind == FILLER:
            return Scanned(header, b"", b"")
        data = window.read(position, header.length)
        split = HEADER_BYTES + header.sidecar_length
        sidecar, payload = data[HEADER_BYTES:split], data[split : split + header.payload_length]
        if len(payload) != header.payload_length:
            return None
        if google_crc32c.value(sidecar) != header.sidecar_crc or google_crc32c.value(payload) != header.payload_crc:
            return None
        return Scanned(header, sidecar, payload)

    def _mended_header(self, window: _Window, position: int) -> FrameHeader | None:
        """A header below the confirmed position that one flipped bit has spoilt, put right on the disk too."""
        if not self._mend or position >= self._confirmed:
            return None
        data = bytearray(window.read(position, HEADER_BYTES))
        for bit in range(8 * len(data)):
            data[bit >> 3] ^= 1 << (bit & 7)
            header = unpack_header(bytes(data), self._log.seed)
            if header is not None and header.position == position:
                segment = self._log.segment_of(position)
                assert segment is not None
                segment.file.write(position - segment.base, [bytes(data)])
                segment.file.sync()
                self.mended.append(position)
                return header
            data[bit >> 3] ^= 1 << (bit & 7)
        return None

    def _beyond(self, segment: Segment, position: int) -> int | None:
        """Where to go on behind a bad frame at `position`; None when the log ends there."""
        if position >= self._confirmed:
            return None
        header = self._headers.get(position)
        if header is not None:
            end = position + header.length
        else:
            later = [other for other in self._headers if position < other < segment.end]
            end = min(later, default=segment.end)
        self.damage.append(Damage(position, end, header))
        self.end = max(self.end, end)
        return end


def scan_segment(log: CommitLog, segment: Segment) -> Iterator[Scanned]:
    """Every valid frame of a closed segment, past damage. Blocks."""
    found = survey(log, segment.base, segment.end, 0, only=segment)
    window = _Window(segment)
    for position, header in found.headers.items():
        if header.kind == FILLER:
            continue
        data = window.read(position, header.length)
        split = HEADER_BYTES + header.sidecar_length
        sidecar, payload = data[HEADER_BYTES:split], data[split : split + header.payload_length]
        if google_crc32c.value(sidecar) == header.sidecar_crc and google_crc32c.value(payload) == header.payload_crc:
            yield Scanned(header, sidecar, payload)


def cut(log: CommitLog, end: int, last_header: int) -> None:
    """Zero what stands at and above `end`, durably: no byte of it may be taken for a frame later. Blocks."""
    while len(log.segments) > 1 and end <= log.segments[-1].base <= last_header:
        log.remove_segment_file(log.segments.pop())
    segment = log.segment_of(end)
    if segment is not None and last_header >= end:
        _zero_used(segment, end - segment.base)
    elif segment is not None:
        _zero_used(segment, end - segment.base, _FRAME_BYTES)  # a torn frame at most
    if segment is not None:
        segment.file.sync()


def _zero_used(segment: Segment, start: int, most: int = _UNCONFIRMED_BYTES) -> None:
    """Zero the rest of a segment, writing only where there is something."""
    end = min(segment.length, start + most)
    while start < end:
        length = min(MIB, end - start)
        data = segment.file.read(start, length)
        if data.count(0) != len(data):
            segment.file.zero(start, length)
        start += length
