"""The commitlog: an endless sequence of frames, kept in segments of one size.

    log/00000000000000000000.seg   positions [0, S)
    log/00000000000268435456.seg   positions [S, 2S)      S = segment_bytes, fixed when the directory is made
    ...                            the last one may be still empty: the next segment is always ready

This file owns the segments and the tail: it gives every frame its position and its header, and hands what
is to be written to the writer. It knows nothing of what frames mean. Everything here runs on the event loop
except `write`, `sync`, `read`, which are plain blocking calls on files.

A position, once given, is never given again: a frame that cannot be written stops the store. So `append` takes
room that is already allocated, and says beforehand (`has_room`) when there is none.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NamedTuple

import google_crc32c
import msgspec
import pyarrow as pa

from millpond.core.frame import (
    FILLER,
    HEADER_BYTES,
    MORE,
    VERSION,
    FrameHeader,
    aligned,
    pack_header,
    unpack_header,
)
from millpond.core.gathered import Buffer
from millpond.core.limits import MIB
from millpond.core.tier.gentle import STEP_BYTES
from millpond.store.disk import Disk, File

FOLDER = "log"
KEPT_FREE = 4  # a quarter of a segment stays free on the disk: checkpoints, indexes and metadata are written to it too
PAGE_BYTES = 4096
ZEROS_AHEAD = 8 * MIB  # reserved blocks are zeroed so far behind the tail
ZERO_STEP_BYTES = STEP_BYTES  # .. so many at once: a flush of the log waits for one step
ZERO_MARGIN = 64  # .. from a 64th of the whole behind the tail on
_ZEROS = memoryview(bytes(PAGE_BYTES))
_PADDING = [bytes(count) for count in range(8)]


def segment_name(base: int) -> str:
    return f"{FOLDER}/{base:020d}.seg"


class Segment:
    """One file of the log: positions [base, base + length)."""

    __slots__ = ("base", "file", "length", "reserved")

    def __init__(self, base: int, length: int, file: File, *, reserved: bool = True) -> None:
        """`reserved`: its blocks may be taken only, and never written to."""
        self.base = base
        self.length = length
        self.file = file
        self.reserved = reserved

    @property
    def end(self) -> int:
        return self.base + self.length


class Draft(msgspec.Struct, frozen=True):
    """A frame before it has a position. `payload` bytes are written as they are."""

    kind: int
    queue_id: int
    first_offset: int
    rows: int
    columns: int
    codec: int
    flags: int
    sidecar: bytes
    payload: Buffer | pa.Buffer
    payload_crc: int
    payload_size: int

    @property
    def length(self) -> int:
        return aligned(HEADER_BYTES + len(self.sidecar) + len(self.payload))


class Placed(msgspec.Struct, frozen=True):
    """Where a group went: [position, end), and each frame's own position."""

    position: int
    end: int
    positions: list[int]


class Write(msgspec.Struct):
    """Consecutive bytes of one segment, waiting to be written. More may follow until it is taken."""

    segment: Segment
    position: int
    length: int
    buffers: list[Buffer]


class Blank(NamedTuple):
    """Blocks behind the tail that are only reserved: positions [start, start + length) of a segment."""

    segment: Segment
    start: int
    length: int


