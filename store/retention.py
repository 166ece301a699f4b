"""The local disk is a cache of the log: which segments may go, and what must happen first.

A segment may be recycled once every message in it is tiered or expired, two checkpoints cover its state, and the
disk holds more than `local_bytes`. When such a segment still holds messages that are not sealed, they are
appended again unchanged (`copied`) if they are at most half of it, else, or when the disk is too full for that, their
topics are sealed now.

Retention of a topic is logical: time and size advance `start_offset`, durably, and say nothing about disks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt

from millpond.core.errors import BelowLocal, Internal, MillpondError
from millpond.core.frame import unpack_sidecar
from millpond.metadata.client import MetadataClient, TopicSettings
from millpond.store.checkpoint import Checkpoints
from millpond.store.client import GroupRef, TimeRequest
from millpond.store.commitlog import Segment
from millpond.store.delivery import Delivery
from millpond.store.directory import FrameSpot
from millpond.store.fold.queues import QueueState
from millpond.store.housekeeping import Housekeeping
from millpond.store.reader import FrameReader
from millpond.store.reads import Reads
from millpond.store.tail import Tail
from millpond.store.writer import Writer

_log = logging.getLogger("millpond.store")

ROUND_SECONDS = 5.0
TRIM_ROUNDS = 12  # topics' retention is looked at once a minute
_COPY_FRAMES = 256


class Retention:
    """`seal(topic_id)` seals a topic's confirmed messages now."""

    def __init__(
        self,
        tail: Tail,
        writer: Writer,
        reader: FrameReader,
        reads: Reads,
        checkpoints: Checkpoints,
        delivery: Delivery,
        metadata: MetadataClient,
        seal: Callable[[int], Awaitable[object]],
        local_bytes: int,
    ) -> None:
        self._tail = tail
        self._writer = writer
        self._reader = reader
        self._reads = reads
        self._checkpoints = checkpoints
        self._delivery = delivery
        self._metadata = metadata
        self._seal = seal
        self._local_bytes = local_bytes
        self._moved: set[int] = set()  # bases of segments whose unsealed frames stand again at the tail, flushed

    # -- segments ------------------------------------------------------------------------------------------

    def _too_much(self) -> Segment | None:
        """The oldest segment when the disk holds more than it should, else None."""
        log = self._tail.log
        too_much = len(log.segments) >= 3 and len(log.segments) * log.segment_bytes > self._local_bytes
        return log.segments[0] if too_much else None

    def wanted(self) -> Segment | None:
        """The oldest segment when the disk holds more than it should and its state is covered, else None."""
        oldest = self._too_much()
        if oldest is None or oldest.end > min(self._checkpoints.recyclable_below, self._tail.log.confirmed):
            return None
        return oldest if self._tail.directory.is_closed(oldest.base) else None

    def recyclable(self) -> Segment | None:
        """The oldest segment when it may go now; the caller takes it out of the log at once."""
        oldest = self.wanted()
        if oldest is None:
            return None
        runs = self._tail.directory.runs_in(oldest.base)
        if oldest.base not in self._moved and len(self._unsealed(runs)):
            return None
        self._raise_local_offsets(runs)
        self._moved.discard(oldest.base)
        return oldest

    def _unsealed(self, runs: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
        """Numbers of the runs that hold a message neither tiered nor expired."""
        queues = self._tail.fold.queues
        kept = [
            max(queue.tiered_to, queue.start_offset) if (queue := queues.get(int(queue_id))) is not None else -1
            for queue_id in runs["queue"]
        ]
        needed = np.array(kept, np.int64)
        ends = runs["first"].astype(np.int64) + runs["count"].astype(np.int64)
        return np.flatnonzero((needed >= 0) & (ends > needed))

    def _raise_local_offsets(self, runs: npt.NDArray[np.void]) -> None:
        """Of the queues of a segment that goes: its messages are in the tier or expired, or stand again at the tail."""
        queues = self._tail.fold.queues
        for run in runs:
            queue = queues.get(int(run["queue"]))
            if queue is not None:
                gone = min(int(run["first"]) + int(run["count"]), max(queue.tiered_to, queue.start_offset))
                queue.local_offset = max(queue.local_offset, gone)

    async def loop(self, housekeeping: Housekeeping) -> None:
        """Every few seconds: free what is above `local_bytes`; now and then `trim`."""
        rounds = 0
        while True:
            await asyncio.sleep(ROUND_SECONDS)
            rounds += 1
            try:
                if rounds % TRIM_ROUNDS == 0:
                    await self.trim()  # first: what a deleted topic has left may be what a segment waits for
                await self.free(housekeeping)
            except MillpondError as error:
                _log.warning("retention waits: %s", error)

    async def free(self, housekeeping: Housekeeping) -> None:
        """Give back segments until the disk holds `local_bytes`, or until one must wait. One whose state two
        checkpoints do not cover asks for the next: after a burst nothing else might, and the disk would hold it all."""
        oldest = self._too_much()
        if oldest is not None and self._checkpoints.recyclable_below < oldest.end <= self._tail.log.confirmed:
            if housekeeping.checkpoint_position == self._tail.log.tail:
                self._writer.mark(again=True)  # two checkpoints stand at two positions: nothing else might be appended
            housekeeping.demand_checkpoint()
        while (oldest := self.wanted()) is not None:
            if self.recyclable() is oldest:
                assert self._tail.log.drop_first_segment() is oldest
                await housekeeping.release(oldest)
                continue
            if not await self._clear(oldest, housekeeping):
                return

    async def _clear(self, oldest: Segment, housekeeping: Housekeeping) -> bool:
        """Make the oldest segment recyclable: copy its few unsealed messages, or seal their topics. False: not now."""
        runs = self._tail.directory.runs_in(oldest.base)
        unsealed = runs[self._unsealed(runs)]
        if 2 * int(unsealed["bytes"].sum()) <= oldest.length:
            if await self._copy(oldest, unsealed):
                return True
            if not housekeeping.disk_full:  # a segment is on its way
                return False
        queues = self._tail.fold.queues
        known = [queue for queue_id in unsealed["queue"] if (queue := queues.get(int(queue_id))) is not None]
        for topic_id in {queue.ref.topic_id for queue in known}:
            await self._seal(topic_id)
        return not len(self._unsealed(runs))

    async def _copy(self, oldest: Segment, runs: npt.NDArray[np.void]) -> bool:
        """False: the tail has no room for all of them."""
        spots: list[FrameSpot] = []
        for run in runs:
            queue = self._tail.fold.queues.get(int(run["queue"]))
            if queue is None:
                continue
            first, end = int(run["first"]), int(run["first"]) + int(run["count"])
            first = max(first, min(queue.tiered_to, end))
            spots += await self._tail.directory.spots(int(run["queue"]), first, end - first)
        for start in range(0, len(spots), _COPY_FRAMES):
            for frame in await self._reader.frames(spots[start : start + _COPY_FRAMES]):
                if oldest.base <= frame.position < oldest.end:
                    if not self._tail.has_room(len(frame.sidecar) + len(frame.payload)):
                        return False
                    self._tail.copied(frame, unpack_sidecar(frame.sidecar, frame.count, frame.columns))
            self._writer.wake()
            await self._writer.flushed(self._tail.log.tail)
        self._moved.add(oldest.base)
        return True

    # -- topics --------------------------------------------------------------------------------------------

    async def trim(self) -> None:
        """Advance the `start_offset` of every queue whose topic keeps messages for a time or a size. Drop the queues of
        topics, and the cursors of groups, that were deleted: the store may have been away then, or a proxy that had not
        heard of it was late."""
        groups = self._delivery.groups()  # before metadata is asked: what is not there then was there before
        settings = await self._metadata.topic_settings(self._tail.fold.queues.topic_ids())
        for topic_id, of_topic in settings.items():
            if of_topic is None:
                _log.info("topic %d was deleted: its queues are dropped", topic_id)
                self._tail.drop_topic(topic_id)
                self._writer.wake()
                continue
            if of_topic.retention_ms is None and of_topic.retention_bytes is None:
                continue
            for queue in self._tail.fold.queues.of_topic(topic_id):
                try:
                    start = await self._start(queue, of_topic)
                except (Internal, BelowLocal) as error:  # damaged there: that holds up no other
                    _log.warning("retention leaves queue %d as it is: %s", queue.ref.queue_id, error)
                    continue
                if start > queue.start_offset:
                    self._tail.trim_queue(queue.ref.queue_id, start)
                    self._writer.wake()
        await self._drop_groups([group for group in groups if settings.get(group.topic_id) is not None])

    async def _drop_groups(self, groups: list[GroupRef]) -> None:
        """Those of these that were deleted. Their topics are there: of others, metadata would not know them either."""
        living = set(await self._metadata.living_groups([group.group_id for group in groups]))
        for group in groups:
            if group.group_id not in living:
                _log.info("group %d was deleted: its cursors are dropped", group.group_id)
                self._delivery.drop_group(group)

    async def _start(self, queue: QueueState, settings: TopicSettings) -> int:
        start = queue.start_offset
        if settings.retention_ms is not None:
            ts = self._tail.time.now_ms() - settings.retention_ms
            start = max(start, (await self._reads.offsets_at(TimeRequest([queue.ref.queue_id], ts))).offsets[0])
        if settings.retention_bytes is not None:
            share = settings.retention_bytes // max(1, settings.queues)
            start = max(start, self._tail.directory.offset_of_bytes(queue.ref.queue_id, share))
        return min(start, queue.confirmed_end)
