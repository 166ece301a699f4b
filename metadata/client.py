"""What the metadata part does, as an interface: `MetadataClient`, its requests and its answers.

Two implementations: `metadata.local.LocalMetadata` (direct calls on the SQL database, imported by the
launcher only) and `metadata.remote.RemoteMetadata` (HTTP, through `core.http.rpc`). One behaviour suite runs
on both, over SQLite and PostgreSQL. Arguments and answers are frozen structs; errors are `MillpondError`s.

Small and rarely written: nothing at message rate comes here. Ids are positive integers that are never reused:
`queue_id` is global, `topic_id` outlives the topic's name, and whatever outlives a topic carries it.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

Durability = Literal["flush", "memory"]
DEFAULT_TENANT = "default"


class Span(msgspec.Struct, frozen=True):
    """From `first_offset` on, the queue's messages are appended by `store_group`."""

    first_offset: int
    store_group: str


class QueueInfo(msgspec.Struct, frozen=True):
    queue_id: int
    queue: int
    spans: list[Span]


class TopicSettings(msgspec.Struct, frozen=True):
    """Everything of a topic that its owner can set. `retention_*` None: forever."""

    queues: int
    durability: Durability = "flush"
    retention_ms: int | None = None
    retention_bytes: int | None = None
    max_message_bytes: int = 4 * 1024 * 1024
    dedup_window_ms: int = 300_000


class TopicInfo(msgspec.Struct, frozen=True):
    """`tier_name` is the name in tier paths: `name`, or `name~n` when the name was used before."""

    tenant_id: int
    tenant: str
    topic_id: int
    name: str
    tier_name: str
    settings: TopicSettings
    queues: list[QueueInfo]
    created_ms: int
    version: int


class GroupInfo(msgspec.Struct, frozen=True):
    """`filter_tag`: the group's tag expression ("a || b"); None is every message. `filter_version` counts changes."""

    group_id: int
    topic_id: int
    name: str
    start: Literal["earliest", "latest"]
    filter_tag: str | None
    filter_version: int
    max_in_flight: int
    created_ms: int


class Principal(msgspec.Struct, frozen=True):
    """Who a key stands for. `scopes`: produce, consume, admin."""

    tenant_id: int
    tenant: str
    key_id: str
    scopes: list[str]


class KeyInfo(msgspec.Struct, frozen=True):
    key_id: str
    name: str
    scopes: list[str]
    created_ms: int
    revoked_ms: int | None


class NewKey(msgspec.Struct, frozen=True):
    """`secret` is shown once: only its hash is stored. The credential is `mp_<key_id>_<secret>`."""

    key: KeyInfo
    secret: str


class LeaseKey(msgspec.Struct, frozen=True):
    """A cluster key that signs lease tokens. New tokens use the newest; old ones stay valid until `until_ms`."""

    number: int
    secret: bytes
    until_ms: int


class Changes(msgspec.Struct, frozen=True):
    """What changed since a version. `topics` also holds topics whose groups changed; `full`: forget all you had."""

    version: int
    full: bool
    topics: list[TopicInfo]
    groups: list[GroupInfo]
    deleted_topic_ids: list[int]
    deleted_group_ids: list[int]


class StoreInfo(msgspec.Struct, frozen=True):
    """A store group and where its primary listens (`http://host:port`, or "" inside one process)."""

    store_group: str
    epoch: int
    address: str


class ObjectRange(msgspec.Struct, frozen=True):
    """What one tier object holds of one queue: of offsets [first, end) the last `rows`; both clocks in ms.

    Fewer rows than offsets: the first ones had expired, or were damaged in the log, before they were sealed.
    """

    queue_id: int
    queue: int
    first: int
    end: int
    rows: int
    min_store_ts: int
    max_store_ts: int
    min_born_ts: int | None
    max_born_ts: int | None


class TierObject(msgspec.Struct, frozen=True):
    """One Parquet object. `path` is relative to the tier's prefix. `sha256` in hex."""

    object_id: str
    topic_id: int
    path: str
    bytes: int
    sha256: str
    footer_bytes: int
    ranges: list[ObjectRange]


class TierView(msgspec.Struct, frozen=True):
    """Committed objects of a topic, sorted by path, and how far each queue is tiered (queue_id -> offset)."""

    topic_id: int
    version: int
    tiered_to: dict[int, int]
    objects: list[TierObject]


class ReplayPlan(msgspec.Struct, frozen=True):
    """Fixed at creation. `ranges`: source queue number -> [first, end). Route: keyed -> key_hash mod target_queues,
    keyless -> source queue mod target_queues. Times in ms; `from_ms` <= clock value < `to_ms`.
    `filter`: {"tag": "a || b"} and / or {"properties": {"name": "value"}}."""

    replay_id: str
    tenant_id: int
    source_topic: str
    source_topic_id: int
    target_topic: str
    target_topic_id: int
    target_queues: int
    clock: Literal["store", "born"]
    from_ms: int | None
    to_ms: int | None
    filter_tag: str | None
    filter_properties: dict[str, str]
    ranges: dict[int, tuple[int, int]]
    rate: int | None
    created_ms: int


