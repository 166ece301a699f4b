"""Replays: the plan rows. The process that runs one (`millpond replay`) reports its progress here.

A plan is fixed when it is made: source topic id and offset range per queue, target topic id and its number of queues.
The same PUT again answers the same replay; another plan under the same id is 409 `replay_differs`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from millpond.core import limits
from millpond.core.errors import BadRequest
from millpond.core.http.call import JSON, Input, answer
from millpond.core.http.fields import Count, Time
from millpond.core.http.routing import Route
from millpond.core.names import check_name
from millpond.metadata.client import ReplayInfo, ReplayPlan, TopicInfo
from millpond.proxy import tags
from millpond.proxy.parts import Parts, ProxyCall
from millpond.proxy.times import ends_of

FILTER_PROPERTIES = 16  # compared for each message
RATE_MOST = 1_000_000_000
_RENAME = {"from_ms": "from", "to_ms": "to"}

ClockName = Literal["store", "born"]
Rate = Annotated[int, Meta(ge=1, le=RATE_MOST, description="Messages per second.")]
Detail = Annotated[str, Meta(max_length=limits.DETAIL_CHARS)]
Properties = Annotated[dict[str, str], Meta(max_length=FILTER_PROPERTIES)]


class ReplayFilter(Input, frozen=True, forbid_unknown_fields=True):
    """`tag`: "a || b"; `properties`: all of these values. Both: both."""

    tag: str | None = None
    properties: Properties = msgspec.field(default_factory=dict)


class ReplayInput(Input, frozen=True, forbid_unknown_fields=True, rename=_RENAME):
    """Messages of `topic` with `from` <= clock value < `to` (ms) into `target`, at most `rate` a second."""

    topic: str
    target: str
    from_ms: Time | None = None
    to_ms: Time | None = None
    clock: ClockName = "store"
    filter: ReplayFilter | None = None
    rate: Rate | None = None


class ReplayQueue(msgspec.Struct, frozen=True):
    """Source offsets [first, end) of one queue; `at`: the next to read."""

    queue: int
    first: int
    end: int
    at: int


class Replay(msgspec.Struct, frozen=True, rename=_RENAME):
    """A replay: its fixed plan, and how far it is. `read` and `published` count messages."""

    replay_id: str
    state: Literal["planned", "running", "done", "failed"]
    source_topic: str
    source_topic_id: int
    target_topic: str
    target_topic_id: int
    target_queues: int
    clock: ClockName
    from_ms: int | None
    to_ms: int | None
    filter: ReplayFilter
    rate: int | None
    queues: list[ReplayQueue]
    read: int
    published: int
    detail: str
    created_ms: int


class ReplayList(msgspec.Struct, frozen=True):
    replays: list[Replay]


class ProgressInput(Input, frozen=True, forbid_unknown_fields=True):
    """`progress`: source queue -> next source offset, for the queues that moved."""

    state: Literal["running", "done", "failed"]
    progress: dict[int, Count] = msgspec.field(default_factory=dict)
    read: Count = 0
    published: Count = 0
    detail: Detail = ""


async def put_replay(call: ProxyCall) -> web.StreamResponse:
    replay_id = check_name("replay", call.params["replay"])
    wanted = await call.json(ReplayInput)
    tenant = call.principal.tenant
    catalog = call.parts.catalog
    source = await catalog.topic(tenant, check_name("topic", wanted.topic))
    target = await catalog.topic(tenant, check_name("target", wanted.target))
    plan = await _plan(call.parts, replay_id, wanted, source, target)
    replay, created = await call.parts.metadata.put_replay(plan)
    return answer(replay_answer(replay), 201 if created else 200)


async def get_replay(call: ProxyCall) -> web.StreamResponse:
    return answer(replay_answer(await _replay_of(call)))


async def list_replays(call: ProxyCall) -> web.StreamResponse:
    replays = await call.parts.metadata.replays(call.principal.tenant)
    return answer(ReplayList([replay_answer(replay) for replay in replays]))


async def post_progress(call: ProxyCall) -> web.StreamResponse:
    """For the process that runs the replay."""
    report = await call.json(ProgressInput)
    replay = await _replay_of(call)
    ranges = replay.plan.ranges
    for queue, at in report.progress.items():
        if queue not in ranges:
            raise BadRequest.field("progress", "queues of the plan", queue)
        first, end = ranges[queue]
        if not first <= at <= end:
            raise BadRequest.field(f"progress.{queue}", f"{first} to {end}", at)
    updated = await call.parts.metadata.update_replay(
        call.principal.tenant,
        replay.plan.replay_id,
        report.state,
        {**replay.progress, **report.progress},
        report.read,
        report.published,
        report.detail,
    )
    return answer(replay_answer(updated))


async def _replay_of(call: ProxyCall) -> ReplayInfo:
    replay_id = check_name("replay", call.params["replay"])
    return await call.parts.metadata.replay(call.principal.tenant, replay_id)


async def _plan(parts: Parts, replay_id: str, wanted: ReplayInput, source: TopicInfo, target: TopicInfo) -> ReplayPlan:
    ends = await ends_of(parts.reader, source.queues)
    chosen = wanted.filter or ReplayFilter()
    parsed = tags.parse(chosen.tag)
    return ReplayPlan(
        replay_id=replay_id,
        tenant_id=source.tenant_id,
        source_topic=source.name,
        source_topic_id=source.topic_id,
        target_topic=target.name,
        target_topic_id=target.topic_id,
        target_queues=target.settings.queues,
        clock=wanted.clock,
        from_ms=wanted.from_ms,
        to_ms=wanted.to_ms,
        filter_tag=None if parsed is None else parsed.text,
        filter_properties=chosen.properties,
        ranges={q.queue: (e.start_offset, e.end_offset) for q in source.queues for e in [ends[q.queue_id]]},
        rate=wanted.rate,
        created_ms=parts.clock.wall_ms(),
    )


def replay_answer(replay: ReplayInfo) -> Replay:
    plan = replay.plan
    queues = [
        ReplayQueue(queue, first, end, replay.progress.get(queue, first))
        for queue, (first, end) in sorted(plan.ranges.items())
    ]
    return Replay(
        replay_id=plan.replay_id,
        state=replay.state,
        source_topic=plan.source_topic,
        source_topic_id=plan.source_topic_id,
        target_topic=plan.target_topic,
        target_topic_id=plan.target_topic_id,
        target_queues=plan.target_queues,
        clock=plan.clock,
        from_ms=plan.from_ms,
        to_ms=plan.to_ms,
        filter=ReplayFilter(plan.filter_tag, plan.filter_properties),
        rate=plan.rate,
        queues=queues,
        read=replay.read,
        published=replay.published,
        detail=replay.detail,
        created_ms=plan.created_ms,
    )


_REPLAY = "/v1/replays/{replay}"
ROUTES = [
    Route(
        method="PUT",
        path=_REPLAY,
        handler=put_replay,
        summary="Plan a replay",
        description="Fixes source ranges and target now. Idempotent; 409 `replay_differs` for another plan.",
        body={JSON: ReplayInput},
        answer=Replay,
        statuses=(200, 201),
        scope="admin",
    ),
    Route(method="GET", path=_REPLAY, handler=get_replay, summary="See a replay", answer=Replay, scope="any"),
    Route(
        method="GET",
        path="/v1/replays",
        handler=list_replays,
        summary="List replays",
        answer=ReplayList,
        scope="any",
    ),
    Route(
        method="POST",
        path="/v1/replays/{replay}/progress",
        handler=post_progress,
        summary="Report progress (for the process that runs it)",
        body={JSON: ProgressInput},
        answer=Replay,
        scope="admin",
    ),
]
