"""How leases are settled: `Settles`. Acks, nacks, extends, skips and releases of rows, by columns.

An answer that says `already` or `void` tells of an earlier change, and waits until that is on the disk as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.core.deadlines import Deadlines
from millpond.core.errors import BadRequest, Unavailable
from millpond.store.client import GroupRef, Settle, SettleOutcome, SettleRequest, SettleResult
from millpond.store.fold.cursor import ALREADY, OK, UNKNOWN, VOID
from millpond.store.fold.operations import Ints
from millpond.store.groups import Groups
from millpond.store.handout import DeliveryLog
from millpond.store.places import Place


class Settles:
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
        self._deadlines = Deadlines()

    async def settle(self, request: SettleRequest) -> SettleResult:
        """Answers when the state is as durable as the topic asks. Raises Unavailable(deadline_exceeded)."""
        now = self._now_ms()
        outcomes = [self._settle(request.group, one, now) for one in request.settles]
        changed = any(rows for _, rows in outcomes)
        if changed:
            self._log.state_changed()
        if any(ALREADY in statuses or VOID in statuses for statuses, _ in outcomes):
            await self._within(self._log.confirmed(), request.deadline_ms)
        elif changed:
            durable = self._log.state_flushed if request.durability == "flush" else self._log.state_written
            await self._within(durable(), request.deadline_ms)
        return SettleResult([SettleOutcome(pa.py_buffer(statuses), rows) for statuses, rows in outcomes])

    async def _within(self, durable: Awaitable[Any], deadline_ms: int) -> None:
        try:
            with self._deadlines.within(deadline_ms / 1000):
                await durable
        except TimeoutError:
            raise Unavailable("deadline_exceeded", "not durable within the deadline; it may become so yet") from None

    def _settle(self, group: GroupRef, one: Settle, now: int) -> tuple[bytes, int]:
        """The statuses, a byte each, and how many rows were settled."""
        place = self._groups.find(group.group_id, one.queue_id)
        if place is None:
            return bytes((UNKNOWN,)) * (1 if one.ranges is not None else len(offsets_of(one.offsets))), 0
        due = now + max(0, one.delay_ms)
        cursor = place.cursor
        if one.ranges is not None:
            ranges = offsets_of(one.ranges)
            if len(ranges) % 2:
                raise BadRequest.field("ranges", "pairs of first and end", len(ranges))
            status, rows = cursor.settle_ranges(one.lease, one.generation, ranges, one.action, due)
            statuses = bytes((status,))
        else:
            offsets = offsets_of(one.offsets)
            statuses = cursor.settle(one.lease, one.generation, offsets, one.action, due).tobytes()
            rows = statuses.count(OK)
        if rows:
            self._settled(place, one.action in {"nack", "release"} and due <= now)
        return statuses, rows

    def _settled(self, place: Place, due_now: bool) -> None:
        group, queue_id = place.group, place.queue_id
        if queue_id in group.full and place.cursor.in_flight < group.full[queue_id]:
            del group.full[queue_id]
            group.rouse(queue_id)
        elif due_now:
            group.rouse(queue_id)
        if place.cursor.earliest_due < place.noted_due:
            self._note_due(place, place.cursor.earliest_due)


def offsets_of(buffer: pa.Buffer | None) -> Ints:
    """i64[n] of a request. Raises BadRequest."""
    if buffer is None:
        raise BadRequest.field("offsets", "offsets or ranges")
    if len(buffer) % 8:
        raise BadRequest.field("offsets", "64-bit integers", len(buffer))
    return np.frombuffer(buffer, np.int64)
