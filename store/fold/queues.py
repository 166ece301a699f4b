"""What the fold knows of queues: where each begins and ends.

`start_offset` is where reading may begin (retention raises it), `next_offset` where the next message goes.
`flushing_end`, `confirmed_end`, `local_offset`, `tiered_to` and what is unsealed are not part of the fold: they say
what is about to be confirmed and is so, on this disk and in the tier, and are worked out anew at start.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from millpond.store.client import QueueEnds, QueueRef
from millpond.store.fold.snapshot import Snapshot, Tables, table_of


class QueueState:
    __slots__ = (
        "confirmed_end", "flushing_end", "last_ts", "local_offset", "next_offset", "ref", "start_offset", "tiered_to",
        "unsealed_bytes", "unsealed_ts",
    )  # fmt: skip

    def __init__(self, ref: QueueRef, first_offset: int) -> None:
        self.ref = ref
        self.start_offset = first_offset
        self.next_offset = first_offset
        self.last_ts = 0
        self.confirmed_end = first_offset
        self.flushing_end = first_offset  # what the flush under way makes of it; no less than it
        self.local_offset = first_offset
        self.tiered_to = first_offset
        self.unsealed_bytes = 0  # payload bytes not in the tier yet, an estimate after a start
        self.unsealed_ts = -1  # store timestamp of the first of them; -1: not looked up

    def ends(self) -> QueueEnds:
        return QueueEnds(
            self.ref.queue_id,
            self.start_offset,
            max(self.local_offset, self.start_offset),
            self.confirmed_end,
            self.last_ts,
        )


_COLUMNS = ("tenant_id", "topic_id", "queue_id", "queue", "start_offset", "next_offset", "last_ts")
_row_of = attrgetter("ref", "start_offset", "next_offset", "last_ts")


def _flat(row: tuple[Any, ...]) -> tuple[int, ...]:
    ref, *numbers = row
    return ref.tenant_id, ref.topic_id, ref.queue_id, ref.queue, *numbers


class Queues:
    """All queues of a store, by queue id."""

    def __init__(self) -> None:
        self._queues: dict[int, QueueState] = {}
        self._topics: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[QueueState]:
        return iter(self._queues.values())

    def get(self, queue_id: int) -> QueueState | None:
        return self._queues.get(queue_id)

    def topic_ids(self) -> list[int]:
        return list(self._topics)

    def of_topic(self, topic_id: int) -> list[QueueState]:
        """In order of their number in the topic."""
        queues = [self._queues[queue_id] for queue_id in self._topics.get(topic_id, ())]
        return sorted(queues, key=lambda queue: queue.ref.queue)

    # -- folded operations -----------------------------------------------------------------------------------

    def open(self, ref: QueueRef, first_offset: int) -> QueueState:
        """Idempotent."""
        queue = self._queues.get(ref.queue_id)
        if queue is None:
            queue = self._queues[ref.queue_id] = QueueState(ref, first_offset)
            self._topics.setdefault(ref.topic_id, set()).add(ref.queue_id)
        return queue

    def appended(self, queue_id: int, end_offset: int, store_ts: int) -> None:
        queue = self._queues[queue_id]
        queue.next_offset = max(queue.next_offset, end_offset)
        queue.last_ts = max(queue.last_ts, store_ts)

    def trim(self, queue_id: int, start_offset: int) -> None:
        queue = self._queues.get(queue_id)
        if queue is not None:
            queue.start_offset = max(queue.start_offset, min(start_offset, queue.next_offset))

    def drop(self, queue_id: int) -> None:
        queue = self._queues.pop(queue_id, None)
        if queue is not None:
            members = self._topics[queue.ref.topic_id]
            members.discard(queue_id)
            if not members:
                del self._topics[queue.ref.topic_id]

    # -- snapshot --------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        rows = list(map(_row_of, self._queues.values()))
        return lambda: {"queues": table_of(rows, _COLUMNS, _flat)}

    def load(self, tables: Tables) -> None:
        for row in tables["queues"].to_pylist():
            ref = QueueRef(row["tenant_id"], row["topic_id"], row["queue_id"], row["queue"])
            queue = self.open(ref, row["start_offset"])
            queue.next_offset = row["next_offset"]
            queue.last_ts = row["last_ts"]
