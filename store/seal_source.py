"""What the sealer sees of a store: confirmed frames, and how much of each topic is not in the tier yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millpond.core.errors import MillpondError, NotFound
from millpond.store.client import QueueRef, StoredFrame
from millpond.store.directory import FrameSpot
from millpond.store.fold.queues import QueueState
from millpond.store.reader import FrameReader
from millpond.store.tail import Tail

_SPOTS = 4096


class EngineSealSource:
    """`SealSource` over a store's tail and reader."""

    def __init__(
        self,
        store_group: str,
        tail: Tail,
        reader: FrameReader,
        missing: Callable[[int, int], MillpondError],
        wake_bytes: int,
        local_bytes: int,
    ) -> None:
        """`missing(queue id, offset)`: why an offset has no frame here. `wake_bytes`: what a topic gathers before the
        sealer is woken at once. `local_bytes`: what the disk should hold."""
        self._store_group = store_group
        self._tail = tail
        self._reader = reader
        self._missing = missing
        self._wake = asyncio.Event()
        self._wake_bytes = wake_bytes
        self._local_bytes = local_bytes
        self._appended_bytes = 0
        self._stirred = asyncio.Event()
        self._gathered: dict[int, int] = {}  # topic id -> bytes confirmed since the sealer was last woken for it

    @property
    def store_group(self) -> str:
        return self._store_group

    @property
    def epoch(self) -> int:
        return self._tail.log.epoch

    @property
    def wake(self) -> asyncio.Event:
        return self._wake

    @property
    def appended_bytes(self) -> int:
        return self._appended_bytes

    @property
    def stirred(self) -> asyncio.Event:
        """Set with everything that is appended; whoever waits for it clears it."""
        return self._stirred

    @property
    def tail(self) -> int:
        """Where the log ends."""
        return self._tail.log.tail

    @property
    def open_from(self) -> int:
        return self._tail.log.open_from

    @property
    def behind(self) -> bool:
        """Whether the disk holds a quarter more than it should: what is not sealed cannot be recycled."""
        log = self._tail.log
        return len(log.segments) >= 3 and 4 * len(log.segments) * log.segment_bytes > 5 * self._local_bytes

    def note(self, topic_id: int, size: int) -> None:
        """`size` more bytes of a topic were appended."""
        self._appended_bytes += size
        self._stirred.set()
        gathered = self._gathered.get(topic_id, 0) + size
        if gathered >= self._wake_bytes:
            gathered = 0
            self._wake.set()
        self._gathered[topic_id] = gathered

    def drop_topic(self, topic_id: int) -> None:
        """It was deleted."""
        self._gathered.pop(topic_id, None)

    def topic_ids(self) -> list[int]:
        return self._tail.fold.queues.topic_ids()

    def queue_refs(self, topic_id: int) -> list[QueueRef]:
        return [queue.ref for queue in self._tail.fold.queues.of_topic(topic_id)]

    def confirmed_end(self, queue_id: int) -> int:
        queue = self._tail.fold.queues.get(queue_id)
        return queue.confirmed_end if queue is not None else 0

    def start_offset(self, queue_id: int) -> int:
        queue = self._tail.fold.queues.get(queue_id)
        return queue.start_offset if queue is not None else 0

    def unsealed(self, topic_id: int) -> tuple[int, int]:
        size, oldest = 0, 0
        for queue in self._tail.fold.queues.of_topic(topic_id):
            found = self.unsealed_of(queue.ref.queue_id)
            if not found:
                continue
            size += found
            stamp = self._stamp(queue)
            oldest = stamp if oldest == 0 else min(oldest, stamp)
        return size, oldest

    def unsealed_of(self, queue_id: int) -> int:
        queue = self._tail.fold.queues.get(queue_id)
        if queue is None or self._first_unsealed(queue) >= queue.confirmed_end:
            return 0
        return max(1, queue.unsealed_bytes)

    @staticmethod
    def _first_unsealed(queue: QueueState) -> int:
        return max(queue.tiered_to, queue.start_offset)

    def _stamp(self, queue: QueueState) -> int:
        """About the store timestamp of the first message not in the tier; remembered until it is sealed."""
        if queue.unsealed_ts < 0:
            stamp = self._tail.directory.stamp_before(queue.ref.queue_id, self._first_unsealed(queue))
            queue.unsealed_ts = stamp if stamp is not None else queue.last_ts
        return queue.unsealed_ts

    async def frames(self, queue_id: int, offset: int, end: int, max_bytes: int) -> list[StoredFrame]:
        return await self._reader.frames(await self.spots(queue_id, offset, end, max_bytes, _SPOTS), background=True)

    async def spots(self, queue_id: int, offset: int, end: int, max_bytes: int, most: int) -> list[FrameSpot]:
        """Where the frames are that `frames` reads, of at most `most` offsets."""
        queue = self._tail.fold.queues.get(queue_id)
        if queue is None:
            raise NotFound("queue_not_found", f"queue {queue_id} was deleted")
        end = min(end, queue.confirmed_end)
        if offset >= end:
            return []
        spots = await self._tail.directory.spots(queue_id, offset, min(most, end - offset))
        if not spots:
            raise self._missing(queue_id, offset)
        chosen: list[FrameSpot] = []
        size = 0
        for spot in spots:
            if chosen and size + spot.length > max_bytes:
                break
            chosen.append(spot)
            size += spot.length
        return chosen

    def tiered(self, queue_id: int, end: int) -> None:
        queue = self._tail.fold.queues.get(queue_id)
        if queue is not None and end > queue.tiered_to:
            queue.tiered_to = end
            queue.unsealed_ts = -1
            queue.unsealed_bytes = self._tail.directory.bytes_of(queue_id, end)