class ReplayInfo(msgspec.Struct, frozen=True):
    """`progress`: source queue number -> next source offset; `read` and `published` count messages."""

    plan: ReplayPlan
    state: Literal["planned", "running", "done", "failed"]
    progress: dict[int, int]
    read: int
    published: int
    detail: str
    version: int


class MetadataClient(Protocol):
    """Every method may raise `Unavailable` (metadata_unavailable)."""

    # -- nodes and secrets
    async def lease_keys(self) -> list[LeaseKey]:
        """Keys that sign and verify lease tokens, newest first; made on first use, rotated daily."""
        ...

    async def register_store(self, store_group: str, node_id: str, address: str) -> StoreInfo:
        """A store starts: its epoch is raised. A group registered by another node id is Conflict(epoch_superseded)
        unless it is the same node again."""
        ...

    async def stores(self) -> list[StoreInfo]: ...

    # -- who asks
    async def authenticate(self, key_id: str, secret: str) -> Principal:
        """Raises Unauthenticated. Constant time in the secret."""
        ...

    async def keys_exist(self) -> bool:
        """Whether any key was ever made: a deployment without one is open, on loopback only."""
        ...

    async def create_key(self, tenant: str, name: str, scopes: list[str]) -> NewKey: ...

    async def keys(self, tenant: str) -> list[KeyInfo]: ...

    async def revoke_key(self, tenant: str, key_id: str) -> None: ...

    # -- topics
    async def put_topic(self, tenant: str, name: str, settings: TopicSettings) -> tuple[TopicInfo, bool]:
        """Create it (True), or return the one there is when its settings are equal; else Conflict(topic_differs)."""
        ...

    async def patch_topic(self, tenant: str, name: str, changes: dict[str, object]) -> TopicInfo:
        """Change settings; `queues` may only grow."""
        ...

    async def topic(self, tenant: str, name: str) -> TopicInfo: ...

    async def topic_by_id(self, topic_id: int) -> TopicInfo: ...

    async def topic_settings(self, topic_ids: list[int]) -> dict[int, TopicSettings | None]:
        """Of many topics, by id; None: it was deleted; one that never was is left out. One query where `topic_by_id`
        of each would be thousands."""
        ...

    async def topics(self, tenant: str, after: str, limit: int) -> list[TopicInfo]:
        """By name, those after `after`."""
        ...

    async def delete_topic(self, tenant: str, name: str) -> TopicInfo: ...

    # -- groups
    async def put_group(
        self, topic_id: int, name: str, start: Literal["earliest", "latest"], filter_tag: str | None, max_in_flight: int
    ) -> tuple[GroupInfo, bool]:
        """Create it (True), or return the one there is; one whose filter differs is Conflict(filter_differs)."""
        ...

    async def patch_group(self, topic_id: int, name: str, changes: dict[str, object]) -> GroupInfo:
        """Change `filter_tag` (raises filter_version) or `max_in_flight`."""
        ...

    async def group(self, topic_id: int, name: str) -> GroupInfo: ...

    async def groups(self, topic_id: int) -> list[GroupInfo]: ...

    async def living_groups(self, group_ids: list[int]) -> list[int]:
        """Those of these ids whose group is there, in any order."""
        ...

    async def delete_group(self, topic_id: int, name: str) -> GroupInfo: ...

    async def changes(self, since: int, wait_ms: int) -> Changes:
        """What changed after version `since`; waits up to `wait_ms` for a change. since=0: everything (full)."""
        ...

    # -- tier manifest: SQL is the truth
    async def tier_start(self, store_group: str, epoch: int, obj: TierObject) -> None:
        """Row STARTED, before the PUT. Raises Conflict(epoch_superseded)."""
        ...

    async def tier_commit(self, store_group: str, epoch: int, object_id: str) -> int:
        """One transaction: epoch must be ours; each queue's tiered_to must equal its range's first and becomes its
        end; row COMMITTED; the topic's tier version + 1, which is returned. Any mismatch: Conflict(manifest_conflict),
        nothing changed. Idempotent: a second commit of the same object answers the same version."""
        ...

    async def tier_abort(self, object_id: str) -> None:
        """A STARTED row whose PUT failed becomes ORPHAN; the sweep deletes its object."""
        ...

    async def tier_view(
        self, topic_id: int, queue_ids: list[int] | None = None, from_offset: int = 0, to_offset: int | None = None
    ) -> TierView:
        """Committed objects that overlap [from_offset, to_offset) of any of the queues."""
        ...

    async def tiered_to(self, queue_ids: list[int]) -> dict[int, int]: ...

    # -- replays
    async def put_replay(self, plan: ReplayPlan) -> tuple[ReplayInfo, bool]:
        """Create it (True), or return the one there is when what was asked is equal (everything but `ranges` and
        `created_ms`); else Conflict(replay_differs)."""
        ...

    async def replay(self, tenant: str, replay_id: str) -> ReplayInfo: ...

    async def replays(self, tenant: str) -> list[ReplayInfo]: ...

    async def update_replay(
        self, tenant: str, replay_id: str, state: str, progress: dict[int, int], read: int, published: int, detail: str
    ) -> ReplayInfo: ...

    async def close(self) -> None: ...
