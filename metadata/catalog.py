"""Topics and their queues: creating, changing, listing, deleting. Each function runs in the caller's transaction.

A topic keeps its row when it is deleted: its id is never used again, and a later topic of the same name gets
another tier name (`name~2`, `name~3`, ..; `~` is not legal in names), so that it never mixes with the old objects.
A new queue is one span (0, store group); groups are taken in turn from those that have registered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, func, select

from millpond.core.errors import BadRequest, Conflict, NotFound
from millpond.core.names import check_name
from millpond.metadata.client import QueueInfo, Span, TopicInfo, TopicSettings
from millpond.metadata.head import bury, lock, raise_version
from millpond.metadata.settings import apply_changes, check_settings
from millpond.metadata.tables import GROUPS, QUEUES, SPANS, STORES, TENANTS, TOPICS, in_lists

FIRST_STORE_GROUP = "a"  # where queues go before any store has registered; the default name of a store group
_LIVING = TOPICS.c.deleted_ms.is_(None)


class Topics(NamedTuple):
    """Statements for living topics, by id, and for the spans of their queues. Made once, since they run again and
    again: to make one takes longer than to run it."""

    rows: Select[Any]
    spans: Select[Any]

    @classmethod
    def that(cls, condition: ColumnElement[bool]) -> Topics:
        """`condition`: on columns of `topics`."""
        rows = select(TOPICS, TENANTS.c.name.label("tenant")).join(TENANTS).where(condition, _LIVING)
        spans = (
            select(TOPICS.c.topic_id, QUEUES.c.queue_id, QUEUES.c.queue, SPANS.c.first_offset, SPANS.c.store_group)
            .select_from(TOPICS.join(QUEUES).join(SPANS))
            .where(condition, _LIVING)
        )
        return cls(
            rows.order_by(TOPICS.c.topic_id), spans.order_by(TOPICS.c.topic_id, QUEUES.c.queue, SPANS.c.first_offset)
        )


_ONE = Topics.that(TOPICS.c.topic_id == bindparam("topic_id"))
_SOME = Topics.that(TOPICS.c.topic_id.in_(bindparam("ids", expanding=True)))
TOPICS_SINCE = Topics.that(TOPICS.c.version > bindparam("since"))
_LIVES = select(TOPICS.c.topic_id).where(TOPICS.c.topic_id == bindparam("topic_id"), _LIVING)
_NAMED = (
    select(TOPICS.c.topic_id)
    .join(TENANTS)
    .where(TENANTS.c.name == bindparam("tenant"), TOPICS.c.name == bindparam("name"), _LIVING)
)
_TENANT = select(TENANTS.c.tenant_id).where(TENANTS.c.name == bindparam("tenant"))
_GENERATION = select(func.max(TOPICS.c.generation)).where(
    TOPICS.c.tenant_id == bindparam("tenant_id"), TOPICS.c.name == bindparam("name")
)
_MAKE = TOPICS.insert().returning(TOPICS.c.topic_id)
_MAKE_QUEUES = QUEUES.insert()
_MAKE_SPANS = SPANS.insert()
_NEW_QUEUES = select(QUEUES.c.queue_id, QUEUES.c.queue).where(
    QUEUES.c.topic_id == bindparam("topic_id"), QUEUES.c.queue >= bindparam("first")
)
_STORE_GROUPS = select(STORES.c.store_group).order_by(STORES.c.store_group)
_CHANGE = TOPICS.update().where(TOPICS.c.topic_id == bindparam("of_topic"))


def put_topic(
    connection: Connection, tenant: str, name: str, settings: TopicSettings, now_ms: int
) -> tuple[TopicInfo, bool]:
    """Create it (True), or the one there is when its settings are equal; else Conflict(topic_differs)."""
    check_name("topic", name)
    check_settings(settings)
    lock(connection)
    tenant_id = find_tenant(connection, tenant)
    there = _find(connection, tenant, name)
    if there is not None:
        if there.settings != settings:
            differing = [f for f in settings.__struct_fields__ if getattr(settings, f) != getattr(there.settings, f)]
            raise Conflict("topic_differs", f"topic {name} exists with other settings: {', '.join(differing)}")
        return there, False
    generation = 1 + (connection.execute(_GENERATION, {"tenant_id": tenant_id, "name": name}).scalar() or 0)
    row = {
        "tenant_id": tenant_id,
        "name": name,
        "generation": generation,
        "tier_name": name if generation == 1 else f"{name}~{generation}",
        "settings": msgspec.json.encode(settings).decode(),
        "created_ms": now_ms,
        "version": raise_version(connection),
        "tier_version": 0,
    }
    topic_id = connection.execute(_MAKE, row).scalar_one()
    _add_queues(connection, topic_id, 0, settings.queues)
    return topic_by_id(connection, topic_id), True


def patch_topic(connection: Connection, tenant: str, name: str, changes: dict[str, object]) -> TopicInfo:
    """Change settings; a patch that changes nothing raises no version."""
    lock(connection)
    there = topic(connection, tenant, name)
    settings = apply_changes(there.settings, changes)
    if settings == there.settings:
        return there
    _add_queues(connection, there.topic_id, there.settings.queues, settings.queues)
    values = {"settings": msgspec.json.encode(settings).decode(), "version": raise_version(connection)}
    connection.execute(_CHANGE, values | {"of_topic": there.topic_id})
    return topic_by_id(connection, there.topic_id)


def delete_topic(connection: Connection, tenant: str, name: str, now_ms: int) -> TopicInfo:
    """Delete it and its groups; what it was."""
    lock(connection)
    there = topic(connection, tenant, name)
    version = raise_version(connection)
    dead = GROUPS.delete().where(GROUPS.c.topic_id == there.topic_id).returning(GROUPS.c.group_id)
    bury(connection, version, "group", sorted(connection.execute(dead).scalars()))
    bury(connection, version, "topic", [there.topic_id])
    values = {"deleted_ms": now_ms, "version": version}
    connection.execute(_CHANGE, values | {"of_topic": there.topic_id})
    return there


def topic(connection: Connection, tenant: str, name: str) -> TopicInfo:
    check_name("topic", name)
    there = _find(connection, tenant, name)
    if there is None:
        raise NotFound("topic_not_found", f"no topic {name}")
    return there


def topic_by_id(connection: Connection, topic_id: int) -> TopicInfo:
    """The living topic of that id, else NotFound(topic_not_found)."""
    found = load_topics(connection, _ONE, topic_id=topic_id)
    if not found:
        raise _no_topic(topic_id)
    return found[0]


def require_topic(connection: Connection, topic_id: int) -> None:
    """Raises NotFound(topic_not_found) unless a living topic has that id."""
    if connection.execute(_LIVES, {"topic_id": topic_id}).scalar() is None:
        raise _no_topic(topic_id)


def _no_topic(topic_id: int) -> NotFound:
    return NotFound("topic_not_found", f"no topic with id {topic_id}")


def topic_settings(connection: Connection, topic_ids: list[int]) -> dict[int, TopicSettings | None]:
    """By id; None: deleted. Those that never were are left out."""
    found: dict[int, TopicSettings | None] = {}
    for ids in in_lists(topic_ids):
        rows = select(TOPICS.c.topic_id, TOPICS.c.settings, TOPICS.c.deleted_ms).where(TOPICS.c.topic_id.in_(ids))
        for topic_id, settings, deleted_ms in connection.execute(rows):
            found[topic_id] = _settings_of(settings) if deleted_ms is None else None
    return found


def topics(connection: Connection, tenant: str, after: str, limit: int) -> list[TopicInfo]:
    """At most `limit` topics of the tenant by name, those after `after`."""
    if after:
        check_name("after", after)
    page = (
        select(TOPICS.c.topic_id)
        .join(TENANTS)
        .where(TENANTS.c.name == tenant, TOPICS.c.name > after, _LIVING)
        .order_by(TOPICS.c.name)
        .limit(limit)
    )
    ids = list(connection.execute(page).scalars())
    return sorted(load_topics(connection, _SOME, ids=ids), key=lambda info: info.name) if ids else []


def load_topics(connection: Connection, wanted: Topics, **values: object) -> list[TopicInfo]:
    """Those of `wanted`, with their queues. `values`: what its condition names."""
    queues: dict[int, dict[int, QueueInfo]] = {}
    for topic_id, queue_id, queue, first_offset, store_group in connection.execute(wanted.spans, values):
        of_topic = queues.setdefault(topic_id, {})
        info = of_topic.setdefault(queue, QueueInfo(queue_id, queue, []))
        info.spans.append(Span(first_offset, store_group))
    rows = connection.execute(wanted.rows, values)
    return [_topic_info(row, list(queues[row.topic_id].values())) for row in rows]


def find_tenant(connection: Connection, tenant: str) -> int:
    """Its id. A tenant comes from a credential, so an unknown one is the caller's mistake."""
    found = connection.execute(_TENANT, {"tenant": tenant}).scalar()
    if found is None:
        raise BadRequest.field("tenant", "a tenant that exists", tenant)
    return int(found)


