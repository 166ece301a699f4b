"""Reading the feed of catalog changes: what a cache that stood at version `since` must take over to stand at now.

Keys and stores raise the version too, without rows of their own in `Changes`: a proxy that sees the version move
asks again for what it cached of them.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from millpond.metadata.catalog import TOPICS_SINCE, load_topics
from millpond.metadata.client import Changes
from millpond.metadata.groups import GROUPS_SINCE, load_groups
from millpond.metadata.head import current
from millpond.metadata.tables import TOMBSTONES


def version(connection: Connection) -> int:
    return current(connection)[0]


def changes(connection: Connection, since: int) -> Changes:
    """All that changed after `since`, in one snapshot. Full when `since` is 0, was never reached (the database is
    another one, or an older copy), or lies before the oldest deletion still remembered."""
    now, floor = current(connection)
    full = since <= 0 or since > now or since < floor
    after = 0 if full else since
    deleted: dict[str, list[int]] = {"topic": [], "group": []}
    if not full:
        dead = select(TOMBSTONES.c.kind, TOMBSTONES.c.id).where(TOMBSTONES.c.version > after)
        for kind, number in connection.execute(dead.order_by(TOMBSTONES.c.version, TOMBSTONES.c.id)):
            deleted[kind].append(number)
    topics = load_topics(connection, TOPICS_SINCE, since=after)
    groups = load_groups(connection, GROUPS_SINCE, since=after)
    return Changes(now, full, topics, groups, deleted["topic"], deleted["group"])
