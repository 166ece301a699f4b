"""One receive: what is handed out to it, queue by queue.

    due rows first, at most half of the receive  ->  new messages from the head on  ->  due rows into what is left

A receive of many (more than RECEIVE_MESSAGES) ends with a frame where that leaves it at least half of what was asked:
a frame that is cut is read, opened and sent in two parts, which costs more than a smaller receive.

New messages are confirmed ones. Where there are none, and the receive waits, those that the flush under way will
confirm are handed out (`early`): the answer is made meanwhile, and shown to nobody before that flush has ended.
With a filter new ones are chosen by tag hashes on slices of the index; those that are no longer on the local disk are
handed out as a claim, for the proxy to read and filter.

Reading the index may wait. So a queue is decided under its place's lock, and what was decided before a wait is
checked again after it: settles and seeks do not take the lock.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.errors import MillpondError
from millpond.core.limits import CLAIM_MS, READ_MESSAGES, RECEIVE_MESSAGES, SCAN_ENTRIES, UNSETTLED_ROWS
from millpond.store.client import Claim, Grant, QueueEnds, QueueRef, ReceiveRequest, StoredFrame
from millpond.store.directory import FrameSpot
from millpond.store.fold.operations import Ints
from millpond.store.places import OpenClaim, Place

COLD_ROW_BYTES = 1024
"""What a row is taken for that the index no longer knows: the size most messages are below."""

SLICE_ENTRIES = 1024  # first slice of a filtered scan; each further one is four times as long
SPAN_ENTRIES = 16_384  # offsets between the first and the last row of one grant of scattered rows

Sizes = npt.NDArray[np.float64]


class DeliveryLog(Protocol):
    """What delivery needs of the store it stands in. Offsets are per queue, times ms of the store's clock."""

    def ends(self, queue_id: int) -> QueueEnds:
        """In memory; all offsets 0 for a queue that is not known."""
        ...

    def flushing_end(self, queue_id: int) -> int:
        """The confirmed end once the flush under way has ended."""
        ...

    def open_queue(self, queue: QueueRef) -> None:
        """Idempotent. Raises DiskFull."""
        ...

    async def tag_hashes(self, queue_id: int, first: int, end: int) -> npt.NDArray[np.uint32]:
        """Of the messages [first, end); fewer when some in between are not on this disk. Raises Internal."""
        ...

    async def row_bytes(self, queue_id: int, first: int, end: int) -> Sizes:
        """An estimate for each of [first, end): frame length / rows. May be shorter. Raises Internal, BelowLocal."""
        ...

    async def spots(self, queue_id: int, first: int, end: int) -> list[FrameSpot]:
        """The frames of [first, end), in order; fewer when some are not on this disk. Raises Internal, BelowLocal."""
        ...

    def spots_in_memory(self, queue_id: int, first: int, end: int) -> list[FrameSpot]:
        """The first of these that are known without a look at the disk; none when `first` is not."""
        ...

    def frames_in_memory(self, spots: list[FrameSpot], max_bytes: int) -> list[StoredFrame] | None:
        """All of these when they are at hand and fit."""
        ...

    async def frames_at(self, queue_id: int, spots: list[FrameSpot], max_bytes: int) -> list[StoredFrame]:
        """The first of these, as many as fit; one at least."""
        ...

    async def frames_for(self, queue_id: int, offsets: Ints, max_bytes: int) -> list[StoredFrame]:
        """The frames worth sending along with a grant of these ascending offsets."""
        ...

    async def timestamp_at(self, queue_id: int, offset: int) -> int:
        """The store timestamp of a message; -1 when it is not on this disk."""
        ...

    def state_changed(self) -> None:
        """Cursors are dirty: gather a state frame in this turn of the loop."""
        ...

    async def state_written(self) -> None:
        """Until all state so far is written."""
        ...

    async def state_flushed(self) -> None:
        """Until all state so far is fsynced."""
        ...

    async def confirmed(self) -> None:
        """Until all state so far is below the confirmed position."""
        ...

    @property
    def flushing(self) -> int:
        """The confirmed position once the flush under way has ended."""
        ...

    async def shown(self, position: int) -> None:
        """Until what stands below `position` is confirmed. Raises Unavailable."""
        ...


class Drawn(NamedTuple):
    """Rows leased together, before they are an answer. `spots`: where they stand, when that is known already: of new
    messages that follow each other."""

    place: Place
    generation: int
    lease: int
    offsets: Ints
    attempts: npt.NDArray[np.uint32]
    until: int
    spots: list[FrameSpot] | None = None

    def grant(self, local: int, frames: list[StoredFrame]) -> Grant:
        """As it is answered; `local`: the queue's first offset on this disk."""
        return Grant(
            self.place.queue_id, self.generation, self.lease,
            pa.py_buffer(self.offsets), pa.py_buffer(self.attempts), self.until, local, frames,
        )  # fmt: skip


