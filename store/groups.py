"""Every group that reads in this store, and where: `Groups`, what delivery finds a `Place` by.

Beside the fold's cursors, and never ahead of them: a place whose cursor the fold has dropped is forgotten when it is
looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from millpond.core.errors import BadRequest
from millpond.store.client import GroupRef, QueueRef, ReceiveRequest, Start
from millpond.store.fold.cursor import Cursor
from millpond.store.fold.cursors import Cursors
from millpond.store.handout import DeliveryLog
from millpond.store.places import DueTimes, Group, Place
from millpond.store.waiters import WaiterCount

_LEASE_SHIFT = 10  # lease numbers of one start: up to 1,024 for each millisecond until the next


def first_number(now_ms: int) -> int:
    """Lease and claim numbers from here on lie above all that were given before `now_ms`."""
    return now_ms << _LEASE_SHIFT


class Groups:
    def __init__(
        self, log: DeliveryLog, cursors: Cursors, now_ms: Callable[[], int], waiting: WaiterCount, due: DueTimes
    ) -> None:
        """`waiting` and `due` are those of the whole store."""
        self._log = log
        self._cursors = cursors
        self._now_ms = now_ms
        self._waiting = waiting
        self._due = due
        self._groups: dict[int, Group] = {}
        self._of_queue: dict[int, list[Place]] = {}
        for cursor in cursors.by_key.values():
            self._place(cursor)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def get(self, group_id: int) -> Group | None:
        return self._groups.get(group_id)

    def at(self, queue_id: int) -> Sequence[Place]:
        """The places of all groups in one queue."""
        return self._of_queue.get(queue_id, ())

    def find(self, group_id: int, queue_id: int) -> Place | None:
        """The place of a cursor; forgotten here when the fold has dropped the cursor."""
        group = self._groups.get(group_id)
        place = None if group is None else group.places.get(queue_id)
        if place is not None and self._cursors.get(group_id, queue_id) is not place.cursor:
            self._forget(place)
            return None
        return place

    def only_place(self, group: Group, request: ReceiveRequest, now: int) -> Place | None:
        """Where alone this group may have something new, for a receive of all its queues without a filter; None when
        something is due, or it has to be looked for."""
        if request.tag_hashes is not None or len(request.queues) != len(group.places) or group.full:
            return None
        if len(group.ready) + len(group.flushing) != 1 or self._due.earliest <= now:
            return None
        [queue_id] = group.ready or group.flushing
        place = self.find(group.ref.group_id, queue_id)
        if place is None or place.group is not group or place.lock.locked():
            return None
        taken = place.claim is not None or place.withheld or place.cursor.earliest_due <= now
        return None if taken else place

    def of_request(self, request: ReceiveRequest) -> tuple[Group, bool]:
        """The group with a cursor in every queue named, and whether it is new here. Raises BadRequest, DiskFull."""
        group = self._groups.get(request.group.group_id)
        if group is not None and group.checked is request.queues:
            return group, False
        created = not self._has_begun(request.group.group_id)
        self.begin(request.group, request.queues, request.start)
        group = self._groups.get(request.group.group_id)
        if group is None:
            raise BadRequest.field("queues", "at least one queue", 0)
        group.checked = request.queues
        return group, created

    def begin(self, ref: GroupRef, queues: Sequence[QueueRef], start: Start) -> None:
        """Have a cursor in every one of these queues. Raises DiskFull, and there are no more than before."""
        new = [queue for queue in queues if self.find(ref.group_id, queue.queue_id) is None]
        for queue in new:
            self._log.open_queue(queue)  # all before the first cursor: half a group would not know where it starts
        heads = [self.begins_at(ref.group_id, queue.queue_id, start) for queue in new]
        for queue, head in zip(new, heads, strict=True):
            self._open(ref, queue, head)

    def begins_at(self, group_id: int, queue_id: int, start: Start) -> int:
        """Where a group begins in a queue that it has no cursor in. One that reads here already begins with the first
        message: the queue did not exist before."""
        ends = self._log.ends(queue_id)
        return ends.end_offset if start == "latest" and not self._has_begun(group_id) else ends.start_offset

    def _has_begun(self, group_id: int) -> bool:
        group = self._groups.get(group_id)
        return group is not None and bool(group.places)

    def remove(self, group: Group) -> None:
        """Forget all of it."""
        for place in list(group.places.values()):
            self._forget(place)
        del self._groups[group.ref.group_id]

    def _open(self, group: GroupRef, queue: QueueRef, head: int) -> None:
        """A new cursor; its leases are none that a deleted one of the same group had."""
        cursor = self._cursors.open(group, queue, head)
        cursor.next_lease = first_number(self._now_ms())
        self._place(cursor)

    def _place(self, cursor: Cursor) -> None:
        group = self._groups.get(cursor.group.group_id)
        if group is None:
            group = self._groups[cursor.group.group_id] = Group(cursor.group, self._waiting)
        group.waiters.narrow()
        place = group.places[cursor.queue.queue_id] = Place(group, cursor)
        self._of_queue.setdefault(place.queue_id, []).append(place)
        group.ready[place.queue_id] = None
        self._due.note(place, cursor.earliest_due)

    def _forget(self, place: Place) -> None:
        group, queue_id = place.group, place.queue_id
        del group.places[queue_id]
        group.ready.pop(queue_id, None)
        group.flushing.pop(queue_id, None)
        group.full.pop(queue_id, None)
        group.checked = None
        self._of_queue[queue_id].remove(place)
        if not self._of_queue[queue_id]:
            del self._of_queue[queue_id]
