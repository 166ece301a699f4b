"""One receive: ask the stores for leases, get the messages, and give back what cannot be delivered.

A grant is only worth something with its messages. So whatever was granted stands in `Held` until the answer is
made: rows whose data cannot be had, that fall to the text comparison of the tag, or whose client has gone, are
settled at once instead of waiting for their lease to end.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.errors import Conflict, Internal, MillpondError
from millpond.core.limits import CALL_MS, DAMAGED_AGAIN_MS
from millpond.metadata.client import GroupInfo, QueueInfo, TopicInfo
from millpond.proxy import message_id, row_ranges
from millpond.proxy.codec import few
from millpond.proxy.codec.answers import Batch, Rows
from millpond.proxy.frames import bodies, has_bodies_alone, runs, within
from millpond.proxy.parts import Parts
from millpond.proxy.queue_lists import queue_ref
from millpond.proxy.receipts import Lease
from millpond.proxy.tags import TagFilter
from millpond.proxy.times import by_store
from millpond.store.client import (
    Claim,
    Grant,
    GroupRef,
    LeaseRequest,
    ParkedReceive,
    ReceiveRequest,
    ReceiveResult,
    Risen,
    Settle,
    SettleRequest,
)

Offsets = npt.NDArray[np.int64]


class Wanted(NamedTuple):
    """What a client asked for, checked."""

    topic: TopicInfo
    group: GroupInfo
    tag: TagFilter | None
    max_messages: int
    max_bytes: int
    wait_ms: int
    lease_ms: int
    attempt_id: str | None


class Receipt(msgspec.Struct, frozen=True):
    """Settles `rows` ("0-9,12") of one grant with one token; they stand in the answer in this order. A grant of very
    many ranges has several."""

    receipt: str
    queue: int
    rows: str


@dataclass(slots=True)
class Delivery:
    """What goes to the client. `reason`: why it is empty, or why rows that were granted are missing. `progress`:
    something was granted or claimed, also when nothing of it is for the client."""

    rows: list[Rows] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    reason: str | None = None
    error: MillpondError | None = None
    progress: bool = False

    @property
    def count(self) -> int:
        return sum(one.batch.num_rows for one in self.rows)

    @property
    def nbytes(self) -> int:
        """Adds up the buffers of all columns: dear beside a small answer."""
        return sum(one.batch.nbytes for one in self.rows)


class _HeldRows(NamedTuple):
    queue: QueueInfo
    generation: int
    lease: int
    offsets: Offsets


def group_ref(topic: TopicInfo, group: GroupInfo) -> GroupRef:
    return GroupRef(topic.tenant_id, topic.topic_id, group.group_id)


class Held:
    """Rows leased for this call and not yet delivered."""

    def __init__(self, parts: Parts, group: GroupRef) -> None:
        self._parts = parts
        self._group = group
        self._rows: dict[tuple[int, int, int], _HeldRows] = {}

    def add(self, queue: QueueInfo, grant: Grant) -> None:
        key = (grant.queue_id, grant.generation, grant.lease)
        self._rows[key] = _HeldRows(queue, grant.generation, grant.lease, offsets_of(grant))

    async def release(self) -> None:
        """Hand everything back, to be granted to others at once."""
        rows, self._rows = list(self._rows.values()), {}
        await self.settle("release", rows)

    async def settle(self, action: Literal["release", "skip"], rows: Sequence[_HeldRows], delay_ms: int = 0) -> None:
        """Settle rows of this call. A store that is away only means that their lease must end by itself."""
        by_group: dict[str, list[Settle]] = defaultdict(list)
        for one in rows:
            if len(one.offsets):
                offsets = pa.py_buffer(one.offsets.tobytes())
                names = (one.queue.queue_id, one.generation, one.lease)
                settle = Settle(*names, action, offsets=offsets, delay_ms=delay_ms)
                by_group[one.queue.spans[-1].store_group].append(settle)
        calls = [
            self._parts.stores.group(name).settle(SettleRequest(self._group, settles, "memory", CALL_MS))
            for name, settles in by_group.items()
        ]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, MillpondError):
                self._parts.counters.add("receive_releases_failed_total")
            elif isinstance(result, BaseException):
                raise result

    async def part(
        self, action: Literal["release", "skip"], queue: QueueInfo, grant: Grant, offsets: Offsets, delay_ms: int = 0
    ) -> None:
        """Settle some rows of one grant; the others stay held."""
        if not len(offsets):
            return
        key = (grant.queue_id, grant.generation, grant.lease)
        held = self._rows[key]
        self._rows[key] = held._replace(offsets=np.setdiff1d(held.offsets, offsets, assume_unique=True))
        await self.settle(action, [held._replace(offsets=offsets)], delay_ms)


def offsets_of(grant: Grant) -> Offsets:
    return np.frombuffer(grant.offsets, np.int64)


class Receiver:
    """One call of `receive`, from asking to a `Delivery`; `held.release()` undoes it."""

    def __init__(self, parts: Parts, wanted: Wanted, begun: float | None = None) -> None:
        """`begun`: since when it waits, in monotonic seconds; from `run` on when it is None."""
        self._parts = parts
        self._wanted = wanted
        self._begun = begun
        self._parked: ParkedReceive | None = None
        self._served: ParkedReceive | None = None
        self._group = group_ref(wanted.topic, wanted.group)
        self._all = parts.queue_lists.of(wanted.topic)
        self.held = Held(parts, self._group)

    @property
    def topic(self) -> TopicInfo:
        return self._wanted.topic

    def park(self, rises: Callable[[Risen], None]) -> ParkedReceive | None:
        """Where waiting is all that can be done now, and one store in this process has all the queues: wait there
        without a task. `run` follows when it is woken; `rises` as in `store.client.Parks`."""
        wanted = self._wanted
        store = None if self._all.store is None else self._parts.stores.parking(self._all.store)
        if store is not None:
            self._parked = store.park(self._request(wanted.topic.queues, wanted.max_messages, wanted.wait_ms), rises)
        return self._parked

    async def run(self) -> Delivery:
        """Messages, or none after `wait_ms`. Raises what kept every granted row from being had."""
        clock = self._parts.clock
        begun = clock.monotonic() if self._begun is None else self._begun
        deadline = begun + self._wanted.wait_ms / 1000
        try:
            while True:
                left_ms = max(0, round((deadline - clock.monotonic()) * 1000))
                delivery = await self._once(left_ms)
                if delivery.rows:
                    return delivery
                if delivery.error is not None:
                    raise delivery.error
                if delivery.reason is not None or left_ms == 0 or not delivery.progress:
                    return delivery
        except BaseException:
            await self.held.release()
            raise

    async def shown(self) -> None:
        """Until what `run` gave may be shown to anybody: it may still be on its way to the disk. Raises Unavailable."""
        if self._served is None:
            return
        try:
            await self._served.shown()
        except BaseException:
            await self.held.release()
            raise

    async def _once(self, wait_ms: int) -> Delivery:
        delivery = Delivery()
        results = await self._ask(wait_ms)
        for result in results:
            delivery.reason = delivery.reason or result.reason
            delivery.progress = delivery.progress or bool(result.grants or result.claims)
            for grant in result.grants:
                self.held.add(self._all.by_id[grant.queue_id], grant)
        for result in results:
            for grant in result.grants:
                await self._deliver(delivery, grant)
            for claim in result.claims:
                await self._claimed(delivery, claim)
        if delivery.error is not None:
            delivery.reason = delivery.error.code
        elif delivery.rows:
            delivery.reason = None
        return delivery

    # -- asking ---------------------------------------------------------------------------------------------

    def _request(self, queues: Sequence[QueueInfo], room: int, wait_ms: int) -> ReceiveRequest:
        wanted = self._wanted
        whole = len(queues) == len(wanted.topic.queues)
        return ReceiveRequest(
            group=self._group,
            queues=self._all.refs if whole else [queue_ref(wanted.topic, queue) for queue in queues],
            start=wanted.group.start,
            max_messages=room,
            max_bytes=wanted.max_bytes,
            lease_ms=wanted.lease_ms,
            wait_ms=wait_ms,
            tag_hashes=None if wanted.tag is None else list(wanted.tag.hashes),
            attempt_id=wanted.attempt_id,
            max_in_flight=wanted.group.max_in_flight,
        )

    async def _ask(self, wait_ms: int) -> list[ReceiveResult]:
        """Grants of one store, or of several: in turn without waiting, then all at once until the first has some."""
        parked, self._parked = self._parked, None
        if parked is not None and parked.woken:
            self._served = parked
            return [await parked.receive()]
        groups = by_store(self._wanted.topic.queues)
        room = self._wanted.max_messages
        if len(groups) == 1:
            [(name, queues)] = groups.items()
            return [await self._parts.stores.group(name).receive(self._request(queues, room, wait_ms))]
        names = sorted(groups, key=lambda _: self._parts.random.uniform(0, 1))  # none is always asked first
        results: list[ReceiveResult] = []
        errors: list[MillpondError] = []
        for name in list(names):
            try:
                result = await self._parts.stores.group(name).receive(self._request(groups[name], room, 0))
            except MillpondError as error:
                errors.append(error)
                names.remove(name)
                continue
            results.append(result)
            for grant in result.grants:
                self.held.add(self._all.by_id[grant.queue_id], grant)
                room -= len(offsets_of(grant))
            if room <= 0:
                break
        if not results:
            raise errors[0]
        if wait_ms == 0 or any(one.grants or one.claims for one in results):
            return results
        return await self._first([(name, groups[name]) for name in names], wait_ms)

    async def _first(self, groups: list[tuple[str, list[QueueInfo]]], wait_ms: int) -> list[ReceiveResult]:
        """All stores wait; the first answer ends the wait of the others."""
        room = self._wanted.max_messages
        tasks = [
            asyncio.ensure_future(self._parts.stores.group(name).receive(self._request(queues, room, wait_ms)))
            for name, queues in groups
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            results = [one for one in answers if isinstance(one, ReceiveResult)]
            for grant in [grant for one in results for grant in one.grants]:
                self.held.add(self._all.by_id[grant.queue_id], grant)
        failed = [one for one in answers if isinstance(one, MillpondError)]
        if not results and failed:
            raise failed[0]
        return await self._within(results)

    async def _within(self, results: list[ReceiveResult]) -> list[ReceiveResult]:
        """Stores that answered in the same moment may have granted too much together: give back what is over."""
        room = self._wanted.max_messages
        kept: list[ReceiveResult] = []
        for result in results:
            grants = []
            for grant in result.grants:
                offsets = offsets_of(grant)
                if len(offsets) <= room:
                    grants.append(grant)
                    room -= len(offsets)
                else:
                    await self.held.part("release", self._all.by_id[grant.queue_id], grant, offsets)
            kept.append(msgspec.structs.replace(result, grants=grants))
        return kept

    # -- delivering -----------------------------------------------------------------------------------------

    async def _deliver(self, delivery: Delivery, grant: Grant) -> None:
        """Get a grant's messages; rows that cannot be had go back, rows of another tag are skipped for good."""
        queue, offsets, tag = self._all.by_id[grant.queue_id], offsets_of(grant), self._wanted.tag
        batches = self._came_along(queue, grant, offsets) if tag is None else None
        if batches is not None:
            await self._add(delivery, queue, grant, batches, offsets)
            return
        cold = len(offsets) and offsets[0] < grant.local_offset
        room = self._wanted.max_bytes - (delivery.nbytes if cold else 0)
        selection = await self._parts.reader.select(
            self._wanted.topic, queue, offsets, grant.frames, grant.local_offset, room
        )
        delivery.error = delivery.error or selection.error
        batches = selection.batches
        if len(selection.missing):
            lost = selection.damaged  # looked at again from time to time: what is behind it must not wait for it
            await self.held.part("release", queue, grant, lost, DAMAGED_AGAIN_MS)
            await self.held.part("release", queue, grant, np.setdiff1d(selection.missing, lost, assume_unique=True))
        if tag is not None:
            batches = [batch.filter(tag.mask(batch.column("tag"))) for batch in batches]
            had = np.setdiff1d(offsets, selection.missing, assume_unique=True)
            other = np.setdiff1d(had, _offsets_in(batches), assume_unique=True)
            await self.held.part("skip", queue, grant, other)
        await self._add(delivery, queue, grant, batches, _offsets_in(batches))

    def _came_along(self, queue: QueueInfo, grant: Grant, offsets: Offsets) -> list[Batch] | None:
        """The usual grant, a run of rows, from the frames that came with it. None when they do not hold it."""
        first, end = int(offsets[0]), int(offsets[-1]) + 1
        if not grant.frames or end - first != len(offsets) or grant.frames[0].first_offset > first:
            return None
        at = grant.frames[0].first_offset
        for frame in grant.frames:
            low, at = max(first, at), at + frame.count
            if frame.first_offset + frame.count != at or not low < min(at, end):
                return None
        if at < end:
            return None
        group, frames = queue.spans[-1].store_group, self._parts.reader.frames
        try:
            found = few.few(grant.frames, queue.queue, first, end)
            if found is not None:
                return [found]
            return [
                bodies(run[0], queue.queue, first, end)
                if len(run) == 1 and has_bodies_alone(run[0])
                else frames.open_run(group, run, queue.queue, within(run, first, end))
                for run in runs(grant.frames)
            ]
        except Internal:
            return None  # perhaps the tier has it

    async def _claimed(self, delivery: Delivery, claim: Claim) -> None:
        """Read and filter a cold range, then lease what matches and skip the rest."""
        wanted, queue = self._wanted, self._all.by_id[claim.queue_id]
        room_rows, room_bytes = wanted.max_messages - delivery.count, wanted.max_bytes - delivery.nbytes
        if room_rows <= 0 or room_bytes <= 0:
            return
        try:
            read = await self._parts.reader.read(
                wanted.topic, queue, claim.first, room_rows, room_bytes, tag=wanted.tag
            )
            end = min(read.next_offset, claim.end)
            found = _offsets_in(read.batches)
            take = pa.py_buffer(found[found < end].tobytes())
            grant = await self._parts.stores.of(queue).lease(
                LeaseRequest(self._group, queue.queue_id, claim.generation, claim.claim, take, end, wanted.lease_ms)
            )
        except Conflict:
            return  # the claim has run out or the group was sought: others, or the next receive, go on
        except MillpondError as error:
            delivery.error = delivery.error or error
            return
        self.held.add(queue, grant)
        granted = offsets_of(grant)
        batches = [_only(batch, granted) for batch in read.batches]
        delivered = _offsets_in(batches)
        await self.held.part("release", queue, grant, np.setdiff1d(granted, delivered, assume_unique=True))
        await self._add(delivery, queue, grant, batches, delivered)

    async def _add(
        self,
        delivery: Delivery,
        queue: QueueInfo,
        grant: Grant,
        batches: Sequence[Batch],
        delivered: Offsets,
    ) -> None:
        """`batches` go to the client; `delivered` are their offsets, ascending, all of this grant."""
        if not len(delivered):
            return
        granted = offsets_of(grant)
        base = int(granted[0])
        token = await self._parts.tokens.sign(
            Lease(*_three(self._group), grant.queue_id, grant.generation, grant.lease, base)
        )
        attempts = np.frombuffer(grant.attempts, np.uint32)
        if len(delivered) < len(granted):
            attempts = attempts[np.searchsorted(granted, delivered)]
        prefix = message_id.prefix(queue, base)
        at = 0
        for batch in batches:
            if batch.num_rows:
                delivery.rows.append(Rows(batch, prefix, attempts[at : at + batch.num_rows], token, base))
                at += batch.num_rows
        delivery.receipts += [Receipt(token, queue.queue, rows) for rows in row_ranges.texts_of(delivered - base)]


def _three(group: GroupRef) -> tuple[int, int, int]:
    return group.tenant_id, group.topic_id, group.group_id


def _offsets_in(batches: Sequence[pa.RecordBatch]) -> Offsets:
    """Offsets of all rows, ascending when the batches are in order."""
    columns = [batch.column("offset").to_numpy() for batch in batches]
    return np.concatenate(columns) if columns else np.empty(0, np.int64)


def _only(batch: pa.RecordBatch, offsets: Offsets) -> pa.RecordBatch:
    """Rows of `batch` at these offsets."""
    mask = np.isin(batch.column("offset").to_numpy(), offsets)
    return batch if mask.all() else batch.filter(pa.array(mask))
