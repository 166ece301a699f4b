"""POST /v1/topics/{topic}/groups/{group}/seek: move a group to another position."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from aiohttp import web

from millpond.core.errors import BadRequest, OffsetExpired, OffsetOutOfRange
from millpond.core.http.call import Input, answer
from millpond.core.http.routing import Route
from millpond.core.limits import NAME_CHARS, TIMESTAMP_MS_MOST
from millpond.core.names import check_name
from millpond.metadata.client import GroupInfo, QueueInfo, TopicInfo
from millpond.proxy.grants import group_ref
from millpond.proxy.parts import ProxyCall
from millpond.proxy.queue_lists import queue_ref
from millpond.proxy.routes.receive import in_range
from millpond.proxy.tags import encoded
from millpond.proxy.times import ClockName, by_store, ends_of, offsets_at
from millpond.store.client import LagRequest, SeekOutcome, SeekRequest

SEEK_ID_BYTES = 16


class Target(Input, frozen=True):
    """Exactly one of `time` (ms, by `clock`), `offsets` (queue number: offset; other queues stay), `group` (its
    committed position)."""

    time: int | None = None
    clock: ClockName = "store"
    offsets: dict[int, int] | None = None
    group: str | None = None


class SeekBody(Input, frozen=True):
    """`seek_id` makes a repeat harmless. `keep_retries`: messages waiting to be handed out again stay."""

    to: Literal["earliest", "latest"] | Target
    dry_run: bool = False
    seek_id: str | None = None
    keep_retries: bool = False


class QueueMove(msgspec.Struct, frozen=True):
    queue: int
    from_: int = msgspec.field(name="from")
    to: int


class SeekAnswer(msgspec.Struct, frozen=True):
    queues: list[QueueMove]
    dry_run: bool


async def seek(call: ProxyCall) -> web.StreamResponse:
    body = await call.json(SeekBody)
    if body.seek_id is not None:
        in_range("seek_id", len(encoded(body.seek_id, "seek_id")), 1, NAME_CHARS)
    if isinstance(body.to, Target):
        _check(body.to)
    topic = await call.parts.catalog.topic(call.principal.tenant, check_name("topic", call.params["topic"]))
    group, _ = await call.parts.catalog.group(topic, check_name("group", call.params["group"]))
    offsets = await _offsets(call, topic, body.to)
    moved = await _move(call, topic, group, body, offsets)
    numbers = {queue.queue_id: queue.queue for queue in topic.queues}
    moves = [QueueMove(numbers[one.queue_id], one.from_offset, one.to_offset) for one in moved]
    return answer(SeekAnswer(sorted(moves, key=lambda move: move.queue), body.dry_run))


def _check(target: Target) -> None:
    if sum(one is not None for one in (target.time, target.offsets, target.group)) != 1:
        raise BadRequest.field("to", "earliest, latest, or exactly one of time, offsets, group")
    if target.time is not None:
        in_range("to.time", target.time, 0, TIMESTAMP_MS_MOST)
    elif target.clock != "store":
        raise BadRequest.field("to.clock", "to stand beside time", target.clock)
    if target.offsets is not None and not target.offsets:
        raise BadRequest.field("to.offsets", "at least one queue")


async def _offsets(call: ProxyCall, topic: TopicInfo, to: Literal["earliest", "latest"] | Target) -> dict[int, int]:
    """Queue id -> where it goes. Only queues that move are named. All is checked before anything is moved.

    `earliest`, `latest`, a time and another group's position lie within what there is by themselves; explicit
    offsets outside raise OffsetExpired or OffsetOutOfRange.
    """
    reader, queues = call.parts.reader, topic.queues
    if isinstance(to, Target) and to.time is not None:
        return await offsets_at(reader, topic, queues, to.time, to.clock)
    ends = await ends_of(reader, queues)
    if to == "earliest":
        return {queue.queue_id: ends[queue.queue_id].start_offset for queue in queues}
    if to == "latest":
        return {queue.queue_id: ends[queue.queue_id].end_offset for queue in queues}
    assert isinstance(to, Target)
    if to.group is not None:
        return await _positions(call, topic, to.group)
    found: dict[int, int] = {}
    by_number = {queue.queue: queue for queue in queues}
    for number, offset in (to.offsets or {}).items():
        queue = by_number.get(number)
        if queue is None:
            raise BadRequest.field("to.offsets", f"queues from 0 to {len(queues) - 1}", number)
        one = ends[queue.queue_id]
        where: dict[str, Any] = {"queue": number, "start_offset": one.start_offset, "end_offset": one.end_offset}
        if offset < one.start_offset:
            detail = f"queue {number}: {offset} is below the first offset kept, {one.start_offset}"
            raise OffsetExpired("offset_expired", detail, **where)
        if offset > one.end_offset:
            detail = f"queue {number}: {offset} is beyond the end, {one.end_offset}"
            raise OffsetOutOfRange("offset_out_of_range", detail, **where)
        found[queue.queue_id] = offset
    return found


async def _positions(call: ProxyCall, topic: TopicInfo, name: str) -> dict[int, int]:
    """Where another group of the topic stands. Raises NotFound(group_not_found)."""
    other, _ = await call.parts.catalog.group(topic, check_name("to.group", name))

    async def ask(store: str, queues: Sequence[QueueInfo]) -> dict[int, int]:
        request = LagRequest(group_ref(topic, other), [queue_ref(topic, queue) for queue in queues], other.start)
        return {one.queue_id: one.committed for one in (await call.parts.stores.group(store).lag(request)).queues}

    some = await asyncio.gather(*(ask(store, queues) for store, queues in by_store(topic.queues).items()))
    return {queue_id: offset for one in some for queue_id, offset in one.items()}


async def _move(
    call: ProxyCall, topic: TopicInfo, group: GroupInfo, body: SeekBody, offsets: dict[int, int]
) -> list[SeekOutcome]:
    """One call a store. If one of several fails, repeating the seek with the same id finishes it."""
    seek_id = body.seek_id or call.parts.random.bytes(SEEK_ID_BYTES).hex()

    async def move(store: str, queues: Sequence[QueueInfo]) -> list[SeekOutcome]:
        moving = [queue for queue in queues if queue.queue_id in offsets]
        if not moving:
            return []
        request = SeekRequest(
            group=group_ref(topic, group),
            queues=[queue_ref(topic, queue) for queue in moving],
            offsets=[offsets[queue.queue_id] for queue in moving],
            seek_id=seek_id,
            dry_run=body.dry_run,
            keep_retries=body.keep_retries,
            start=group.start,
            others=[queue_ref(topic, queue) for queue in queues if queue.queue_id not in offsets],
        )
        return (await call.parts.stores.group(store).seek(request)).queues

    some = await asyncio.gather(*(move(store, queues) for store, queues in by_store(topic.queues).items()))
    return [one for outcomes in some for one in outcomes]


ROUTES = [
    Route(
        method="POST",
        path="/v1/topics/{topic}/groups/{group}/seek",
        handler=seek,
        summary="Move a group",
        description="Leases of the old position become void. With `dry_run` nothing moves and the answer is the same.",
        body={"application/json": SeekBody},
        answer=SeekAnswer,
        scope="consume",
        tag="groups",
    )
]
