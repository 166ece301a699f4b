"""Consumer groups: make, see, change, delete. (Their progress: `lag.py`, `seek.py`.)"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from millpond.core import limits
from millpond.core.errors import Conflict, MillpondError
from millpond.core.http.call import JSON, Input, answer, empty
from millpond.core.http.fields import InFlight
from millpond.core.http.routing import Route
from millpond.core.names import check_name
from millpond.metadata.client import GroupInfo, QueueInfo, TopicInfo
from millpond.proxy import tags
from millpond.proxy.grants import group_ref
from millpond.proxy.parts import Parts, ProxyCall
from millpond.proxy.queue_lists import queue_ref
from millpond.proxy.routes.topics import forget, topic_of
from millpond.proxy.times import by_store
from millpond.store.client import SeekRequest


class GroupFilter(Input, frozen=True, forbid_unknown_fields=True):
    """`tag`: "a || b" (one of these tags); null or "*": every message."""

    tag: str | None = None


class GroupInput(Input, frozen=True, forbid_unknown_fields=True):
    """`start`: where the group begins, when it is made. `max_in_flight`: leased and unsettled messages per queue, above
    which a receive answers `in_flight_full`."""

    start: Literal["earliest", "latest"] = "latest"
    filter: GroupFilter = GroupFilter()
    max_in_flight: InFlight = limits.UNSETTLED_ROWS


class GroupPatch(Input, frozen=True, forbid_unknown_fields=True):
    """What is left out stays as it is."""

    filter: GroupFilter | UnsetType = UNSET
    max_in_flight: InFlight | UnsetType = UNSET


class Group(msgspec.Struct, frozen=True):
    """A group of a topic. `filter_version` counts changes of its filter."""

    group: str
    topic: str
    start: Literal["earliest", "latest"]
    filter: GroupFilter
    filter_version: int
    max_in_flight: int
    created_ms: int


class GroupList(msgspec.Struct, frozen=True):
    groups: list[Group]


async def put_group(call: ProxyCall) -> web.StreamResponse:
    name = check_name("group", call.params["group"])
    topic = await topic_of(call)
    wanted = await call.json(GroupInput)
    group, created = await call.parts.metadata.put_group(
        topic.topic_id, name, wanted.start, _canonical(wanted.filter), wanted.max_in_flight
    )
    if not created and (group.start, group.max_in_flight) != (wanted.start, wanted.max_in_flight):
        raise Conflict("group_differs", f"group {name!r} is there with another start or max_in_flight")
    call.parts.catalog.put_group(group)
    await _begin(call.parts, topic, group)
    return answer(group_answer(group, topic.name), 201 if created else 200)


async def _begin(parts: Parts, topic: TopicInfo, group: GroupInfo) -> None:
    """Let the group begin in the queues where it has not: what is sent from now on is for it, whenever its first
    receive comes. Where a store is away, that receive begins it."""

    async def begin(store: str, queues: Sequence[QueueInfo]) -> None:
        refs = [queue_ref(topic, queue) for queue in queues]
        request = SeekRequest(group_ref(topic, group), [], [], "begin", dry_run=False, start=group.start, others=refs)
        with suppress(MillpondError):
            await parts.stores.group(store).seek(request)

    await asyncio.gather(*(begin(store, queues) for store, queues in by_store(topic.queues).items()))


async def get_group(call: ProxyCall) -> web.StreamResponse:
    name = check_name("group", call.params["group"])
    topic = await topic_of(call)
    group, _ = await call.parts.catalog.group(topic, name)
    return answer(group_answer(group, topic.name))


async def patch_group(call: ProxyCall) -> web.StreamResponse:
    name = check_name("group", call.params["group"])
    topic = await topic_of(call)
    patch = await call.json(GroupPatch)
    changes: dict[str, object] = {}
    if patch.filter is not UNSET:
        changes["filter_tag"] = _canonical(patch.filter)
    if patch.max_in_flight is not UNSET:
        changes["max_in_flight"] = patch.max_in_flight
    group = await call.parts.metadata.patch_group(topic.topic_id, name, changes)
    call.parts.catalog.put_group(group)
    return answer(group_answer(group, topic.name))


async def delete_group(call: ProxyCall) -> web.StreamResponse:
    """Metadata first, so that no new lease begins; then the stores drop cursors and leases."""
    name = check_name("group", call.params["group"])
    topic = await topic_of(call)
    group = await call.parts.metadata.delete_group(topic.topic_id, name)
    call.parts.catalog.drop_group(group)
    ref = group_ref(topic, group)
    await forget(call.parts, topic, f"group {name} of topic {topic.name}", lambda store: store.delete_group(ref))
    return empty()


async def list_groups(call: ProxyCall) -> web.StreamResponse:
    topic = await topic_of(call)
    groups = await call.parts.metadata.groups(topic.topic_id)
    return answer(GroupList([group_answer(group, topic.name) for group in groups]))


def group_answer(group: GroupInfo, topic: str) -> Group:
    return Group(
        group=group.name,
        topic=topic,
        start=group.start,
        filter=GroupFilter(group.filter_tag),
        filter_version=group.filter_version,
        max_in_flight=group.max_in_flight,
        created_ms=group.created_ms,
    )


def _canonical(wanted: GroupFilter) -> str | None:
    parsed = tags.parse(wanted.tag)
    return None if parsed is None else parsed.text


_GROUP = "/v1/topics/{topic}/groups/{group}"
ROUTES = [
    Route(
        method="PUT",
        path=_GROUP,
        handler=put_group,
        summary="Make a group",
        description="Idempotent. A first receive also makes the group; this call lets it begin at `earliest` or with a"
        " filter before anybody consumes. 409 `filter_differs` or `group_differs` when it is there and not the same.",
        body={JSON: GroupInput},
        answer=Group,
        statuses=(200, 201),
        scope="consume",
    ),
    Route(method="GET", path=_GROUP, handler=get_group, summary="See a group", answer=Group, scope="consume"),
    Route(
        method="PATCH",
        path=_GROUP,
        handler=patch_group,
        summary="Change a group's filter or bound",
        body={JSON: GroupPatch},
        answer=Group,
        scope="consume",
    ),
    Route(
        method="DELETE",
        path=_GROUP,
        handler=delete_group,
        summary="Delete a group and its progress",
        statuses=(204,),
        scope="consume",
    ),
    Route(
        method="GET",
        path="/v1/topics/{topic}/groups",
        handler=list_groups,
        summary="List a topic's groups",
        answer=GroupList,
        scope="consume",
    ),
]
