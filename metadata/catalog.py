"""Topics and their queues: creating, changing, listing, deleting. Each function runs in the caller's transaction.

A topic keeps its row when it is deleted: its id is never used again, and a later topic of the same name gets
another tier name (`name~2`, `name~3`, ..; `~` is not legal in names), so that it never mixes with the old objects.
A new queue is one span (0, store group); groups are taken in turn from those that have registered.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, func, select

from millpond.core.errors import BadRequest, Conflict, NotFound
from millpond.core.names import check_name
from millpond.metadata.client import QueueInfo, Span, TopicInfo, TopicSettings
from millpond.metadata.head import bury, lock, raise_version
from millpond.metadata.settings import apply_changes, check_settings
from millpond.metadata.tables import GROUPS, QUEUES, SPANS, STORES, TENANTS, TOPICS, in_lists

FIRST_STORE_GROUP = "a"  # where queues go before any store has registered; the default name of a store group
_LIVING = TOPICS.c.deleted_ms.is_(None)


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
    same_name = (TOPICS.c.tenant_id == tenant_id) & (TOPICS.c.name == name)
    generation = 1 + (connection.execute(select(func.max(TOPICS.c.generation)).where(same_name)).scalar() or 0)
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
    topic_id = connection.execute(TOPICS.insert().values(row).returning(TOPICS.c.topic_id)).scalar_one()
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
    connection.execute(TOPICS.update().where(TOPICS.c.topic_id == there.topic_id).values(values))
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
    connection.execute(TOPICS.update().where(TOPICS.c.topic_id == there.topic_id).values(values))
    return there


def topic(connection: Connection, tenant: str, name: str) -> TopicInfo:
    check_name("topic", name)
    there = _find(connection, tenant, name)
    if there is None:
        raise NotFound("topic_not_found", f"no topic {name}")
    return there


def topic_by_id(connection: Connection, topic_id: int) -> TopicInfo:
    """The living topic of that id, else NotFound(topic_not_found)."""
    found = load_topics(connection, TOPICS.c.topic_id == topic_id)
    if not found:
        raise NotFound("topic_not_found", f"no topic with id {topic_id}")
    return found[0]


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
    return sorted(load_topics(connection, TOPICS.c.topic_id.in_(ids)), key=lambda info: info.name) if ids else []


def load_topics(connection: Connection, condition: ColumnElement[bool]) -> list[TopicInfo]:
    """Living topics for which `condition` (on columns of `topics`) holds, by id, with their queues: two queries."""
    queues: dict[int, dict[int, QueueInfo]] = {}
    spans = (
        select(TOPICS.c.topic_id, QUEUES.c.queue_id, QUEUES.c.queue, SPANS.c.first_offset, SPANS.c.store_group)
        .select_from(TOPICS.join(QUEUES).join(SPANS))
        .where(condition, _LIVING)
        .order_by(TOPICS.c.topic_id, QUEUES.c.queue, SPANS.c.first_offset)
    )
    for topic_id, queue_id, queue, first_offset, store_group in connection.execute(spans):
        of_topic = queues.setdefault(topic_id, {})
        info = of_topic.setdefault(queue, QueueInfo(queue_id, queue, []))
        info.spans.append(Span(first_offset, store_group))
    rows = select(TOPICS, TENANTS.c.name.label("tenant")).join(TENANTS).where(condition, _LIVING)
    return [
        _topic_info(row, list(queues[row.topic_id].values()))
        for row in connection.execute(rows.order_by(TOPICS.c.topic_id))
    ]


def find_tenant(connection: Connection, tenant: str) -> int:
    """Its id. A tenant comes from a credential, so an unknown one is the caller's mistake."""
    found = connection.execute(select(TENANTS.c.tenant_id).where(TENANTS.c.name == tenant)).scalar()
    if found is None:
        raise BadRequest.field("tenant", "a tenant that exists", tenant)
    return int(found)


def make_tenant(connection: Connection, tenant: str, now_ms: int) -> int:
    """Its id; made when it is not there. Only after `lock`, or while the database is made."""
    check_name("tenant", tenant)
    found = connection.execute(select(TENANTS.c.tenant_id).where(TENANTS.c.name == tenant)).scalar()
    if found is not None:
        return int(found)
    made = TENANTS.insert().values(name=tenant, created_ms=now_ms).returning(TENANTS.c.tenant_id)
    return int(connection.execute(made).scalar_one())


def touch(connection: Connection, topic_id: int, version: int) -> None:
    """The topic changed at `version`: one of its groups did."""
    connection.execute(TOPICS.update().where(TOPICS.c.topic_id == topic_id).values(version=version))


def _find(connection: Connection, tenant: str, name: str) -> TopicInfo | None:
    by_name = select(TOPICS.c.topic_id).join(TENANTS).where(TENANTS.c.name == tenant, TOPICS.c.name == name, _LIVING)
    topic_id = connection.execute(by_name).scalar()
    return None if topic_id is None else topic_by_id(connection, topic_id)


def _add_queues(connection: Connection, topic_id: int, first: int, end: int) -> None:
    """Queues [first, end) of a topic; their store groups in turn, beginning elsewhere for each topic."""
    if first == end:
        return
    registered = list(connection.execute(select(STORES.c.store_group).order_by(STORES.c.store_group)).scalars())
    store_groups = registered or [FIRST_STORE_GROUP]
    rows = [{"topic_id": topic_id, "queue": queue, "tiered_to": 0} for queue in range(first, end)]
    connection.execute(QUEUES.insert(), rows)
    made = select(QUEUES.c.queue_id, QUEUES.c.queue).where(QUEUES.c.topic_id == topic_id, QUEUES.c.queue >= first)
    spans = [
        {"queue_id": each, "first_offset": 0, "store_group": store_groups[(topic_id + queue) % len(store_groups)]}
        for each, queue in connection.execute(made)
    ]
    connection.execute(SPANS.insert(), spans)


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