class CommitLog:
    """Segments in order of position, and the tail.

    tail: where the next frame goes; written: all below it was handed to the kernel; flushing: all below it is on the
    disk once the flush under way has ended; flushed: all below it is. confirmed: what readers may see; on a single
    replica it is `flushed`.
    """

    def __init__(self, disk: Disk, segment_bytes: int, seed: int) -> None:
        self._disk = disk
        self.segment_bytes = segment_bytes
        self.seed = seed
        self.segments: list[Segment] = []
        self.tail = 0
        self.written = 0
        self.flushing = 0
        self.flushed = 0
        self.confirmed = 0
        self.epoch = 0
        self.zeroed = 0  # blocks between the tail and here were written to before
        self._pending: list[Write] = []
        self.pending_bytes = 0
        self._zeros_ahead = min(ZEROS_AHEAD, segment_bytes // 8)

    # -- segments ------------------------------------------------------------------------------------------

    @property
    def first_position(self) -> int:
        return self.segments[0].base if self.segments else 0

    def open_segments(self) -> None:
        """Open what is on the disk. Raises ValueError on a gap or a segment of the wrong size."""
        for name in self._disk.names(FOLDER):
            if not name.endswith(".seg"):
                continue
            base = int(name[:-4])
            file = self._disk.open(f"{FOLDER}/{name}")
            if file.size() != self.segment_bytes:
                file.close()
                if self.segments and base == self.segments[-1].end:
                    self._disk.remove(f"{FOLDER}/{name}")  # cut off while it was being allocated: never used
                    break
                if not self.segments and base == 0:
                    self._disk.remove(f"{FOLDER}/{name}")
                    break
                raise ValueError(f"{name}: {file_size_text(self.segment_bytes)} expected")
            if self.segments and base != self.segments[-1].end:
                file.close()
                raise ValueError(f"segment missing between {self.segments[-1].end} and {base}")
            self.segments.append(Segment(base, self.segment_bytes, file))

    def allocate_segment(self, written: bool = True, *, hurry: Callable[[], bool] | None = None) -> Segment:
        """Make the next segment's file (as of `File.allocate`). Blocks; may raise OSError (ENOSPC), leaving nothing
        behind."""
        if self._disk.free_bytes() < self.segment_bytes + self.segment_bytes // KEPT_FREE:
            raise OSError(errno.ENOSPC, "no room for another log segment beside what is kept free")
        base = self.segments[-1].end if self.segments else 0
        name = segment_name(base)
        file = self._disk.open(name, create=True)
        try:
            written = file.allocate(self.segment_bytes, written, hurry=hurry)
        except OSError:
            file.close()
            self._disk.remove(name)
            raise
        file.close()
        self._disk.rename(name, name)  # the new name is durable before anything in it is promised
        return Segment(base, self.segment_bytes, self._disk.open(name), reserved=not written)

    def recycle_segment(self, old: Segment, written: bool = True) -> Segment:
        """Turn `old`, already dropped from `segments`, into the next one. Its stale frames name other positions.

        `written`: its blocks stay as they are, which makes syncs short. Else they become as new ones where that can be
        done: ext4 keeps the pages of large writes to written blocks, and finding a fresh page for each 4 KiB takes ten
        times as long as the write (`docs/performance.md`). Blocks; may raise OSError (ENOSPC), and the file is gone.
        """
        segment = Segment(self.segments[-1].end, self.segment_bytes, old.file, reserved=False)
        self._disk.rename(segment_name(old.base), segment_name(segment.base))
        try:
            segment.reserved = not written and segment.file.unwrite()
        except OSError:
            self.remove_segment_file(segment)
            raise
        return segment

    def add_segment(self, segment: Segment) -> None:
        assert not self.segments or segment.base == self.segments[-1].end
        self.segments.append(segment)

    def drop_first_segment(self) -> Segment:
        """Forget the oldest segment; the caller recycles or removes its file."""
        assert self.segments[0].end <= self.flushed, "only a flushed segment may go"
        return self.segments.pop(0)

    def remove_segment_file(self, old: Segment) -> None:
        old.file.close()
        self._disk.remove(segment_name(old.base))

    def segment_of(self, position: int) -> Segment | None:
        if not self.segments or not self.segments[0].base <= position < self.segments[-1].end:
            return None
        return self.segments[(position - self.segments[0].base) // self.segment_bytes]

    @property
    def open_from(self) -> int:
        """Where the segment begins that is written to: all before it is only read."""
        return self.written - self.written % self.segment_bytes

    @property
    def has_spare(self) -> bool:
        """Whether a segment is ready that is still empty."""
        return bool(self.segments) and self.segments[-1].base >= max(1, self.tail)

    # -- blocks beforehand -----------------------------------------------------------------------------------

    @property
    def lacks_zeros(self) -> bool:
        """Whether the tail comes near blocks that may be only reserved."""
        return self.zeroed < self.tail + self._zeros_ahead and self.zeroed < self.segments[-1].end

    def next_blank(self) -> Blank | None:
        """What should be zeroed next: some way behind the tail, so that it is not reached meanwhile. None: nothing."""
        start = -(-(self.tail + self._zeros_ahead // ZERO_MARGIN) // PAGE_BYTES) * PAGE_BYTES
        self.zeroed = max(self.zeroed, start)
        segment = self.segment_of(self.zeroed)
        if segment is not None and not segment.reserved:
            self.zeroed = segment.end
            segment = self.segment_of(self.zeroed)
        if segment is None or not segment.reserved or not self.lacks_zeros:
            return None
        return Blank(segment, self.zeroed, min(ZERO_STEP_BYTES, self._zeros_ahead, segment.end - self.zeroed))

    def zero(self, blank: Blank) -> None:
        """Write zeros there, and sync. Blocks.

        By a descriptor of its own: an error of the disk is told once to each, and the log's sync must hear of its own.
        """
        file = self._disk.open(segment_name(blank.segment.base))
        try:
            file.zero(blank.start - blank.segment.base, blank.length)
            file.sync()
        finally:
            file.close()

    # -- append --------------------------------------------------------------------------------------------

    def has_room(self, length: int, reserve: int = 0) -> bool:
        """Whether a group of `length` bytes fits what is allocated, leaving `reserve` bytes beside it."""
        if not self.segments:
            return False
        end = self.segments[-1].end
        start = self.tail
        left = self.segment_bytes - start % self.segment_bytes
        if length > left:
            start += left
        return start + length + reserve <= end

    def append(self, drafts: list[Draft], store_ts: int) -> Placed:
        """Place `drafts` at the tail as one append group. The caller has asked `has_room`."""
        lengths = [draft.length for draft in drafts]
        length = sum(lengths)
        assert length <= self.segment_bytes and self.has_room(length), "a group fits a segment, and there is one"
        left = self.segment_bytes - self.tail % self.segment_bytes
        if length > left:
            self._fill(left, store_ts)
        start = self.tail
        positions: list[int] = []
        buffers: list[Buffer] = []
        more = len(drafts)
        for draft, frame_bytes in zip(drafts, lengths, strict=True):
            more -= 1
            positions.append(self.tail)
            payload_bytes = len(draft.payload)
            header = self._header(draft, draft.flags | (MORE if more else 0), store_ts, payload_bytes)
            buffers.append(header + draft.sidecar)
            if payload_bytes:
                buffers.append(memoryview(draft.payload))
            padding = frame_bytes - HEADER_BYTES - len(draft.sidecar) - payload_bytes
            if padding:
                buffers.append(_PADDING[padding])
            self.tail += frame_bytes
        self._enqueue(start, buffers, length)
        return Placed(start, self.tail, positions)

    def close_segment_early(self, store_ts: int) -> None:
        """Fill the rest of the segment, so that the next frame opens a new one; only when that one is ready."""
        left = self.segment_bytes - self.tail % self.segment_bytes
        if left < self.segment_bytes and self.segments[-1].base > self.tail:
            self._fill(left, store_ts)

    def _header(self, draft: Draft, flags: int, store_ts: int, payload_bytes: int) -> bytes:
        """Of a frame at the tail. The fields of a `FrameHeader`, of which none is made for each frame."""
        fields = (
            self.tail,
            self.confirmed,
            self.epoch,
            draft.kind,
            draft.codec,
            flags,
            VERSION,
            len(draft.sidecar),
            payload_bytes,
            google_crc32c.value(draft.sidecar) if draft.sidecar else 0,
            draft.payload_crc,
            draft.queue_id,
            draft.first_offset,
            draft.rows,
            draft.columns,
            store_ts,
            draft.payload_size,
        )
        return pack_header(fields, self.seed)

    def _fill(self, left: int, store_ts: int) -> None:
        """A filler over the rest of the segment. Less than a header of room is left as it is: a scan skips it."""
        if left >= HEADER_BYTES:
            draft = Draft(FILLER, 0, 0, 0, 0, 0, 0, b"", b"", 0, 0)
            self._enqueue(self.tail, [self._header(draft, 0, store_ts, left - HEADER_BYTES)], HEADER_BYTES)
        self.tail += left

    def _enqueue(self, position: int, buffers: list[Buffer], length: int) -> None:
        segment = self.segment_of(position)
        assert segment is not None and position + length <= segment.end
        last = self._pending[-1] if self._pending else None
        if last is not None and last.segment is segment and last.position + last.length == position:
            last.buffers.extend(buffers)
            last.length += length
        else:
            self._pending.append(Write(segment, position, length, buffers))
        self.pending_bytes += length

    def take_writes(self) -> tuple[list[Write], int]:
        """What waits to be written, and the position written once it is. The writer calls this."""
        writes, self._pending = self._pending, []
        self.pending_bytes = 0
        return writes, self.tail

    # -- files (blocking) ----------------------------------------------------------------------------------

    @staticmethod
    def write(writes: list[Write]) -> None:
        """Write them, zeros up to the end of the last page included.

        A page that is written to in part and is not in memory must be read first (a recycled segment: 60 us for a
        group of 36 KB, 10 us with the zeros). So pages are always written whole: each write begins in a page that
        the one before has left in memory. Nothing stands behind the tail yet that zeros could harm.
        """
        for write in writes:
            at = write.position - write.segment.base
            missing = min(-(at + write.length) % PAGE_BYTES, write.segment.length - at - write.length)
            write.segment.file.write(at, [*write.buffers, _ZEROS[:missing]] if missing else write.buffers)

    def segments_between(self, first: int, end: int) -> list[Segment]:
        return [segment for segment in self.segments if segment.base < end and segment.end > first]

    def read_header(self, position: int) -> FrameHeader | None:
        """The header at `position`, or None when there is none of this log (or it is not on this disk)."""
        segment = self.segment_of(position)
        if segment is None or segment.end - position < HEADER_BYTES:
            return None
        header = unpack_header(segment.file.read(position - segment.base, HEADER_BYTES), self.seed)
        return header if header is not None and header.position == position else None

    def close(self) -> None:
        for segment in self.segments:
            segment.file.close()
        self.segments.clear()


def file_size_text(length: int) -> str:
    return f"a file of {length} bytes"