def make_tenant(connection: Connection, tenant: str, now_ms: int) -> int:
    """Its id; made when it is not there. Only after `lock`, or while the database is made."""
    check_name("tenant", tenant)
    found = connection.execute(_TENANT, {"tenant": tenant}).scalar()
    if found is not None:
        return int(found)
    made = TENANTS.insert().values(name=tenant, created_ms=now_ms).returning(TENANTS.c.tenant_id)
    return int(connection.execute(made).scalar_one())


def touch(connection: Connection, topic_id: int, version: int) -> None:
    """The topic changed at `version`: one of its groups did."""
    connection.execute(_CHANGE, {"of_topic": topic_id, "version": version})


def _find(connection: Connection, tenant: str, name: str) -> TopicInfo | None:
    topic_id = connection.execute(_NAMED, {"tenant": tenant, "name": name}).scalar()
    return None if topic_id is None else topic_by_id(connection, topic_id)


def _add_queues(connection: Connection, topic_id: int, first: int, end: int) -> None:
    """Queues [first, end) of a topic; their store groups in turn, beginning elsewhere for each topic."""
    if first == end:
        return
    registered = list(connection.execute(_STORE_GROUPS).scalars())
    store_groups = registered or [FIRST_STORE_GROUP]
    rows = [{"topic_id": topic_id, "queue": queue, "tiered_to": 0} for queue in range(first, end)]
    connection.execute(_MAKE_QUEUES, rows)
    made = connection.execute(_NEW_QUEUES, {"topic_id": topic_id, "first": first})
    spans = [
        {"queue_id": each, "first_offset": 0, "store_group": store_groups[(topic_id + queue) % len(store_groups)]}
        for each, queue in made
    ]
    connection.execute(_MAKE_SPANS, spans)


def _topic_info(row: Row[*tuple[object, ...]], queues: list[QueueInfo]) -> TopicInfo:
    return TopicInfo(
        tenant_id=row.tenant_id,
        tenant=row.tenant,
        topic_id=row.topic_id,
        name=row.name,
        tier_name=row.tier_name,
        settings=_settings_of(row.settings),
        queues=queues,
        created_ms=row.created_ms,
        version=row.version,
    )


def _settings_of(column: str) -> TopicSettings:
    return msgspec.json.decode(column, type=TopicSettings)
