"""The tail in memory: what is appended here has an offset, stands in the index and is folded, at once.

Writing and flushing follow (`writer`); nobody is shown any of it before it is confirmed: `publish` says, in order,
what has become so, and `begin_flush` what will be next. Everything here runs on the event loop and never waits, so an
append is one step: either all of it happened or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import google_crc32c
import pyarrow as pa

from millpond.core.errors import DiskFull, NotFound
from millpond.core.frame import COPIED, EPOCH_START, HEADER_BYTES, MESSAGES, STATE, Sidecar, aligned
from millpond.core.limits import MIB, RESERVED_STATE_BYTES
from millpond.core.schema import PARTS
from millpond.store.client import QueueAppend, QueueRef, StoredFrame
from millpond.store.commitlog import CommitLog, Draft, Placed
from millpond.store.directory import Directory
from millpond.store.fold import operations as ops
from millpond.store.fold.fold import Fold
from millpond.store.fold.queues import QueueState
from millpond.store.recent import Recent
from millpond.store.store_time import StoreTime

FRAMES_PER_SEGMENT = 262_144  # bounds the open index to ~40 MB; a segment of smaller frames is closed early


DROPPED_TOPICS = 10_000  # remembered; what a start has forgotten, retention drops again
STATE_FRAME_BYTES = 4 * MIB  # a larger gathering becomes several frames


class _Unconfirmed(NamedTuple):
    end_position: int
    queue: QueueState
    end_offset: int


class Tail:
    """The append side of a store. `rolled()` is called when a segment is full, `dropped(topic id)` when the queues of a
    topic are gone."""

    def __init__(
        self,
        log: CommitLog,
        directory: Directory,
        fold: Fold,
        time: StoreTime,
        recent: Recent,
        rolled: Callable[[], None],
        dropped: Callable[[int], None],
    ) -> None:
        self.log = log
        self.directory = directory
        self.fold = fold
        self.time = time
        self._recent = recent
        self._rolled = rolled
        self._on_dropped = dropped
        self._unconfirmed: deque[_Unconfirmed] = deque()
        self._flushing: dict[int, QueueState] = {}  # by queue id: those of the flush under way
        self._dropped_topics: dict[int, None] = {}  # topic ids; the oldest first
        self._held: deque[tuple[bytes, int]] = deque()  # state frames without room yet; their changes are folded
        self.frames = 0  # since start

    # -- room ----------------------------------------------------------------------------------------------

    def has_room(self, payload_bytes: int) -> bool:
        """Whether messages of this size may be appended now; the last few MiB are kept for state."""
        reserve = min(RESERVED_STATE_BYTES, self.log.segment_bytes // 4)
        return self.log.has_room(aligned(HEADER_BYTES + payload_bytes), reserve)

    def fits(self, payload_bytes: int) -> bool:
        """Whether a frame of this size fits a segment at all."""
        return aligned(HEADER_BYTES + payload_bytes) <= self.log.segment_bytes

    # -- append --------------------------------------------------------------------------------------------

    def messages(self, queue: QueueState, append: QueueAppend, sidecar: Sidecar, sidecar_bytes: bytes) -> Placed:
        """Append one frame of messages; offsets are `queue.next_offset` and up. The caller has asked `has_room`."""
        store_ts = self.time.now_ms()
        first = queue.next_offset
        draft = Draft(
            MESSAGES,
            append.queue.queue_id,
            first,
            append.count,
            append.columns | (PARTS if append.parts else 0),
            append.codec,
            0,
            sidecar_bytes,
            append.payload,
            append.payload_crc,
            append.payload_size,
        )
        placed = self._place(draft, store_ts)
        self.directory.open.add(
            append.queue.queue_id,
            first,
            append.count,
            placed.position,
            draft.length,
            append.payload_size,
            sidecar.tag_hash,
            sidecar.key_hash,
        )
        self.fold.messages(append.queue.queue_id, first, append.count, store_ts, sidecar)
        self._recent.add(
            StoredFrame(
                append.queue.queue_id,
                placed.position,
                first,
                append.count,
                draft.columns,
                append.codec,
                store_ts,
                append.payload_size,
                pa.py_buffer(sidecar_bytes),
                append.payload,
            )
        )
        if first == queue.tiered_to:
            queue.unsealed_ts = store_ts
        queue.unsealed_bytes += append.payload_size
        self._unconfirmed.append(_Unconfirmed(placed.end, queue, first + append.count))
        return placed

    def copied(self, frame: StoredFrame, sidecar: Sidecar) -> Placed:
        """Append a frame again, unchanged but for its place, so that its old segment can be recycled."""
        draft = Draft(
            MESSAGES,
            frame.queue_id,
            frame.first_offset,
            frame.count,
            frame.columns,
            frame.codec,
            COPIED,
            frame.sidecar.to_pybytes(),
            frame.payload,
            google_crc32c.value(frame.payload),
            frame.payload_size,
        )
        placed = self._place(draft, frame.store_ts, timed=False)
        self.directory.open.add(
            frame.queue_id,
            frame.first_offset,
            frame.count,
            placed.position,
            draft.length,
            frame.payload_size,
            sidecar.tag_hash,
            sidecar.key_hash,
        )
        return placed

    def state(self, payload: bytes, operations: int) -> Placed:
        """Append state operations, folded by the caller already."""
        draft = Draft(STATE, 0, 0, operations, 0, 0, 0, b"", payload, google_crc32c.value(payload), len(payload))
        return self._place(draft, self.time.now_ms())

    def gather_state(self) -> bool:
        """Append all changes of cursors made so far. False: some wait for room and are tried again."""
        payload, operations = self.fold.take_state()
        if operations:
            self._held += ops.split(payload, operations, STATE_FRAME_BYTES)
        while self._held and self.log.has_room(aligned(HEADER_BYTES + len(self._held[0][0]))):
            self.state(*self._held.popleft())
        return not self._held

    def operation(self, operation: ops.Operation) -> Placed:
        """Append one operation as a frame of its own, and fold it. Raises DiskFull: there is not even the room that is
        kept for state."""
        payload = ops.encode(operation)
        if not self.log.has_room(aligned(HEADER_BYTES + len(payload))):
            raise DiskFull("disk_full", "the store's disk is full")
        placed = self.state(payload, 1)
        self.fold.perform(operation)
        return placed

    def open_queue(self, ref: QueueRef, first_offset: int) -> QueueState:
        """Raises NotFound(topic_not_found) when its topic was dropped, DiskFull."""
        if ref.topic_id in self._dropped_topics:
            raise NotFound("topic_not_found", "the topic was deleted")
        self.operation(ops.QueueOpen(ref, first_offset))
        queue = self.fold.queues.get(ref.queue_id)
        assert queue is not None
        return queue

    def drop_topic(self, topic_id: int) -> None:
        """Forget its queues and what they hold. Who has not heard of it yet opens none of them again: another one's
        first message would have an offset that the tier knows. Raises DiskFull: some may be left."""
        self._dropped_topics[topic_id] = None
        if len(self._dropped_topics) > DROPPED_TOPICS:
            del self._dropped_topics[next(iter(self._dropped_topics))]
        for queue in self.fold.queues.of_topic(topic_id):
            self.operation(ops.QueueDrop(queue.ref.queue_id))
        self._on_dropped(topic_id)

    def trim_queue(self, queue_id: int, start_offset: int) -> Placed:
        return self.operation(ops.QueueTrim(queue_id, start_offset))

    def epoch_start(self) -> Placed:
        draft = Draft(EPOCH_START, 0, 0, 0, 0, 0, 0, b"", b"", 0, 0)
        return self._place(draft, self.time.now_ms())

    def _place(self, draft: Draft, store_ts: int, *, timed: bool = True) -> Placed:
        if len(self.directory.open) >= FRAMES_PER_SEGMENT:
            self.log.close_segment_early(store_ts)
        placed = self.log.append([draft], store_ts)
        base = placed.position - placed.position % self.log.segment_bytes
        if base != self.directory.open.base:
            self.directory.roll(base)
            self._rolled()
        if timed:
            self.directory.open.note_time(store_ts, placed.position)
        self.frames += 1
        return placed

    # -- confirm -------------------------------------------------------------------------------------------

    def messages_end(self) -> int:
        """Position at which the last messages end that no flush has taken; 0: there are none."""
        return self._unconfirmed[-1].end_position if self._unconfirmed else 0

    def begin_flush(self) -> list[QueueState]:
        """A flush has begun: raise the flushing end of every queue of which it takes frames; these queues."""
        flushing = self.log.flushing
        waiting = self._unconfirmed
        while waiting and waiting[0].end_position <= flushing:
            _, queue, end_offset = waiting.popleft()
            queue.flushing_end = max(queue.flushing_end, end_offset)
            self._flushing[queue.ref.queue_id] = queue
        return list(self._flushing.values())

    def publish(self) -> list[QueueState]:
        """That flush has ended: what it took is confirmed; the same queues."""
        moved, self._flushing = list(self._flushing.values()), {}
        for queue in moved:
            queue.confirmed_end = queue.flushing_end
        return moved
