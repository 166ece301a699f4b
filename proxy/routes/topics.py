"""Topics: make, see, change, delete; and where each of their queues begins and ends."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from millpond.core import limits
from millpond.core.errors import BadRequest, MillpondError
from millpond.core.http.call import JSON, Input, answer, empty
from millpond.core.http.fields import Bytes, DedupWindow, Duration, MessageBytes, PageSize, Queues
from millpond.core.http.routing import Route
from millpond.core.names import check_name
from millpond.metadata.client import TopicInfo, TopicSettings
from millpond.proxy import message_id
from millpond.proxy.parts import Parts, ProxyCall
from millpond.proxy.times import ends_of
from millpond.store.client import StoreClient

_log = logging.getLogger("millpond.proxy")


class Retention(Input, frozen=True, forbid_unknown_fields=True):
    """`ms`: messages older than this may go; `bytes`: beyond this the oldest may go. null: forever."""

    ms: Duration | None = None
    bytes: Bytes | None = None


class TopicInput(Input, frozen=True, forbid_unknown_fields=True):
    """Settings of a topic that is made; what is left out has its default."""

    queues: Queues = limits.QUEUES_DEFAULT
    durability: Literal["flush", "memory"] = "flush"
    retention: Retention = Retention()
    max_message_bytes: MessageBytes = limits.MESSAGE_BYTES
    dedup_window_ms: DedupWindow = limits.DEDUP_WINDOW_MS


class TopicPatch(Input, frozen=True, forbid_unknown_fields=True):
    """What is left out stays as it is. `queues` may only grow."""

    queues: Queues | UnsetType = UNSET
    durability: Literal["flush", "memory"] | UnsetType = UNSET
    retention: Retention | UnsetType = UNSET
    max_message_bytes: MessageBytes | UnsetType = UNSET
    dedup_window_ms: DedupWindow | UnsetType = UNSET


class Topic(msgspec.Struct, frozen=True):
    """A topic. `version` grows with every change; settings take effect on each proxy within a second or two."""

    topic: str
    topic_id: int
    queues: int
    durability: Literal["flush", "memory"]
    retention: Retention
    max_message_bytes: int
    dedup_window_ms: int
    created_ms: int
    version: int


class PageQuery(Input, frozen=True, forbid_unknown_fields=True):
    page_size: PageSize = limits.PAGE_SIZE
    page_token: str = ""


class TopicPage(msgspec.Struct, frozen=True):
    """`next_page_token` is absent on the last page."""

    topics: list[Topic]
    next_page_token: str | UnsetType = UNSET


class QueueState(msgspec.Struct, frozen=True):
    """Offsets: `start_offset` is the first message kept, [start_offset, tiered_to) is in the tier, `end_offset` is
    the confirmed end (the next message's offset, or a little less). `id_prefix` and an offset are a message id."""

    queue: int
    start_offset: int
    tiered_to: int
    end_offset: int
    id_prefix: str = ""


class QueueStates(msgspec.Struct, frozen=True):
    topic: str
    topic_id: int
    queues: list[QueueState]


# -- handlers -------------------------------------------------------------------------------------------------


async def put_topic(call: ProxyCall) -> web.StreamResponse:
    name = check_name("topic", call.params["topic"])
    wanted = await call.json(TopicInput)
    settings = TopicSettings(
        queues=wanted.queues,
        durability=wanted.durability,
        retention_ms=wanted.retention.ms,
        retention_bytes=wanted.retention.bytes,
        max_message_bytes=wanted.max_message_bytes,
        dedup_window_ms=wanted.dedup_window_ms,
    )
    topic, created = await call.parts.metadata.put_topic(call.principal.tenant, name, settings)
    call.parts.catalog.put_topic(topic)
    return answer(topic_answer(topic), 201 if created else 200)


async def get_topic(call: ProxyCall) -> web.StreamResponse:
    return answer(topic_answer(await topic_of(call)))


async def patch_topic(call: ProxyCall) -> web.StreamResponse:
    name = check_name("topic", call.params["topic"])
    patch = await call.json(TopicPatch)
    changes: dict[str, object] = {
        field: value for field in patch.__struct_fields__ if (value := getattr(patch, field)) is not UNSET
    }
    retention = changes.pop("retention", None)
    if isinstance(retention, Retention):
        changes |= {"retention_ms": retention.ms, "retention_bytes": retention.bytes}
    topic = await call.parts.metadata.patch_topic(call.principal.tenant, name, changes)
    call.parts.catalog.put_topic(topic)
    return answer(topic_answer(topic))


async def delete_topic(call: ProxyCall) -> web.StreamResponse:
    """Metadata first: the name is free and nobody finds the topic; then the stores forget its queues."""
    name = check_name("topic", call.params["topic"])
    parts = call.parts
    topic = await parts.metadata.delete_topic(call.principal.tenant, name)
    parts.catalog.drop_topic(topic.topic_id)
    await forget(parts, topic, f"topic {topic.name}", lambda store: store.delete_topic(topic.topic_id))
    return empty()


async def list_topics(call: ProxyCall) -> web.StreamResponse:
    query = call.query(PageQuery)
    after = _read_page_token(query.page_token)
    most = min(query.page_size + 1, limits.PAGE_SIZE_MOST)  # one more tells whether there is another page
    found = await call.parts.metadata.topics(call.principal.tenant, after, most)
    page = found[: query.page_size]
    more = len(found) > query.page_size or len(found) == limits.PAGE_SIZE_MOST  # then the next may be empty
    token = base64.urlsafe_b64encode(page[-1].name.encode()).decode() if more else UNSET
    return answer(TopicPage([topic_answer(topic) for topic in page], token))


async def list_queues(call: ProxyCall) -> web.StreamResponse:
    topic = await topic_of(call)
    tiered_to = await call.parts.metadata.tiered_to([queue.queue_id for queue in topic.queues])
    return answer(QueueStates(topic.name, topic.topic_id, await queue_states(call.parts, topic, tiered_to)))


# -- shared with other routes ---------------------------------------------------------------------------------


async def topic_of(call: ProxyCall) -> TopicInfo:
    """The topic that the path names. Raises BadRequest(invalid_name), NotFound(topic_not_found)."""
    name = check_name("topic", call.params["topic"])
    return await call.parts.catalog.topic(call.principal.tenant, name)


def _store_groups(topic: TopicInfo) -> list[str]:
    return sorted({span.store_group for queue in topic.queues for span in queue.spans})


async def forget(
    parts: Parts, topic: TopicInfo, what: str, call: Callable[[StoreClient], Coroutine[Any, Any, None]]
) -> None:
    """Tell each store of a topic, by `call`, that `what` is deleted. One that cannot hear of it now finds out for
    itself, within a minute."""

    async def tell(store_group: str) -> None:
        try:
            await call(parts.stores.group(store_group))
        except MillpondError as error:
            _log.warning("%s is deleted; store group %s has not heard of it: %s", what, store_group, error)

    await asyncio.gather(*map(tell, _store_groups(topic)))


def stores_of(parts: Parts, topic: TopicInfo) -> list[StoreClient]:
    """Every store group that holds a part of the topic's queues."""
    return [parts.stores.group(group) for group in _store_groups(topic)]


async def queue_states(parts: Parts, topic: TopicInfo, tiered_to: dict[int, int]) -> list[QueueState]:
    """`tiered_to` by queue id, asked before: so it never passes the end."""
    ends = await ends_of(parts.reader, topic.queues)
    return [
        QueueState(
            queue.queue,
            end.start_offset,
            tiered_to.get(queue.queue_id, 0),
            end.end_offset,
            message_id.prefix(queue, end.end_offset),
        )
        for queue in topic.queues
        for end in [ends[queue.queue_id]]
    ]


def topic_answer(topic: TopicInfo) -> Topic:
    settings = topic.settings
    return Topic(
        topic=topic.name,
        topic_id=topic.topic_id,
        queues=settings.queues,
        durability=settings.durability,
        retention=Retention(settings.retention_ms, settings.retention_bytes),
        max_message_bytes=settings.max_message_bytes,
        dedup_window_ms=settings.dedup_window_ms,
        created_ms=topic.created_ms,
        version=topic.version,
    )


def _read_page_token(token: str) -> str:
    """The name after which the page begins; what we did not make is refused."""
    try:
        name = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True).decode()
        return check_name("page_token", name) if name else ""
    except (binascii.Error, UnicodeError, BadRequest) as error:
        raise BadRequest.field("page_token", "a next_page_token of this list", token) from error