class Handout:
    """What one receive has got so far, and how much more it may get."""

    def __init__(self, log: DeliveryLog, request: ReceiveRequest, now: int, due_rows: int) -> None:
        """`due_rows`: how many may be repeats while there is something new."""
        self._log = log
        self._request = request
        self._bound = min(request.max_in_flight, UNSETTLED_ROWS)
        self._tags = None if request.tag_hashes is None else np.array(request.tag_hashes, np.uint32)
        self._due_left = due_rows
        self._bytes = float(request.max_bytes)
        self.now = now
        self.messages = request.max_messages
        self.drawn: list[Drawn] = []
        self.claims: list[Claim] = []
        self.more_due: list[Place] = []
        self.unfinished = False  # a filtered scan stopped before the end
        self.early = False  # messages that are being flushed may be taken, too

    @property
    def empty(self) -> bool:
        return not self.drawn and not self.claims

    @property
    def satisfied(self) -> bool:
        return self.messages <= 0 or (self._bytes <= 0 and bool(self.drawn))

    async def visit(self, place: Place, claim_number: int) -> None:
        """Take of this queue what it has and the request still wants."""
        async with place.lock:
            await self._take_due(place, self._due_left)
            if not self.satisfied:
                await self._take_new(place, claim_number)
            if not self.satisfied and place.cursor.has_due(self.now):
                self.more_due.append(place)

    async def visit_again(self, place: Place) -> None:
        """Take repeats without the bound of half a receive: nobody had anything new for the rest."""
        async with place.lock:
            await self._take_due(place, self.messages)

    def _lease(self, place: Place, offsets: Ints, head: int, spots: list[FrameSpot] | None = None) -> None:
        until = self.now + self._request.lease_ms
        cursor = place.cursor
        lease, attempts = cursor.grant(offsets, until, head)
        self.messages -= len(offsets)
        self.drawn.append(Drawn(place, cursor.generation, lease, offsets, attempts, until, spots))

    # -- repeats ----------------------------------------------------------------------------------------------

    async def _take_due(self, place: Place, most: int) -> None:
        cursor = place.cursor
        offsets = cursor.due_rows(self.now, min(most, self.messages))
        if not len(offsets):
            return
        end = self._log.ends(place.queue_id).end_offset
        if offsets[-1] >= end:  # handed out early, and given back, or its lease was over before the flush
            place.withheld = True
            offsets = offsets[: int(offsets.searchsorted(end))]
            if not len(offsets):
                return
        offsets = offsets[: int(offsets.searchsorted(offsets[0] + SPAN_ENTRIES))]
        offsets = offsets[: await self._fitting(place, offsets)]
        offsets = offsets[cursor.still_due(offsets, self.now)]
        if len(offsets):
            self._due_left -= len(offsets)
            self._lease(place, offsets, cursor.head)

    # -- new messages -----------------------------------------------------------------------------------------

    async def _take_new(self, place: Place, claim_number: int) -> None:
        cursor = place.cursor
        ends = self._log.ends(place.queue_id)
        end = self._log.flushing_end(place.queue_id) if self.early else ends.end_offset
        cursor.trim(ends.start_offset)
        room = self._bound - cursor.in_flight
        if cursor.head >= end or place.claimed(self.now):
            return
        if room <= 0:
            place.group.full[place.queue_id] = self._bound
            return
        most = min(self.messages, room)
        if self._tags is None:
            await self._take_next(place, ends.local_offset, end, most)
        elif cursor.head < ends.local_offset:
            self._claim(place, ends, claim_number)
        else:
            await self._take_matching(place, end, most, self._tags)

    def take_at_hand(self, place: Place, *, early: bool) -> bool:
        """New messages, without a filter, whose frames the index has in memory, as `visit` would take them; `early`:
        also those that are being flushed. False: there are none, and nothing has changed."""
        cursor = place.cursor
        ends = self._log.ends(place.queue_id)
        end = self._log.flushing_end(place.queue_id) if early else ends.end_offset
        first, most = cursor.head, min(self.messages, self._bound - cursor.in_flight)
        if not max(ends.start_offset, ends.local_offset) <= first < end or most <= 0:
            return False
        spots = self._suitable(self._log.spots_in_memory(place.queue_id, first, _asked_to(first, end, most)), most)
        if spots:
            self._take_spots(place, spots, end, most)
        return bool(spots)

    async def _take_next(self, place: Place, local: int, end: int, most: int) -> None:
        cursor = place.cursor
        first, generation = cursor.head, cursor.generation
        if first >= local:
            spots = await self._frames_from(place.queue_id, first, end, most)
            if spots and (cursor.head, cursor.generation) == (first, generation):
                self._take_spots(place, spots, end, most)
            if spots:
                return
        offsets = np.arange(first, min(local if first < local else end, first + most))
        count = await self._fitting(place, offsets)
        if count and (cursor.head, cursor.generation) == (first, generation):
            self._lease(place, offsets[:count], first + count)

    def _take_spots(self, place: Place, spots: list[FrameSpot], end: int, most: int) -> None:
        """All of these frames, from the head on."""
        to = spots[-1].end
        self._bytes -= sum(spot.length for spot in spots)
        self._lease(place, np.arange(place.cursor.head, to), to, spots)
        if most > RECEIVE_MESSAGES and to < end:
            self.messages = 0  # what another queue could add would be a part of a frame

    async def _frames_from(self, queue_id: int, first: int, end: int, most: int) -> list[FrameSpot]:
        """Frames from `first` on up to `end`, `_suitable` ones."""
        try:
            spots = await self._log.spots(queue_id, first, _asked_to(first, end, most))
        except MillpondError:
            return []  # the usual way hands them out without their frames, and the proxy's own read says why
        return self._suitable(spots, most)

    def _suitable(self, spots: list[FrameSpot], most: int) -> list[FrameSpot]:
        """Those within what may still be given: what is asked for when that is not many messages, else whole frames
        alone. Nothing when they do not fit."""
        if most > RECEIVE_MESSAGES:
            return self._whole(spots, most)
        return spots if sum(spot.length for spot in spots) <= self._bytes else []

    def _whole(self, spots: list[FrameSpot], most: int) -> list[FrameSpot]:
        """The first of `spots` that go into `most` messages and what may still be given; none when others follow and
        they are less than half of either."""
        size = count = 0
        for number, spot in enumerate(spots):
            more = spot.end - spots[0].first
            if more > most or size + spot.length > self._bytes:
                return spots[:number] if 2 * count >= most or 2 * size >= self._bytes else []
            size, count = size + spot.length, more
        return spots

    async def _take_matching(self, place: Place, end: int, most: int, tags: npt.NDArray[np.uint32]) -> None:
        cursor = place.cursor
        first, generation = cursor.head, cursor.generation
        offsets, at = await self._scan(place.queue_id, first, end, most, tags)
        if len(offsets) > most:
            offsets = offsets[:most]
            at = int(offsets[-1]) + 1
        if len(offsets):
            count = await self._fitting(place, offsets)
            if count < len(offsets):
                offsets = offsets[:count]
                at = int(offsets[-1]) + 1 if count else first
        if (cursor.head, cursor.generation) != (first, generation):
            return
        if len(offsets):
            self._lease(place, offsets, at)
        else:
            cursor.advance(at)
            self.unfinished |= at < end

    async def _scan(
        self, queue_id: int, first: int, end: int, most: int, tags: npt.NDArray[np.uint32]
    ) -> tuple[Ints, int]:
        """Matching offsets from `first` on, and how far was looked."""
        pieces: list[Ints] = []
        found, at = 0, first
        width = max(SLICE_ENTRIES, min(4 * most, SPAN_ENTRIES))
        while at < end and found < most and at - first < (SPAN_ENTRIES if found else SCAN_ENTRIES):
            hashes = await self._log.tag_hashes(queue_id, at, min(end, at + width))
            if not len(hashes):
                break
            matches = np.flatnonzero(hashes == tags[0] if len(tags) == 1 else np.isin(hashes, tags)) + at
            pieces.append(matches)
            found += len(matches)
            at += len(hashes)
            width = min(4 * width, SCAN_ENTRIES - (at - first))
        offsets = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        cut = int(offsets.searchsorted(offsets[0] + SPAN_ENTRIES)) if len(offsets) else 0
        return offsets[:cut], (int(offsets[cut]) if cut < len(offsets) else at)

    def _claim(self, place: Place, ends: QueueEnds, number: int) -> None:
        """One claim for each receive: the proxy filters it before it asks for more."""
        if self.claims:
            return
        cursor = place.cursor
        end = min(ends.local_offset, ends.end_offset, cursor.head + READ_MESSAGES)
        place.claim = OpenClaim(number, cursor.head, end, self.now + CLAIM_MS)
        self.claims.append(Claim(place.queue_id, cursor.generation, number, cursor.head, end))

    # -- bytes ------------------------------------------------------------------------------------------------

    async def _fitting(self, place: Place, offsets: Ints) -> int:
        """How many of these ascending offsets fit what is left of `max_bytes`; the first message always does."""
        if len(offsets) == 1 and not self.drawn:
            self._bytes -= COLD_ROW_BYTES  # one message is always given, whatever its size
            return 1
        sizes = await self._sizes(place, offsets)
        total = np.cumsum(sizes)
        count = int(total.searchsorted(self._bytes, side="right"))
        if not count and not self.drawn:
            count = 1
        if count:
            self._bytes -= float(total[count - 1])
        if count < len(offsets):
            self._bytes = 0
        return count

    async def _sizes(self, place: Place, offsets: Ints) -> Sizes:
        first, end = int(offsets[0]), int(offsets[-1]) + 1
        local = self._log.ends(place.queue_id).local_offset
        sizes = np.full(end - first, COLD_ROW_BYTES, np.float64)
        if end > local:
            from_local = max(first, local)
            try:
                known = await self._log.row_bytes(place.queue_id, from_local, end)
            except MillpondError:
                # the messages cannot be read: hand them out without their frames, the proxy's own read says why
                known = sizes[:0]
            sizes[from_local - first : from_local - first + len(known)] = known
        return sizes[offsets - first]


def _asked_to(first: int, end: int, most: int) -> int:
    """Up to where the index is asked for `most` messages: of many one more says whether the last frame goes on."""
    return min(end, first + most + (most > RECEIVE_MESSAGES))
