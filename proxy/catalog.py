"""What a proxy knows of tenants' topics, groups and keys: a cache over `MetadataClient`, kept fresh by its feed.

    topics, groups   from `metadata.changes` (one long poll task); a miss asks metadata, once for all who wait
    keys             asked on first use, again when the feed moved and after KEY_SECONDS, so revocation is prompt
    open mode        "no key was ever made" is asked again every few seconds until the first key closes it for good

While metadata is away everything known stays in force for CATALOG_STALE_SECONDS; what is unknown is 503
`metadata_unavailable`, never 401 or 404. Nothing here is truth.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, TypeVar

from millpond.core import limits
from millpond.core.clock import Clock
from millpond.core.errors import Conflict, MillpondError, NotFound, Unauthenticated, Unavailable
from millpond.core.tasks import OnDeath, Tasks
from millpond.metadata.client import (
    DEFAULT_TENANT,
    Changes,
    GroupInfo,
    MetadataClient,
    Principal,
    TopicInfo,
)

KEY_SECONDS = 60.0  # a known key is asked for again after so long
FEED_WAIT_MS = 10_000  # one turn of the feed; also how stale we may be without noticing that metadata is away
FEED_PAUSE_SECONDS = 0.5  # between turns while metadata is away
OPEN_SECONDS = 2.0  # how often an open deployment looks whether a key was made
KEYS = 100_000  # credentials remembered; the oldest go first
ENTRIES = 1_000_000  # topics and groups remembered (each some 1 KiB); the oldest go first
DROPPED = 100_000  # deleted ones remembered: an answer that was on its way meanwhile must not bring them back

T = TypeVar("T")
_log = logging.getLogger("millpond.catalog")
DEFAULT_TENANT_ID = 1  # metadata makes this tenant with its database, before any other
OPEN_PRINCIPAL = Principal(DEFAULT_TENANT_ID, DEFAULT_TENANT, "", ["produce", "consume", "admin"])


class _Known(NamedTuple):
    """`version` of the feed when it was asked: keys raise the version, so a revocation is noticed at once."""

    principal: Principal
    asked_at: float
    version: int


class Catalog:
    """`on_change` is called after each turn of the feed that brought something (a store may have moved, too)."""

    def __init__(
        self,
        metadata: MetadataClient,
        clock: Clock,
        on_change: Callable[[], None] | None = None,
        on_death: OnDeath | None = None,
    ) -> None:
        self._on_change = on_change
        self._metadata = metadata
        self._clock = clock
        self._topics: dict[int, TopicInfo] = {}
        self._names: dict[tuple[str, str], int] = {}
        self._groups: dict[tuple[int, str], GroupInfo] = {}
        self._dropped_topics: dict[int, None] = {}  # ids are never used again
        self._dropped_groups: dict[int, None] = {}
        self._keys: dict[bytes, _Known] = {}
        self._asking: dict[Any, asyncio.Task[Any]] = {}
        self._version = 0
        self._fresh_at = -float("inf")
        self._open = False
        self._first = asyncio.Event()
        self._tasks = Tasks(on_death)

    # -- life
    async def start(self) -> None:
        """Begin to follow the feed. Does not wait for metadata: a proxy may start before it."""
        self._tasks.spawn(self._follow(), "catalog feed")
        self._tasks.spawn(self._watch_open(), "catalog open mode")

    async def heard(self, seconds: float) -> bool:
        """Wait, so long at most, until metadata has been heard of once; whether it has."""
        try:
            async with asyncio.timeout(seconds):
                await self._first.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        await self._tasks.close()

    @property
    def fresh(self) -> bool:
        """Whether metadata was heard of recently enough for the cache to be used."""
        return self._clock.monotonic() - self._fresh_at < limits.CATALOG_STALE_SECONDS

    @property
    def is_open(self) -> bool:
        """No key was ever made (as last heard)."""
        return self._open

    # -- topics
    def known_topic(self, tenant: str, name: str) -> TopicInfo | None:
        """The topic when it is known and fresh: most calls need not wait for anything."""
        topic_id = self._names.get((tenant, name))
        return self._topics[topic_id] if topic_id is not None and self.fresh else None

    async def topic(self, tenant: str, name: str) -> TopicInfo:
        """Raises NotFound(topic_not_found), Unavailable."""
        topic_id = self._names.get((tenant, name))
        if topic_id is not None and self.fresh:
            return self._topics[topic_id]
        found = await self._once(("topic", tenant, name), lambda: self._metadata.topic(tenant, name))
        self.put_topic(found)
        return found

    async def topic_by_id(self, topic_id: int) -> TopicInfo:
        """Raises NotFound(topic_not_found), Unavailable."""
        known = self._topics.get(topic_id)
        if known is not None and self.fresh:
            return known
        found = await self._once(("topic", topic_id), lambda: self._metadata.topic_by_id(topic_id))
        self.put_topic(found)
        return found

    def put_topic(self, topic: TopicInfo) -> None:
        """Remember an answer of metadata; an older one than is known changes nothing, nor one of a deleted topic."""
        known = self._topics.get(topic.topic_id)
        if topic.topic_id in self._dropped_topics or (known is not None and known.version > topic.version):
            return
        _bounded(self._topics, topic.topic_id, topic)
        _bounded(self._names, (topic.tenant, topic.name), topic.topic_id)

    def drop_topic(self, topic_id: int) -> None:
        """It is deleted."""
        _bounded(self._dropped_topics, topic_id, None, DROPPED)
        topic = self._topics.pop(topic_id, None)
        if topic is not None and self._names.get((topic.tenant, topic.name)) == topic_id:
            del self._names[topic.tenant, topic.name]
        for key in [key for key in self._groups if key[0] == topic_id]:
            del self._groups[key]

    # -- groups
    def known_group(self, tenant: str, topic: str, name: str) -> tuple[TopicInfo, GroupInfo] | None:
        """A topic and its group when both are known and fresh."""
        found = self.known_topic(tenant, topic)
        group = None if found is None else self._groups.get((found.topic_id, name))
        return None if found is None or group is None else (found, group)

    async def group(
        self,
        topic: TopicInfo,
        name: str,
        create: Literal["earliest", "latest"] | None = None,
        filter_tag: str | None = None,
    ) -> tuple[GroupInfo, bool]:
        """The group, and whether this call created it (`create` says where it starts; None: only look).

        `filter_tag` is the filter of a group that is created; a group that is there with another one is
        Conflict(filter_differs). Raises NotFound(group_not_found), Unavailable.
        """
        known = self._groups.get((topic.topic_id, name))
        if known is None or not self.fresh:
            known = await self._find_group(topic, name, required=create is None)
        if known is not None:
            if create is not None and filter_tag is not None and filter_tag != known.filter_tag:
                raise Conflict("filter_differs", f"group {name!r} has the filter {known.filter_tag!r}")
            return known, False
        assert create is not None, "a group that is only looked for is found or raises"
        key = ("make group", topic.topic_id, name, create, filter_tag)
        first = key not in self._asking  # thousands of consumers may come at once: one of them makes it
        made, created = await self._once(
            key, lambda: self._metadata.put_group(topic.topic_id, name, create, filter_tag, limits.UNSETTLED_ROWS)
        )
        self.put_group(made)
        return made, created and first

    async def _find_group(self, topic: TopicInfo, name: str, *, required: bool) -> GroupInfo | None:
        try:
            key = ("group", topic.topic_id, name)
            found = await self._once(key, lambda: self._metadata.group(topic.topic_id, name))
        except NotFound:
            if required:
                raise
            return None
        self.put_group(found)
        return found

    def put_group(self, group: GroupInfo) -> None:
        """Remember an answer of metadata; an older one than is known changes nothing, nor one of a deleted group."""
        if group.group_id in self._dropped_groups:
            return
        known = self._groups.get((group.topic_id, group.name))
        if known is None or known.group_id != group.group_id or known.filter_version <= group.filter_version:
            _bounded(self._groups, (group.topic_id, group.name), group)

    def drop_group(self, group: GroupInfo) -> None:
        """It is deleted."""
        _bounded(self._dropped_groups, group.group_id, None, DROPPED)
        known = self._groups.get((group.topic_id, group.name))
        if known is not None and known.group_id == group.group_id:
            del self._groups[group.topic_id, group.name]

    # -- keys
    def known_principal(self, authorization: str | None) -> Principal | None:
        """The principal of a credential seen lately; None when `principal` has to be asked."""
        if authorization is None:
            return OPEN_PRINCIPAL if self._open else None
        known = self._keys.get(_digest(authorization))
        if known is None or known.version != self._version or self._clock.monotonic() - known.asked_at > KEY_SECONDS:
            return None
        return known.principal

    async def principal(self, authorization: str | None) -> Principal:
        """Who `Authorization: Bearer mp_<key id>_<secret>` stands for.

        Raises Unauthenticated, and Unavailable for an unknown key while metadata is away.
        """
        if authorization is None:
            if not self._open and not await self._ask_open():
                raise Unauthenticated("unauthenticated", "this call needs Authorization: Bearer mp_<key id>_<secret>")
            return OPEN_PRINCIPAL
        digest = _digest(authorization)
        key_id, secret = parse_credential(authorization)
        version = self._version
        try:
            found = await self._once(digest, lambda: self._metadata.authenticate(key_id, secret))
        except Unauthenticated:
            self._keys.pop(digest, None)
            raise
        except Unavailable:
            known = self._keys.get(digest)
            if known is None or self._clock.monotonic() - known.asked_at > limits.CATALOG_STALE_SECONDS:
                raise
            return known.principal
        _bounded(self._keys, digest, _Known(found, self._clock.monotonic(), version), KEYS)
        return found

    def forget_keys(self) -> None:
        """A key was revoked or made through this proxy: ask again for each."""
        self._keys.clear()
        self._open = False

    # -- freshness
    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout((FEED_WAIT_MS + limits.CALL_MS) / 1_000):
                    changes = await self._metadata.changes(self._version, FEED_WAIT_MS)
            except (MillpondError, TimeoutError) as error:
                _log.warning("the catalog feed is interrupted: %s", error)
                await asyncio.sleep(FEED_PAUSE_SECONDS)
                continue
            self._apply(changes)

    def _apply(self, changes: Changes) -> None:
        if changes.full:
            self._topics.clear()
            self._names.clear()
            self._groups.clear()
        for topic_id in changes.deleted_topic_ids:
            self.drop_topic(topic_id)
        if changes.deleted_group_ids:
            deleted = set(changes.deleted_group_ids)
            for group_id in deleted:
                _bounded(self._dropped_groups, group_id, None, DROPPED)
            self._groups = {key: group for key, group in self._groups.items() if group.group_id not in deleted}
        for topic in changes.topics:
            self.put_topic(topic)
        for group in changes.groups:
            self.put_group(group)
        moved = changes.version != self._version
        self._version = changes.version
        self._fresh_at = self._clock.monotonic()
        self._first.set()
        if moved and self._on_change is not None:
            self._on_change()

    async def _watch_open(self) -> None:
        while True:
            try:
                if not await self._ask_open():
                    return
            except (MillpondError, TimeoutError) as error:
                _log.warning("cannot ask whether keys exist: %s", error)
            await asyncio.sleep(OPEN_SECONDS)

    async def _ask_open(self) -> bool:
        async with asyncio.timeout(limits.CALL_MS / 1_000):
            self._open = not await self._once("open", self._metadata.keys_exist)
        return self._open

    async def _once(self, key: Any, ask: Callable[[], Awaitable[T]]) -> T:
        """One question at a time for each key: whoever comes meanwhile waits for the same answer."""
        task: asyncio.Task[T] | None = self._asking.get(key)
        if task is None:
            task = asyncio.ensure_future(_within_deadline(ask()))
            self._asking[key] = task
            task.add_done_callback(lambda done: self._answered(key, done))
        return await asyncio.shield(task)

    def _answered(self, key: Any, task: asyncio.Task[Any]) -> None:
        self._asking.pop(key, None)
        if not task.cancelled():
            task.exception()  # retrieved: those who waited may all have gone


async def _within_deadline(question: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(limits.CALL_MS / 1_000):
            return await question
    except TimeoutError as error:
        raise Unavailable("metadata_unavailable", "metadata did not answer in time") from error


def _bounded(cache: dict[Any, Any], key: Any, value: Any, most: int = ENTRIES) -> None:
    cache[key] = value
    if len(cache) > most:
        del cache[next(iter(cache))]


def _digest(authorization: str) -> bytes:
    """Credentials are remembered as digests: no secret stays in memory, and looking one up tells nothing of others."""
    return hashlib.sha256(authorization.encode("utf-8", "surrogateescape")).digest()


def parse_credential(authorization: str) -> tuple[str, str]:
    """(key id, secret) of `Bearer mp_<key id>_<secret>`. Raises Unauthenticated without showing what came."""
    scheme, _, credential = authorization.partition(" ")
    parts = credential.strip().split("_", 2)
    if scheme.lower() != "bearer" or len(parts) != 3 or parts[0] != "mp" or not parts[1] or not parts[2]:
        raise Unauthenticated("unauthenticated", "Authorization: expected Bearer mp_<key id>_<secret>")
    return parts[1], parts[2]
