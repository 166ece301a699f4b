"""Reads frames back from segments, and believes none that does not prove itself.

Segments are read with pread into fresh buffers, never mapped: a recycled file would change under the sender.
A frame must carry its own position, the log's seed and both checksums; otherwise its range is quarantined and
the reader is told so, with the range: never zeros, never a silent skip.

The newest frames are in memory (`recent`). Small reads of pages that are in memory too run on the event loop
(`read_cached`: no thread is woken, nothing can wait); everything else runs in a small pool.

A frame is read and checked as a whole, whoever wants how few rows of it. So one of which a reader wanted only a part
is kept for a while: the rest is likely asked for next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

import google_crc32c
import msgspec
import pyarrow as pa

from millpond.core.errors import BelowLocal, Internal
from millpond.core.frame import HEADER_BYTES, FrameHeader, unpack_header
from millpond.core.limits import BEGUN_BYTES, BEGUN_SECONDS, KIB, MIB
from millpond.core.threads import Threads
from millpond.store.client import StoredFrame
from millpond.store.commitlog import Segment
from millpond.store.directory import FrameSpot
from millpond.store.flushes import Flushes
from millpond.store.recent import Recent

INLINE_READ_BYTES = 256 * KIB  # copy and checksum of it take ~60 us
GAP_BYTES = 16 * KIB  # frames of other queues up to here are read along rather than sought over
EXTENT_BYTES = 8 * MIB


class Extent(NamedTuple):
    """Consecutive bytes of one segment that hold some wanted frames."""

    segment: Segment
    position: int
    end: int
    spots: list[FrameSpot]


class DamagedFrame(Exception):
    """The frame at [position, end) does not prove itself."""

    def __init__(self, position: int, end: int) -> None:
        super().__init__(f"log damaged at {position}..{end}")
        self.position = position
        self.end = end


class Segments(Protocol):
    """What is needed of the log (`commitlog.CommitLog`)."""

    @property
    def seed(self) -> int: ...
    @property
    def first_position(self) -> int: ...
    @property
    def open_from(self) -> int: ...
    def segment_of(self, position: int) -> Segment | None: ...
    def read_header(self, position: int) -> FrameHeader | None: ...


class FrameReader:
    def __init__(self, log: Segments, recent: Recent, quarantine: Callable[[int, int], None], flushes: Flushes) -> None:
        """`quarantine(position, end)` is told of every damaged range. While `flushes` are awaited, the disk is read
        gently."""
        self._log = log
        self._recent = recent
        self._quarantine = quarantine
        self._flushes = flushes
        self._begun = Recent(BEGUN_BYTES)
        self._forgetting: asyncio.TimerHandle | None = None
        self._threads = Threads(2, "millpond-read")
        self._background = Threads(1, "millpond-seal-read")

    async def frames(self, spots: list[FrameSpot], *, background: bool = False) -> list[StoredFrame]:
        """The frames at `spots`, in their order; `background`: nobody waits for them, they are read when there is time.
        Raises Internal(corrupt_range): `offset` is the first that cannot be read, `next_offset` the first behind it
        that may."""
        recent = [self._recent.get(spot.position) or self._begun.get(spot.position) for spot in spots]
        absent = [spot for spot, frame in zip(spots, recent, strict=True) if frame is None]
        stored = iter(await self._stored(absent, background) if absent else [])
        return [next(stored) if frame is None else frame for frame in recent]

    def newest(self, spots: list[FrameSpot]) -> list[StoredFrame] | None:
        """The frames at `spots` when all are of the newest."""
        found = [frame for spot in spots if (frame := self._recent.get(spot.position)) is not None]
        return found if len(found) == len(spots) else None

    def in_memory(self, spot: FrameSpot) -> bool:
        """Whether this frame is one of the newest: no disk is read for it."""
        return self._recent.get(spot.position) is not None

    def begun(self, spot: FrameSpot) -> StoredFrame | None:
        """This frame, when it was read for a part of its rows and kept for the rest."""
        return self._begun.get(spot.position)

    async def _stored(self, spots: list[FrameSpot], background: bool = False) -> list[StoredFrame]:
        """The frames at `spots` from their segments."""
        try:
            extents = self._extents(spots)
            if sum(extent.end - extent.position for extent in extents) <= INLINE_READ_BYTES:
                cached = self._cached(extents)
                if cached is not None:
                    return cached
            threads = self._background if background else self._threads
            gently = background or self._flushes.lately()
            frames = await threads.run(self._load, extents, gently)
        except DamagedFrame as error:
            if self._log.segment_of(error.position) is None:
                raise BelowLocal(
                    "below_local", "recycled while it was read", first_position=self._log.first_position
                ) from error
            self._quarantine(error.position, error.end)
            spot = next(spot for spot in spots if spot.position == error.position)
            raise Internal(
                "corrupt_range",
                f"{error}: neither this disk nor a replica holds these messages",
                position=error.position,
                end=error.end,
                offset=spot.first,
                next_offset=spot.end,
            ) from error
        self._keep_begun(spots, frames)
        return frames

    def _keep_begun(self, spots: list[FrameSpot], frames: list[StoredFrame]) -> None:
        """Keep those of which more rows are there than were wanted."""
        for spot, frame in zip(spots, frames, strict=True):
            if 0 < spot.end - spot.first < frame.count and self._begun.get(frame.position) is None:
                alone = 2 * spot.length > sum(one.length for one in spots)  # else it would keep its neighbours too
                self._begun.add(frame if alone else _copied(frame))
                if self._forgetting is not None:
                    self._forgetting.cancel()
                self._forgetting = asyncio.get_running_loop().call_later(BEGUN_SECONDS, self._begun.clear)

    async def timestamps(self, spots: list[FrameSpot]) -> list[int]:
        """Store timestamps (ms) of the frames at `spots`, from their headers alone."""
        return await self._threads.run(self._timestamps, spots)

    def _timestamps(self, spots: list[FrameSpot]) -> list[int]:
        stamps: list[int] = []
        for spot in spots:
            header = self._log.read_header(spot.position)
            if header is None:
                raise Internal("corrupt_range", f"log damaged at {spot.position}", position=spot.position)
            stamps.append(header.store_ts)
        return stamps

    def _extents(self, spots: list[FrameSpot]) -> list[Extent]:
        extents: list[Extent] = []
        for spot in spots:
            last = extents[-1] if extents else None
            end = spot.position + spot.length
            if (
                last is not None
                and last.end <= spot.position <= last.end + GAP_BYTES
                and end <= last.segment.end
                and end - last.position <= EXTENT_BYTES
            ):
                last.spots.append(spot)
                extents[-1] = last._replace(end=end)
                continue
            segment = self._log.segment_of(spot.position)
            if segment is None:
                raise DamagedFrame(spot.position, end)  # the index names what is gone: never a silent skip
            extents.append(Extent(segment, spot.position, end, [spot]))
        return extents

    def _cached(self, extents: list[Extent]) -> list[StoredFrame] | None:
        frames: list[StoredFrame] = []
        for extent in extents:
            data = extent.segment.file.read_cached(extent.position - extent.segment.base, extent.end - extent.position)
            if data is None:
                return None
            self._parse(extent, pa.py_buffer(data), frames)
        return frames

    def _load(self, extents: list[Extent], gently: bool) -> list[StoredFrame]:
        frames: list[StoredFrame] = []
        for extent in extents:
            file, at = extent.segment.file, extent.position - extent.segment.base
            still = extent.segment.base < self._log.open_from
            if gently:
                data = file.read_gently(at, extent.end - extent.position, self._flushes.stand_back, still)
            else:
                data = file.read_once(at, extent.end - extent.position, still=still)
            self._parse(extent, data, frames)
        return frames

    def _parse(self, extent: Extent, data: pa.Buffer, frames: list[StoredFrame]) -> None:
        for spot in extent.spots:
            at = spot.position - extent.position
            if at + spot.length > data.size:  # the file ends before it: its blocks are being given back
                raise DamagedFrame(spot.position, spot.position + spot.length)
            header = unpack_header(memoryview(data)[at : at + HEADER_BYTES], self._log.seed)
            if header is None or header.position != spot.position or header.length != spot.length:
                raise DamagedFrame(spot.position, spot.position + spot.length)
            frames.append(stored_frame(header, data.slice(at, spot.length)))

    def close(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._threads.close()
        self._background.close()


def _copied(frame: StoredFrame) -> StoredFrame:
    """The same in buffers of its own."""
    sidecar, payload = (pa.py_buffer(buffer.to_pybytes()) for buffer in (frame.sidecar, frame.payload))
    return msgspec.structs.replace(frame, sidecar=sidecar, payload=payload)


def stored_frame(header: FrameHeader, data: pa.Buffer) -> StoredFrame:
    """The frame in `data`, checksums compared. Raises DamagedFrame."""
    sidecar = data.slice(HEADER_BYTES, header.sidecar_length)
    payload = data.slice(HEADER_BYTES + header.sidecar_length, header.payload_length)
    if google_crc32c.value(sidecar) != header.sidecar_crc or google_crc32c.value(payload) != header.payload_crc:
        raise DamagedFrame(header.position, header.position + header.length)
    return StoredFrame(
        header.queue_id,
        header.position,
        header.first_offset,
        header.rows,
        header.columns,
        header.codec,
        header.store_ts,
        header.payload_size,
        sidecar,
        payload,
    )
