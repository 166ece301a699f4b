"""`LocalMetadata`: the metadata part itself, by direct calls on its SQL database. Imported by the launcher only.

Each method is one transaction of a function beside: catalog, groups, keys, nodes, manifest, replays, feed. What is
decided here is only which of them write the catalog (and so wake those who wait for changes), and the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from sqlalchemy import Connection

from millpond.core import limits
from millpond.core.clock import Clock, Random
from millpond.core.errors import BadRequest
from millpond.metadata import catalog, feed, groups, keys, manifest, nodes, replays
from millpond.metadata.client import (
    DEFAULT_TENANT,
    Changes,
    GroupInfo,
    KeyInfo,
    LeaseKey,
    NewKey,
    Principal,
    ReplayInfo,
    ReplayPlan,
    StoreInfo,
    TierObject,
    TierView,
    TopicInfo,
    TopicSettings,
)
from millpond.metadata.database import Database
from millpond.metadata.watch import Watch

Answer = TypeVar("Answer")


class LocalMetadata:
    """A `MetadataClient`. Made by `open`; belongs to the event loop that opened it."""

    def __init__(self, database: Database, clock: Clock, random: Random) -> None:
        self._database = database
        self._clock = clock
        self._random = random
        self._watch = Watch(lambda: database.read(feed.version))

    @classmethod
    async def open(
        cls,
        url: str,
        clock: Clock,
        random: Random,
        *,
        busy_ms: int = limits.METADATA_BUSY_MS,
        call_ms: int = limits.CALL_MS,
    ) -> LocalMetadata:
        """`url`: `sqlite:///path` (made when absent) or `postgresql://..`. `busy_ms`: how long to wait for another
        process's lock; `call_ms`: for any call. Raises BadRequest (the URL), Unavailable(metadata_unavailable),
        Internal(metadata_corrupt, newer_format)."""
        database = Database(url, busy_ms=busy_ms, call_ms=call_ms)
        try:
            await database.create(lambda c: _first_rows(c, clock.wall_ms()))
        except BaseException:
            await database.close()
            raise
        return cls(database, clock, random)

    async def close(self) -> None:
        """Ends the waiting `changes` calls, waits for the transactions under way, closes the connections."""
        self._watch.close()
        await self._database.close()

    async def _read(self, call: Callable[[Connection], Answer]) -> Answer:
        return await self._database.read(call)

    async def _write(self, call: Callable[[Connection], Answer]) -> Answer:
        """A write outside the catalog: nobody waits for it."""
        return await self._database.write(call)

    async def _change(self, call: Callable[[Connection], Answer]) -> Answer:
        """A write of the catalog."""
        return await self._database.write(call, self._watch.wake)

    # -- nodes and secrets

    async def lease_keys(self) -> list[LeaseKey]:
        now_ms = self._clock.wall_ms()

        def find(connection: Connection) -> list[LeaseKey] | None:
            return None if keys.rotation_due(connection, now_ms) else keys.lease_keys(connection, now_ms)

        found = await self._read(find)
        if found is not None:
            return found
        return await self._write(lambda c: keys.rotate_lease_keys(c, now_ms, self._random))

    async def register_store(self, store_group: str, node_id: str, address: str) -> StoreInfo:
        now_ms = self._clock.wall_ms()
        return await self._change(lambda c: nodes.register_store(c, store_group, node_id, address, now_ms))

    async def stores(self) -> list[StoreInfo]:
        return await self._read(nodes.stores)

    # -- who asks

    async def authenticate(self, key_id: str, secret: str) -> Principal:
        return await self._read(lambda c: keys.authenticate(c, key_id, secret))

    async def keys_exist(self) -> bool:
        return await self._read(keys.keys_exist)

    async def create_key(self, tenant: str, name: str, scopes: list[str]) -> NewKey:
        now_ms = self._clock.wall_ms()
        return await self._change(lambda c: keys.create_key(c, tenant, name, scopes, now_ms, self._random))

    async def keys(self, tenant: str) -> list[KeyInfo]:
        return await self._read(lambda c: keys.keys(c, tenant))

    async def revoke_key(self, tenant: str, key_id: str) -> None:
        now_ms = self._clock.wall_ms()
        await self._change(lambda c: keys.revoke_key(c, tenant, key_id, now_ms))

    # -- topics

    async def put_topic(self, tenant: str, name: str, settings: TopicSettings) -> tuple[TopicInfo, bool]:
        now_ms = self._clock.wall_ms()
        return await self._change(lambda c: catalog.put_topic(c, tenant, name, settings, now_ms))

    async def patch_topic(self, tenant: str, name: str, changes: dict[str, object]) -> TopicInfo:
        return await self._change(lambda c: catalog.patch_topic(c, tenant, name, changes))

    async def topic(self, tenant: str, name: str) -> TopicInfo:
        return await self._read(lambda c: catalog.topic(c, tenant, name))

    async def topic_by_id(self, topic_id: int) -> TopicInfo:
        return await self._read(lambda c: catalog.topic_by_id(c, topic_id))

    async def topic_settings(self, topic_ids: list[int]) -> dict[int, TopicSettings | None]:
        return await self._read(lambda c: catalog.topic_settings(c, topic_ids))

    async def topics(self, tenant: str, after: str, limit: int) -> list[TopicInfo]:
        if not 1 <= limit <= limits.PAGE_SIZE_MOST:
            raise BadRequest.field("limit", f"1 to {limits.PAGE_SIZE_MOST}", limit)
        return await self._read(lambda c: catalog.topics(c, tenant, after, limit))

    async def delete_topic(self, tenant: str, name: str) -> TopicInfo:
        now_ms = self._clock.wall_ms()
        return await self._change(lambda c: catalog.delete_topic(c, tenant, name, now_ms))

    # -- groups

    async def put_group(
        self, topic_id: int, name: str, start: Literal["earliest", "latest"], filter_tag: str | None, max_in_flight: int
    ) -> tuple[GroupInfo, bool]:
        now_ms = self._clock.wall_ms()
        return await self._change(
            lambda c: groups.put_group(c, topic_id, name, start, filter_tag, max_in_flight, now_ms)
        )

    async def patch_group(self, topic_id: int, name: str, changes: dict[str, object]) -> GroupInfo:
        return await self._change(lambda c: groups.patch_group(c, topic_id, name, changes))

    async def group(self, topic_id: int, name: str) -> GroupInfo:
        return await self._read(lambda c: groups.group(c, topic_id, name))

    async def groups(self, topic_id: int) -> list[GroupInfo]:
        return await self._read(lambda c: groups.groups(c, topic_id))

    async def living_groups(self, group_ids: list[int]) -> list[int]:
        return await self._read(lambda c: groups.living_groups(c, group_ids))

    async def delete_group(self, topic_id: int, name: str) -> GroupInfo:
        return await self._change(lambda c: groups.delete_group(c, topic_id, name))

    async def changes(self, since: int, wait_ms: int) -> Changes:
        if since > 0 and wait_ms > 0:
            await self._watch.wait(since, min(wait_ms, limits.WAIT_MS))
        return await self._read(lambda c: feed.changes(c, since))

    # -- tier manifest

    async def tier_start(self, store_group: str, epoch: int, obj: TierObject) -> None:
        now_ms = self._clock.wall_ms()
        await self._write(lambda c: manifest.tier_start(c, store_group, epoch, obj, now_ms))

    async def tier_commit(self, store_group: str, epoch: int, object_id: str) -> int:
        now_ms = self._clock.wall_ms()
        return await self._write(lambda c: manifest.tier_commit(c, store_group, epoch, object_id, now_ms))

    async def tier_abort(self, object_id: str) -> None:
        now_ms = self._clock.wall_ms()
        await self._write(lambda c: manifest.tier_abort(c, object_id, now_ms))

    async def tier_view(
        self, topic_id: int, queue_ids: list[int] | None = None, from_offset: int = 0, to_offset: int | None = None
    ) -> TierView:
        if queue_ids is not None and len(queue_ids) > limits.QUEUES_PER_TOPIC:
            raise BadRequest.field("queue_ids", f"at most {limits.QUEUES_PER_TOPIC}", len(queue_ids))
        return await self._read(lambda c: manifest.tier_view(c, topic_id, queue_ids, from_offset, to_offset))

    async def tiered_to(self, queue_ids: list[int]) -> dict[int, int]:
        return await self._read(lambda c: manifest.tiered_to(c, queue_ids))

    # -- replays

    async def put_replay(self, plan: ReplayPlan) -> tuple[ReplayInfo, bool]:
        return await self._write(lambda c: replays.put_replay(c, plan))

    async def replay(self, tenant: str, replay_id: str) -> ReplayInfo:
        return await self._read(lambda c: replays.replay(c, tenant, replay_id))

    async def replays(self, tenant: str) -> list[ReplayInfo]:
        return await self._read(lambda c: replays.replays(c, tenant))

    async def update_replay(
        self, tenant: str, replay_id: str, state: str, progress: dict[int, int], read: int, published: int, detail: str
    ) -> ReplayInfo:
        return await self._write(
            lambda c: replays.update_replay(c, tenant, replay_id, state, progress, read, published, detail)
        )


def _first_rows(connection: Connection, now_ms: int) -> None:
    catalog.make_tenant(connection, DEFAULT_TENANT, now_ms)
