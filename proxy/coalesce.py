"""The coalescer: concurrent produces to one queue share one append, those to several small ones one call.

    send            nothing of that queue in flight: it leaves; else it waits
    leave           all small ones of a store and durability that leave in one turn go in one call. Behind one that
                    waits for no flush they go when it returns; a large one goes at once, in a call of its own
    append returns  everything that has gathered leaves at once: single messages and small batches in one frame,
                    large batches, session parts and idempotent batches each in a frame of their own, one call

Nothing is put off where nothing is in flight: an idle store adds no latency, a busy one fills its calls and frames by
itself. Nobody waits for a call of other queues longer than COALESCE_MS. What waits is bounded; beyond the bound a
produce is refused with `flush_behind` before anything of it is taken.

An append belongs to the coalescer, not to whoever waits for it: a client that leaves changes nothing. An append whose
outcome is unknown is never sent again from here; a client that gave a dedup id or a sequence may do it.

When the store names duplicates it has appended nothing; the rows that are none go again, in their order
(`proxy.frame_plan`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from millpond.core.deadlines import Deadlines
from millpond.core.errors import MillpondError, Unavailable
from millpond.core.frame import ProducerPart
from millpond.core.limits import (
    BATCH_BYTES,
    BATCH_MESSAGES,
    CALL_MS,
    COALESCE_BYTES,
    COALESCE_CALL_BYTES,
    COALESCE_MS,
    COALESCE_QUEUES,
    GATHER_BYTES,
    PENDING_APPEND_BYTES,
    QUEUE_PENDING_ROWS,
)
from millpond.core.tasks import Tasks
from millpond.metadata.client import QueueInfo, TopicInfo
from millpond.proxy.encode import Rows
from millpond.proxy.frame_plan import FramePlan, Placed, PlacedRun, PlacedSingle, WaitingBatch, WaitingSingle
from millpond.proxy.incoming import Single
from millpond.proxy.queue_lists import queue_ref
from millpond.store.client import AppendRequest, Durability, StoreClient

CALL_MARGIN_SECONDS = 5.0  # beyond the deadline the store was given: then its answer is lost
SINGLE_BYTES = 64  # what one message takes beside its parts, about
PROPERTY_BYTES = 8  # .. and each of its properties: Arrow's offsets


_Way: TypeAlias = tuple[StoreClient, Durability]
"""Where an append goes, and what it is answered after: others wait for no flush."""


class _Lane:
    """What waits for one queue while an append of it is in flight; `topic` and `queue` as last seen."""

    __slots__ = ("batches", "loop", "queue", "rows", "singles", "size", "topic")

    def __init__(self, topic: TopicInfo, queue: QueueInfo) -> None:
        self.topic = topic
        self.queue = queue
        self.loop = asyncio.get_running_loop()  # asked for once: each time it asks the kernel for the process id
        self.singles: list[WaitingSingle] = []
        self.batches: list[WaitingBatch] = []
        self.rows = 0
        self.size = 0


@dataclass(slots=True)
class _Leaving:
    """Who leaves together next. `timer`: when they do at the latest; none of those that leave in this turn."""

    lanes: list[_Lane]
    timer: asyncio.TimerHandle | None = None


class Coalescer:
    """One per proxy process and loop. `store_of(queue)` names the store of a queue's next message."""

    def __init__(self, store_of: Callable[[QueueInfo], StoreClient], call_ms: int = CALL_MS) -> None:
        self._store_of = store_of
        self._call_ms = call_ms
        self._lanes: dict[int, _Lane] = {}
        self._leaving: dict[_Way, _Leaving] = {}
        self._under_way: Counter[_Way] = Counter()  # calls that others wait for
        self._tasks = Tasks()
        self._deadlines = Deadlines()
        self._bytes = 0  # taken and not yet answered, over all queues
        self._closed = False

    @property
    def pending_bytes(self) -> int:
        return self._bytes

    async def close(self) -> None:
        """Refuse what is new, wait for what is in flight (bounded by its deadlines)."""
        self._closed = True
        await self._tasks.finish(self._call_ms / 1_000 + CALL_MARGIN_SECONDS)
        for leaving in self._leaving.values():  # the call that they waited for was ended
            _no_later(leaving)
            for lane in leaving.lanes:
                self._give_up(lane, _not_written())
        self._leaving.clear()

    def send_single(
        self,
        topic: TopicInfo,
        queue: QueueInfo,
        single: Single,
        size: int,
        key_hash: int,
        tag_hash: int,
        dedup_hash: bytes | None,
    ) -> asyncio.Future[PlacedSingle | MillpondError]:
        """Answers where the message stands, or why it does not; `size`: bytes of its parts. Raises Unavailable when too
        much waits."""
        size += SINGLE_BYTES if single.properties is None else SINGLE_BYTES + PROPERTY_BYTES * len(single.properties)
        lane = self._lane(topic, queue, 1, size)
        future: asyncio.Future[PlacedSingle | MillpondError] = lane.loop.create_future()
        lane.singles.append(WaitingSingle(future, size, single, key_hash, tag_hash, dedup_hash))
        return future

    def send_batch(
        self, topic: TopicInfo, queue: QueueInfo, rows: Rows, part: ProducerPart | None = None, atomic: bool = False
    ) -> asyncio.Future[Placed | PlacedRun]:
        """Answers where each row stands, or why it does not; a part and an `atomic` batch stand whole or not at all
        (but for duplicates). Too much waiting is an error of all rows: other queues' shares may be on their way."""
        future: asyncio.Future[Placed | PlacedRun] = asyncio.get_running_loop().create_future()
        waiting = WaitingBatch(future, rows.bytes, rows, part, atomic)
        try:
            self._lane(topic, queue, len(rows), waiting.size).batches.append(waiting)
        except Unavailable as error:
            waiting.fail(error)
        return future

    def _lane(self, topic: TopicInfo, queue: QueueInfo, rows: int, size: int) -> _Lane:
        """The queue's lane, with room for these rows taken; an idle queue's starts to run."""
        if self._closed:
            raise Unavailable("shutting_down", "this proxy is shutting down")
        lane = self._lanes.get(queue.queue_id)
        if self._bytes + size > PENDING_APPEND_BYTES or (lane is not None and lane.rows + rows > QUEUE_PENDING_ROWS):
            raise Unavailable("flush_behind", "too many messages wait to be written; try again")
        if lane is None:
            lane = _Lane(topic, queue)
            self._leave(lane)
            self._lanes[queue.queue_id] = lane
        lane.topic, lane.queue = topic, queue
        lane.rows += rows
        lane.size += size
        self._bytes += size
        return lane

    def _leave(self, lane: _Lane) -> None:
        """With all others of its way. Raises Unavailable: the queue's store is not known."""
        way = self._store_of(lane.queue), lane.topic.settings.durability
        leaving = self._leaving.get(way)
        if leaving is not None:
            leaving.lanes.append(lane)
        elif self._under_way[way]:
            self._leaving[way] = _Leaving([lane], lane.loop.call_later(COALESCE_MS / 1_000, self._start, way))
        else:
            self._start(way)
            self._leaving[way] = _Leaving([lane])

    def _start(self, way: _Way) -> None:
        if not self._tasks.closed:  # else `close` gives up who would leave
            self._tasks.spawn(self._depart(way), "coalescer")

    async def _depart(self, way: _Way) -> None:
        """Calls of those that leave, and then of those that have waited for the first of these."""
        while not self._tasks.closed and (leaving := self._leaving.pop(way, None)) is not None:
            _no_later(leaving)
            first, *others = _calls(leaving.lanes)
            for lanes in others:
                self._tasks.spawn(self._carry(way[0], lanes), "coalescer")
            quick = way[1] == "memory" and first[0].size <= COALESCE_BYTES
            self._under_way[way] += quick
            try:
                await self._carry(way[0], first)
            finally:
                self._under_way[way] -= quick
                if not self._under_way[way]:
                    del self._under_way[way]  # its store may be another one the next time

    async def _carry(self, store: StoreClient, lanes: list[_Lane]) -> None:
        """One call of the store; what has gathered meanwhile leaves again."""
        try:
            await self._append(store, lanes)
            while lanes:
                self._go_on(lanes[-1])
                lanes.pop()
        finally:
            if lanes:  # this task was ended, or the store has a bug
                for lane in lanes:
                    self._give_up(lane, _not_written())

    def _go_on(self, lane: _Lane) -> None:
        if not lane.rows:
            del self._lanes[lane.queue.queue_id]
            return
        try:
            self._leave(lane)
        except Unavailable as error:
            self._give_up(lane, error)

    def _give_up(self, lane: _Lane, error: MillpondError) -> None:
        """Nothing of what waits is sent."""
        del self._lanes[lane.queue.queue_id]
        left: list[WaitingSingle | WaitingBatch] = [*lane.singles, *lane.batches]
        for waiting in left:
            self._bytes -= waiting.size
            waiting.fail(error)

    async def _append(self, store: StoreClient, lanes: Iterable[_Lane]) -> None:
        """Submit until every row of every plan has its answer."""
        plans = [(lane, plan) for lane in lanes for plan in _gather(lane)]
        try:
            for _, plan in plans:
                try:
                    plan.prepare()
                except MillpondError as error:  # this frame cannot be; the others can
                    plan.fail(error)
            while left := [(lane, plan) for lane, plan in plans if plan.open]:
                await self._submit(store, left)
        except MillpondError as error:
            for _, plan in plans:
                plan.fail(error)
        except TimeoutError:
            for _, plan in plans:
                plan.fail(Unavailable("unknown_outcome", "the store did not answer; the messages may be written"))
        finally:
            for _, plan in plans:
                if plan.open:
                    plan.fail(Unavailable("unknown_outcome", "the append was cut short; the messages may be written"))
                self._bytes -= plan.size
                plan.answer()

    async def _submit(self, store: StoreClient, plans: list[tuple[_Lane, FramePlan]]) -> None:
        sent, appends = [], []
        for lane, plan in plans:
            settings = lane.topic.settings
            try:
                ref = queue_ref(lane.topic, lane.queue)
                appends.append(plan.append(ref, settings.durability, settings.dedup_window_ms))
                sent.append(plan)
            except MillpondError as error:
                plan.fail(error)
        if not appends:
            return
        with self._deadlines.within(self._call_ms / 1_000 + CALL_MARGIN_SECONDS):
            result = await store.append(AppendRequest(appends, self._call_ms))
        for plan, outcome in zip(sent, result.outcomes, strict=True):
            plan.take(outcome)