_ANY_TOPIC = "/v1/topics/{topic}"
ROUTES = [
    Route(
        method="PUT",
        path=_ANY_TOPIC,
        handler=put_topic,
        summary="Make a topic",
        description="Idempotent: 200 when it is there with the same settings, 409 `topic_differs` with others.",
        body={JSON: TopicInput},
        answer=Topic,
        statuses=(200, 201),
        scope="admin",
    ),
    Route(method="GET", path=_ANY_TOPIC, handler=get_topic, summary="See a topic", answer=Topic, scope="any"),
    Route(
        method="PATCH",
        path=_ANY_TOPIC,
        handler=patch_topic,
        summary="Change a topic's settings",
        body={JSON: TopicPatch},
        answer=Topic,
        scope="admin",
    ),
    Route(
        method="DELETE",
        path=_ANY_TOPIC,
        handler=delete_topic,
        summary="Delete a topic and all its messages",
        statuses=(204,),
        scope="admin",
    ),
    Route(
        method="GET",
        path="/v1/topics",
        handler=list_topics,
        summary="List topics by name",
        query=PageQuery,
        answer=TopicPage,
        scope="any",
    ),
    Route(
        method="GET",
        path="/v1/topics/{topic}/queues",
        handler=list_queues,
        summary="Where each queue begins and ends",
        answer=QueueStates,
        scope="any",
    ),
]
