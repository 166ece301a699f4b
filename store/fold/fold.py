"""The fold: everything a store knows that is not message bytes, as a function of its log.

`messages` and `apply_state` are called for every frame in order: when it is appended, and again when the log is
replayed after a start. They are deterministic and read no clock; what they need to decide stands in the frame.
A checkpoint is `snapshot`, a start is `load` and the frames since.
"""

from __future__ import annotations

from millpond.core.frame import Sidecar
from millpond.store.fold import operations as ops
from millpond.store.fold.cursors import Cursors
from millpond.store.fold.dedup import Dedup
from millpond.store.fold.producers import Producers
from millpond.store.fold.queues import Queues
from millpond.store.fold.snapshot import Snapshot, Tables, together


class Fold:
    def __init__(self) -> None:
        self.queues = Queues()
        self.cursors = Cursors()
        self.producers = Producers()
        self.dedup = Dedup()

    # -- frames ----------------------------------------------------------------------------------------------

    def messages(self, queue_id: int, first: int, count: int, store_ts: int, sidecar: Sidecar) -> None:
        """A messages frame was appended (not a copied one)."""
        self.queues.appended(queue_id, first + count, store_ts)
        for part in sidecar.parts:
            self.producers.record(queue_id, part, first + part.row, store_ts)
        if sidecar.dedup_hash is not None:
            queue = self.queues.get(queue_id)
            assert queue is not None and sidecar.dedup_check is not None
            self.dedup.record(queue.ref, sidecar.dedup_hash, sidecar.dedup_check, first, store_ts)

    def apply_state(self, payload: bytes, operations: int) -> None:
        """A state frame of the log is replayed. Raises NewerFormat."""
        for operation in self.cursors.apply(payload, operations):
            self._others(operation)

    def perform(self, operation: ops.Operation) -> None:
        """An operation was appended just now (not one of cursors: those are folded first, and gathered)."""
        match operation:
            case ops.QueueTrim(queue_id, start_offset):
                self.cursors.trim_queue(queue_id, start_offset)
            case ops.QueueDrop(queue_id):
                self.cursors.drop_queue(queue_id)
            case _:
                pass
        self._others(operation)

    def _others(self, operation: ops.Operation) -> None:
        match operation:
            case ops.QueueOpen(queue, first_offset):
                self.queues.open(queue, first_offset)
            case ops.QueueTrim(queue_id, start_offset):
                self.queues.trim(queue_id, start_offset)
            case ops.QueueDrop(queue_id):
                dropped = self.queues.get(queue_id)
                self.queues.drop(queue_id)
                self.producers.drop_queue(queue_id)
                if dropped is not None and not self.queues.of_topic(dropped.ref.topic_id):
                    self.dedup.drop_topic(dropped.ref.topic_id)
            case ops.ProducerClose(queue_id, producer_id):
                self.producers.close(queue_id, producer_id)
            case _:
                pass

    # -- state that waits for the next frame -------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether changes of cursors wait to be gathered."""
        return self.cursors.changed

    def take_state(self) -> tuple[bytes, int]:
        """The changes of cursors since the last call: the payload of a state frame, and its operations."""
        return self.cursors.take_deltas()

    # -- snapshot --------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return together(part.snapshot() for part in (self.queues, self.cursors, self.producers, self.dedup))

    def load(self, tables: Tables) -> None:
        self.queues.load(tables)
        self.cursors.load(tables)
        self.producers.load(tables)
        self.dedup.load(tables)