def _no_later(leaving: _Leaving) -> None:
    if leaving.timer is not None:
        leaving.timer.cancel()


def _not_written() -> Unavailable:
    return Unavailable("shutting_down", "this proxy is shutting down; nothing was written")


def _calls(lanes: list[_Lane]) -> list[list[_Lane]]:
    """Who goes together: small ones, no more than COALESCE_QUEUES and COALESCE_CALL_BYTES of them. These calls first,
    then those of large ones."""
    if len(lanes) == 1:
        return [lanes]
    calls: list[list[_Lane]] = []
    size = COALESCE_CALL_BYTES
    for lane in lanes:
        if lane.size > COALESCE_BYTES:
            continue
        if size + lane.size > COALESCE_CALL_BYTES or len(calls[-1]) == COALESCE_QUEUES:
            calls.append([])
            size = 0
        calls[-1].append(lane)
        size += lane.size
    return calls + [[lane] for lane in lanes if lane.size > COALESCE_BYTES]


def _gather(lane: _Lane) -> list[FramePlan]:
    """The frames of the next request, as many as fit; what is left goes with the one after it.

    Rows with dedup ids share a frame among themselves only: each row of such a frame takes room in the window.
    """
    if len(lane.batches) == 1 and not lane.singles:  # the usual case of a queue that had nothing in flight
        plans, lane.batches = [FramePlan([], lane.batches)], []
        lane.rows = lane.size = 0
        return plans
    plain, identified = _Shared(), _Shared()
    _take_singles(lane, plain, identified)
    plans = []
    size = plain.size + identified.size
    taken = 0
    for waiting in lane.batches:
        shared = plain if waiting.rows.dedup_hash is None else identified
        alone = waiting.part is not None or waiting.atomic or waiting.size > COALESCE_BYTES
        if (size and size + waiting.size > GATHER_BYTES) or not (alone or shared.fits(len(waiting.rows), waiting.size)):
            break
        if alone:
            plans.append(FramePlan([], [waiting]))
        else:
            shared.batches.append(waiting)
            shared.add(len(waiting.rows), waiting.size)
        size += waiting.size
        taken += 1
    del lane.batches[:taken]
    plans += [FramePlan(shared.singles, shared.batches) for shared in (plain, identified) if shared.rows]
    lane.rows -= sum(plan.rows_count for plan in plans)
    lane.size -= sum(plan.size for plan in plans)
    return plans


class _Shared:
    """A frame that several requests share, while it is gathered."""

    __slots__ = ("batches", "rows", "singles", "size")

    def __init__(self) -> None:
        self.singles: list[WaitingSingle] = []
        self.batches: list[WaitingBatch] = []
        self.rows = 0
        self.size = 0

    def fits(self, rows: int, size: int) -> bool:
        return not self.rows or (self.rows + rows <= BATCH_MESSAGES and self.size + size <= BATCH_BYTES)

    def add(self, rows: int, size: int) -> None:
        self.rows += rows
        self.size += size


def _take_singles(lane: _Lane, plain: _Shared, identified: _Shared) -> None:
    """As many single messages as fit, first come first served."""
    taken = 0
    for waiting in lane.singles:
        shared = plain if waiting.dedup_hash is None else identified
        if not shared.fits(1, waiting.size):
            break
        shared.singles.append(waiting)
        shared.add(1, waiting.size)
        taken += 1
    del lane.singles[:taken]
