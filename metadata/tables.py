"""The tables of the metadata database (truth), for SQLite and PostgreSQL alike.

    millpond   one row: schema version, feed version, feed floor; its lock orders all catalog writes
    tenants -- topics -- queues -- spans         topics stay as rows when deleted: ids and tier names are never reused
                  |         `-- tiered_to        (how far the tier holds the queue)
                  `-- groups
    tombstones   ids deleted lately, by feed version
    stores       store group -> node, address, epoch; its row's lock orders that group's manifest writes
    api_keys, lease_keys
    tier_objects -- tier_ranges                  one row per object, one per queue in it
    replays

Times are milliseconds since 1970 UTC. Structs that are only ever read whole (settings, scopes, plans) are JSON
text. Names sort by code point on both databases (collation C), so that a page token means the same everywhere.
`SCHEMA_VERSION` counts incompatible changes; a database with another number is refused at start.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import (
    DDL,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    event,
)

SCHEMA_VERSION = 1

METADATA = MetaData()

# SQLite makes ids that are never reused (AUTOINCREMENT) only for columns declared INTEGER.
_Id = BigInteger().with_variant(Integer(), "sqlite")
_Name = String().with_variant(String(collation="C"), "postgresql")

HEAD = Table(
    "millpond",
    METADATA,
    Column("one", Integer, CheckConstraint("one = 1"), primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    Column("version", BigInteger, nullable=False),  # of the feed: raised by every catalog write
    Column("floor", BigInteger, nullable=False),  # deletions at or below it are forgotten
)

TENANTS = Table(
    "tenants",
    METADATA,
    Column("tenant_id", _Id, primary_key=True),
    Column("name", _Name, nullable=False, unique=True),
    Column("created_ms", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

TOPICS = Table(
    "topics",
    METADATA,
    Column("topic_id", _Id, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False),
    Column("name", _Name, nullable=False),
    Column("generation", Integer, nullable=False),  # 1 for the first topic of that name, then 2, ..
    Column("tier_name", _Name, nullable=False),
    Column("settings", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("deleted_ms", BigInteger),
    Column("version", BigInteger, nullable=False),  # feed version of its last change
    Column("tier_version", BigInteger, nullable=False),  # raised by every manifest commit
    UniqueConstraint("tenant_id", "name", "generation"),
    Index("topics_version", "version"),
    sqlite_autoincrement=True,
)
# As an Index with a condition it would load SQLAlchemy's PostgreSQL at every start, also where SQLite is used.
event.listen(
    TOPICS,
    "after_create",
    DDL("CREATE UNIQUE INDEX topics_living ON topics (tenant_id, name) WHERE deleted_ms IS NULL"),  # type: ignore[no-untyped-call]
)

QUEUES = Table(
    "queues",
    METADATA,
    Column("queue_id", _Id, primary_key=True),
    Column("topic_id", ForeignKey("topics.topic_id"), nullable=False),
    Column("queue", Integer, nullable=False),
    Column("tiered_to", BigInteger, nullable=False),
    UniqueConstraint("topic_id", "queue"),
    sqlite_autoincrement=True,
)

SPANS = Table(
    "spans",
    METADATA,
    Column("queue_id", ForeignKey("queues.queue_id"), primary_key=True),
    Column("first_offset", BigInteger, primary_key=True, autoincrement=False),
    Column("store_group", _Name, nullable=False),
)

GROUPS = Table(
    "consumer_groups",
    METADATA,
    Column("group_id", _Id, primary_key=True),
    Column("topic_id", ForeignKey("topics.topic_id"), nullable=False),
    Column("name", _Name, nullable=False),
    Column("start", String, nullable=False),
    Column("filter_tag", Text),
    Column("filter_version", Integer, nullable=False),
    Column("max_in_flight", Integer, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    UniqueConstraint("topic_id", "name"),
    Index("groups_version", "version"),
    sqlite_autoincrement=True,
)

TOMBSTONES = Table(
    "tombstones",
    METADATA,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String, primary_key=True),  # topic, group
    Column("id", BigInteger, primary_key=True, autoincrement=False),
)

STORES = Table(
    "stores",
    METADATA,
    Column("store_group", _Name, primary_key=True),
    Column("node_id", String, nullable=False),
    Column("address", String, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("registered_ms", BigInteger, nullable=False),
)

API_KEYS = Table(
    "api_keys",
    METADATA,
    Column("key_id", String, primary_key=True),
    Column("tenant_id", ForeignKey("tenants.tenant_id"), nullable=False, index=True),
    Column("name", String, nullable=False),
    Column("scopes", Text, nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("revoked_ms", BigInteger),
)

LEASE_KEYS = Table(
    "lease_keys",
    METADATA,
    Column("number", _Id, primary_key=True),
    Column("secret", LargeBinary, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

TIER_OBJECTS = Table(
    "tier_objects",
    METADATA,
    Column("object_no", _Id, primary_key=True),  # small, for the ranges' index; never leaves the database
    Column("object_id", String, nullable=False, unique=True),
    Column("topic_id", ForeignKey("topics.topic_id"), nullable=False),
    Column("store_group", _Name, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("path", _Name, nullable=False, unique=True),
    Column("bytes", BigInteger, nullable=False),
    Column("sha256", String, nullable=False),
    Column("footer_bytes", Integer, nullable=False),
    Column("state", String, nullable=False),  # STARTED, COMMITTED, ORPHAN
    Column("tier_version", BigInteger),  # the topic's, as raised by this object's commit
    Column("changed_ms", BigInteger, nullable=False),
    Index("tier_objects_topic", "topic_id", "state", "path"),
    Index("tier_objects_state", "store_group", "state"),
    sqlite_autoincrement=True,
)

# `committed` repeats the object's state: committed ranges of a queue never overlap, so one index seek by
# (queue, first) finds where any offset lies among any number of objects.
TIER_RANGES = Table(
    "tier_ranges",
    METADATA,
    Column("queue_id", ForeignKey("queues.queue_id"), primary_key=True),
    Column("committed", Integer, primary_key=True),
    Column("first", BigInteger, primary_key=True, autoincrement=False),
    Column("object_no", ForeignKey("tier_objects.object_no"), primary_key=True, index=True),
    Column("end", BigInteger, nullable=False),
    Column("queue", Integer, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("min_store_ts", BigInteger, nullable=False),
    Column("max_store_ts", BigInteger, nullable=False),
    Column("min_born_ts", BigInteger),
    Column("max_born_ts", BigInteger),
    sqlite_with_rowid=False,
)

REPLAYS = Table(
    "replays",
    METADATA,
    Column("tenant_id", ForeignKey("tenants.tenant_id"), primary_key=True),
    Column("replay_id", _Name, primary_key=True),
    Column("plan", Text, nullable=False),
    Column("state", String, nullable=False),
    Column("progress", Text, nullable=False),
    Column("read", BigInteger, nullable=False),
    Column("published", BigInteger, nullable=False),
    Column("detail", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
)

IN_LIST = 500  # ids in one IN list: far below what either database takes in a statement


def in_lists(ids: list[int]) -> Iterable[list[int]]:
    """`ids` in parts of IN_LIST."""
    return (ids[start : start + IN_LIST] for start in range(0, len(ids), IN_LIST))
