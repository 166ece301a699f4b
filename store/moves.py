"""Where groups stand in their queues, and how they are moved: `Moves`.

A seek is done once for each of its ids, however often it is asked: the cursor remembers the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from millpond.core.errors import BadRequest
from millpond.store.client import (
    LagRequest,
    LagResult,
    QueueLag,
    QueueRef,
    SeekOutcome,
    SeekRequest,
    SeekResult,
)
from millpond.store.fold.cursor import LastSeek
from millpond.store.groups import Groups
from millpond.store.handout import DeliveryLog
from millpond.store.places import Place


class Moves:
    def __init__(
        self,
        log: DeliveryLog,
        groups: Groups,
        now_ms: Callable[[], int],
        note_due: Callable[[Place, int], None],
    ) -> None:
        """`note_due` is told when a queue's earliest due time may have changed."""
        self._log = log
        self._groups = groups
        self._now_ms = now_ms
        self._note_due = note_due

    async def seek(self, request: SeekRequest) -> SeekResult:
        """Raises BadRequest, DiskFull. Offsets beyond a queue's ends are taken for that end."""
        if len(request.queues) != len(request.offsets):
            raise BadRequest.field("offsets", "one for each queue", len(request.offsets))
        id_hash = int.from_bytes(blake2b(request.seek_id.encode(), digest_size=8).digest(), "little") >> 1 or 1
        if not request.dry_run:
            self._groups.begin(request.group, [*request.queues, *request.others], request.start)
        pairs = zip(request.queues, request.offsets, strict=True)
        outcomes = [self._seek(request, queue, offset, id_hash) for queue, offset in pairs]
        if not request.dry_run:
            self._log.state_changed()
            await self._log.state_flushed()
            await self._log.confirmed()
        return SeekResult(outcomes)

    def _seek(self, request: SeekRequest, queue: QueueRef, offset: int, id_hash: int) -> SeekOutcome:
        place = self._groups.find(request.group.group_id, queue.queue_id)
        if place is not None and place.cursor.last_seek.id_hash == id_hash:
            last = place.cursor.last_seek
            return SeekOutcome(queue.queue_id, last.from_offset, last.to_offset)
        ends = self._log.ends(queue.queue_id)
        to = max(ends.start_offset, min(offset, ends.end_offset))
        if place is None:
            assert request.dry_run, "the group has begun in every queue that is moved"
            begins = self._groups.begins_at(request.group.group_id, queue.queue_id, request.start)
            return SeekOutcome(queue.queue_id, begins, to)
        outcome = SeekOutcome(queue.queue_id, place.cursor.committed, to)
        if request.dry_run:
            return outcome
        place.cursor.seek(to, request.keep_retries, LastSeek(id_hash, outcome.from_offset, to))
        place.claim = None
        place.group.full.pop(queue.queue_id, None)
        self._note_due(place, place.cursor.earliest_due)
        place.group.rouse(queue.queue_id)
        return outcome

    async def lag(self, request: LagRequest) -> LagResult:
        """Answers when what it tells is on the disk: progress that was seen does not go back. Raises Unavailable."""
        queues = [await self._lag(request, queue.queue_id) for queue in request.queues]
        await self._log.confirmed()
        return LagResult(queues, self._now_ms())

    async def _lag(self, request: LagRequest, queue_id: int) -> QueueLag:
        ends = self._log.ends(queue_id)
        place = self._groups.find(request.group.group_id, queue_id)
        if place is None:
            committed = head = self._groups.begins_at(request.group.group_id, queue_id, request.start)
            in_flight = skipped = 0
        else:
            cursor = place.cursor
            head, in_flight = max(cursor.head, ends.start_offset), cursor.in_flight
            committed = max(cursor.committed, ends.start_offset)
            skipped = cursor.skipped + head - cursor.head
            if head > ends.end_offset:  # handed out early: nobody has seen those messages
                head, in_flight = ends.end_offset, in_flight - cursor.in_flight_from(ends.end_offset)
                committed = min(committed, head)
        oldest_ts = await self._log.timestamp_at(queue_id, committed) if committed < ends.end_offset else -1
        return QueueLag(
            queue_id, ends.start_offset, committed, head, ends.end_offset, in_flight, oldest_ts, skipped,
            place is not None,
        )  # fmt: skip
