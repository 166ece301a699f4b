"""Where groups may find something: what delivery keeps in memory beside the cursors.

A `Place` is one cursor's surroundings, a `Group` those of all its cursors in this store. `ready` names the queues
that may have something to hand out, in turn; an empty receive and a wake-up look at no others, so ten thousand idle
queues cost nothing. `flushing` names those that will be ready once the flush under way has ended. Readiness may be
wrong in one direction only: a queue with something to give is always in it, unless its due time lies ahead
(`DueTimes`), its table is full (`full`) or a claim is out.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from itertools import chain
from typing import NamedTuple

from millpond.core.errors import BadRequest
from millpond.store.client import GroupRef, QueueRef
from millpond.store.fold.cursor import Cursor
from millpond.store.fold.operations import Ints
from millpond.store.fold.unsettled import NEVER
from millpond.store.waiters import WaiterCount, Waiters, ids_of


class OpenClaim(NamedTuple):
    """A cold range that a proxy reads and filters; nothing new is handed out of the queue until then."""

    number: int
    first: int
    end: int
    until: int

    def check(self, take: Ints, end: int) -> None:
        """Raises BadRequest unless these offsets, and where looking ended, are of the claimed range."""
        if not self.first <= end <= self.end:
            raise BadRequest.field("end", f"{self.first} to {self.end}", end)
        if len(take) and (take[0] < self.first or take[-1] >= end or not (take[1:] > take[:-1]).all()):
            raise BadRequest.field("take", "ascending offsets of the claimed range")


class Place:
    __slots__ = ("claim", "cursor", "group", "lock", "noted_due", "withheld")

    def __init__(self, group: Group, cursor: Cursor) -> None:
        self.group = group
        self.cursor = cursor
        self.lock = asyncio.Lock()  # held while a receive decides what to hand out, which may read the index
        self.claim: OpenClaim | None = None
        self.noted_due = NEVER  # the earliest time that DueTimes holds for it
        self.withheld = False  # rows are due that are not confirmed yet

    @property
    def queue_id(self) -> int:
        return self.cursor.queue.queue_id

    def claimed(self, now: int) -> bool:
        """Whether new messages are out for filtering; a claim that has run out is forgotten."""
        if self.claim is not None and self.claim.until <= now:
            self.claim = None
        return self.claim is not None


class Group:
    __slots__ = ("checked", "favour_due", "flushing", "full", "places", "ready", "ref", "waited_ms", "waiters")

    def __init__(self, ref: GroupRef, count: WaiterCount) -> None:
        self.ref = ref
        self.places: dict[int, Place] = {}  # by queue id
        self.ready: OrderedDict[int, None] = OrderedDict()  # queue ids, the next to be served first
        self.flushing: OrderedDict[int, None] = OrderedDict()  # the same, with messages that are being flushed
        self.full: dict[int, int] = {}  # queue id -> the bound it was found full at
        self.waiters = Waiters(count)
        self.waited_ms = -1_000_000  # when a receive last began to wait, by the store's clock
        self.favour_due = False  # whose turn it is when half of a receive is not a whole number
        self.checked: list[QueueRef] | None = None  # the last list of queues that was found to have all its cursors

    def rouse(self, queue_id: int) -> None:
        """The queue may have something now: wake one that wants it."""
        self.ready[queue_id] = None
        if self.waiters:
            self.waiters.wake(queue_id)

    def expect(self, queue_id: int) -> bool:
        """The queue will have something once the flush under way has ended: wake one that wants it; whether there is
        one."""
        self.flushing[queue_id] = None
        return bool(self.waiters) and self.waiters.wake(queue_id)

    def pass_on(self) -> None:
        """Somebody was served or left: if more is ready, wake the next."""
        if self.waiters and not self.waiters.awake:
            for queue_id in chain(self.ready, self.flushing):
                if self.waiters.wake(queue_id):
                    return

    def named(self, queues: list[QueueRef]) -> frozenset[int] | None:
        """These queues, each of which it is at; None when they are all of its own."""
        return None if len(queues) == len(self.places) else ids_of(queues)

    def has_ready(self, wanted: frozenset[int] | None) -> bool:
        """Whether one of these queues may have something, or will once the flush under way has ended."""
        if wanted is None:
            return bool(self.ready or self.flushing)
        return not (wanted.isdisjoint(self.ready) and wanted.isdisjoint(self.flushing))

    def is_full(self, wanted: frozenset[int] | None) -> bool:
        """Whether every queue wanted is full: waiting would only end with an ack."""
        if not self.full:
            return False
        return len(self.full) == len(self.places) if wanted is None else wanted <= self.full.keys()

    def recheck_full(self, bound: int) -> None:
        """A receive allows `bound` rows in flight: queues that were full at less may not be now."""
        for queue_id in [queue_id for queue_id, at in self.full.items() if at < bound]:
            del self.full[queue_id]
            self.ready[queue_id] = None


class DueTimes:
    """When the next rows of which place fall due, over all groups: one heap, one timer at most."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Place]] = []
        self._pushed = 0  # breaks ties

    @property
    def earliest(self) -> int:
        return self._heap[0][0] if self._heap else NEVER

    def note(self, place: Place, due: int) -> None:
        """Something of this place falls due at `due` (rows, or its claim)."""
        if due < place.noted_due:
            place.noted_due = due
            self._pushed += 1
            heapq.heappush(self._heap, (due, self._pushed, place))

    def pop(self, now: int) -> list[Place]:
        """The places of which something is due."""
        places: list[Place] = []
        while self._heap and self._heap[0][0] <= now:
            place = heapq.heappop(self._heap)[2]
            place.noted_due = NEVER
            places.append(place)
        return places
