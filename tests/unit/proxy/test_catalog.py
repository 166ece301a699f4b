from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millpond.core.errors import Conflict, Forbidden, NotFound, StartupError, Unauthenticated, Unavailable
from millpond.core.limits import CATALOG_STALE_SECONDS
from millpond.metadata.client import Changes, GroupInfo, Principal, QueueInfo, Span, TopicInfo, TopicSettings
from millpond.proxy.auth import check_listen, check_scope
from millpond.proxy.catalog import KEY_SECONDS, Catalog, parse_credential

BEARER = "Bearer mp_k1_secret"


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def wall_ms(self) -> int:
        return round(self.now * 1000)

    def boot_ns(self) -> int:
        return round(self.now * 1e9)

    def monotonic(self) -> float:
        return self.now


def topic(topic_id: int = 1, name: str = "orders", version: int = 1, tenant: str = "default") -> TopicInfo:
    queues = [QueueInfo(10 * topic_id, 0, [Span(0, "a")])]
    return TopicInfo(1, tenant, topic_id, name, name, TopicSettings(1), queues, 0, version)


def group(group_id: int = 5, filter_tag: str | None = None) -> GroupInfo:
    return GroupInfo(group_id, 1, "g", "latest", filter_tag, 1, 100, 0)


class FakeMetadata:
    """Answers from dicts, counts what is asked, and can be away. `feed` is what `changes` gives next."""

    def __init__(self) -> None:
        self.topics_by_name = {"orders": topic()}
        self.groups: dict[str, GroupInfo] = {}
        self.secrets = {("k1", "secret"): Principal(1, "default", "k1", ["produce"])}
        self.any_key = True
        self.away = False
        self.asked: list[str] = []
        self.feed: asyncio.Queue[Changes] = asyncio.Queue()

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.away:
            raise Unavailable("metadata_unavailable", "away")

    async def changes(self, since: int, wait_ms: int) -> Changes:
        return await self.feed.get()

    async def keys_exist(self) -> bool:
        return self.any_key

    async def topic(self, tenant: str, name: str) -> TopicInfo:
        self._ask(f"topic {name}")
        await asyncio.sleep(0)
        if tenant != "default" or name not in self.topics_by_name:
            raise NotFound("topic_not_found", name)
        return self.topics_by_name[name]

    async def topic_by_id(self, topic_id: int) -> TopicInfo:
        self._ask(f"topic {topic_id}")
        return topic(topic_id)

    async def group(self, topic_id: int, name: str) -> GroupInfo:
        self._ask(f"group {name}")
        if name not in self.groups:
            raise NotFound("group_not_found", name)
        return self.groups[name]

    async def put_group(self, topic_id: int, name: str, start: str, filter_tag: str | None, most: int) -> Any:
        self._ask(f"put_group {name}")
        await asyncio.sleep(0)
        self.groups[name] = group(filter_tag=filter_tag)
        return self.groups[name], True

    async def authenticate(self, key_id: str, secret: str) -> Principal:
        self._ask(f"authenticate {key_id}")
        if (key_id, secret) not in self.secrets:
            raise Unauthenticated("unauthenticated", "no")
        return self.secrets[key_id, secret]


class World:
    def __init__(self) -> None:
        self.metadata = FakeMetadata()
        self.clock = ManualClock()
        self.changed = asyncio.Event()
        self.catalog = Catalog(self.metadata, self.clock, self.changed.set)  # type: ignore[arg-type]  # a part of it

    async def feed(self, version: int, **parts: Any) -> None:
        """One turn of the feed, applied."""
        self.changed.clear()
        empty: dict[str, Any] = {
            "full": False, "topics": [], "groups": [], "deleted_topic_ids": [], "deleted_group_ids": []
        }  # fmt: skip
        self.metadata.feed.put_nowait(Changes(version, **{**empty, **parts}))
        await self.changed.wait()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.catalog.start()
    await made.feed(1, full=True)
    made.metadata.asked.clear()
    yield made
    await made.catalog.close()


async def test_a_topic_is_asked_for_once(world: World) -> None:
    """A miss asks metadata, once for all who wait at the same time, and never again while the feed is fresh."""
    found = await asyncio.gather(*(world.catalog.topic("default", "orders") for _ in range(5)))
    assert {each.topic_id for each in found} == {1}
    await world.catalog.topic("default", "orders")
    assert world.metadata.asked == ["topic orders"]


async def test_what_is_known_without_asking(world: World) -> None:
    """A topic with its own group, in its own tenant, while metadata was heard of lately; then nothing."""
    shipped, made = topic(2, "shipped"), group()
    await world.feed(2, topics=[topic(), shipped], groups=[made])
    assert world.catalog.known_group("default", "orders", "g") == (topic(), made)
    for names in (("default", "shipped", "g"), ("default", "orders", "h"), ("acme", "orders", "g")):
        assert world.catalog.known_group(*names) is None
    world.clock.now += CATALOG_STALE_SECONDS
    assert world.catalog.known_topic("default", "orders") is None
    assert world.catalog.known_group("default", "orders", "g") is None


async def test_an_unknown_topic_is_asked_for_each_time(world: World) -> None:
    """Nothing is remembered of what is not there: it may be made any moment."""
    for _ in range(2):
        with pytest.raises(NotFound):
            await world.catalog.topic("default", "new")
    world.metadata.topics_by_name["new"] = topic(2, "new")
    assert (await world.catalog.topic("default", "new")).topic_id == 2


async def test_tenants_do_not_see_each_others_topics(world: World) -> None:
    """The same name of another tenant is not found, cached or not."""
    await world.catalog.topic("default", "orders")
    with pytest.raises(NotFound):
        await world.catalog.topic("other", "orders")


async def test_the_feed_changes_and_deletes(world: World) -> None:
    """What the feed brings is seen without asking; what it deletes is asked for again."""
    await world.feed(2, topics=[topic(version=2)])
    assert (await world.catalog.topic("default", "orders")).version == 2
    assert world.metadata.asked == []
    await world.feed(3, deleted_topic_ids=[1])
    del world.metadata.topics_by_name["orders"]
    with pytest.raises(NotFound):
        await world.catalog.topic("default", "orders")


async def test_an_older_answer_does_not_undo_a_newer_one(world: World) -> None:
    """An answer that was under way while the feed moved is not taken for news."""
    await world.feed(7, topics=[topic(version=7)])
    world.catalog.put_topic(topic(version=6))
    assert (await world.catalog.topic("default", "orders")).version == 7


@pytest.mark.parametrize("by_feed", [False, True])
async def test_an_older_answer_does_not_bring_back_what_is_deleted(world: World, by_feed: bool) -> None:
    """A feed's answer may have been on its way while a topic or group was deleted, here or at another proxy."""
    old, made = topic(version=2), group()
    world.catalog.put_topic(old)
    if by_feed:
        await world.feed(3, deleted_topic_ids=[old.topic_id], deleted_group_ids=[made.group_id])
    else:
        world.catalog.drop_topic(old.topic_id)
        world.catalog.drop_group(made)
    await world.feed(2, topics=[old], groups=[made])
    assert world.catalog.known_topic("default", "orders") is None
    assert world.catalog.known_group("default", "orders", "g") is None


async def test_a_recreated_topic_replaces_the_old_one(world: World) -> None:
    """The name leads to the new topic id as soon as the feed says so."""
    await world.catalog.topic("default", "orders")
    await world.feed(4, topics=[topic(2, version=4)], deleted_topic_ids=[1])
    assert (await world.catalog.topic("default", "orders")).topic_id == 2


async def test_known_things_outlive_metadata_for_a_while(world: World) -> None:
    """While metadata is away what is known goes on, what is unknown is 503; after 15 minutes all of it is."""
    await world.catalog.topic("default", "orders")
    world.metadata.away = True
    world.clock.now += CATALOG_STALE_SECONDS - 1
    assert (await world.catalog.topic("default", "orders")).topic_id == 1
    with pytest.raises(Unavailable):
        await world.catalog.topic("default", "other")
    world.clock.now += 2
    with pytest.raises(Unavailable):
        await world.catalog.topic("default", "orders")


async def test_a_group_is_made_when_asked_to(world: World) -> None:
    """Looking raises group_not_found; creating says so once and only once."""
    orders = await world.catalog.topic("default", "orders")
    with pytest.raises(NotFound):
        await world.catalog.group(orders, "g")
    assert (await world.catalog.group(orders, "g", "earliest"))[1] is True
    assert (await world.catalog.group(orders, "g", "earliest"))[1] is False


async def test_a_group_that_many_want_at_once_is_made_once(world: World) -> None:
    """A thousand first receives are one question and one creation; one of them has made it."""
    orders = await world.catalog.topic("default", "orders")
    made = await asyncio.gather(*(world.catalog.group(orders, "g", "earliest") for _ in range(1_000)))
    assert [created for _, created in made].count(True) == 1
    assert world.metadata.asked.count("group g") == world.metadata.asked.count("put_group g") == 1


async def test_groups_wanted_with_other_filters_are_made_each(world: World) -> None:
    """Only equal creations share an answer: each other one is for metadata to judge."""
    orders = await world.catalog.topic("default", "orders")
    filters = ["a", "a", "b", None]
    await asyncio.gather(*(world.catalog.group(orders, "g", "latest", tag) for tag in filters))
    assert world.metadata.asked.count("put_group g") == 3


async def test_another_filter_is_a_conflict(world: World) -> None:
    """A group that is there keeps its filter; asking for another one is refused, for none is fine."""
    orders = await world.catalog.topic("default", "orders")
    await world.catalog.group(orders, "g", "latest", "a")
    with pytest.raises(Conflict):
        await world.catalog.group(orders, "g", "latest", "b")
    assert (await world.catalog.group(orders, "g", "latest", None))[0].filter_tag == "a"


async def test_a_key_is_asked_again_after_a_while_and_when_the_feed_moves(world: World) -> None:
    """Between that it is known without waiting; a revoked one ends with the feed's next move."""
    assert world.catalog.known_principal(BEARER) is None
    who = await world.catalog.principal(BEARER)
    assert world.catalog.known_principal(BEARER) == who
    world.clock.now += KEY_SECONDS + 1
    assert world.catalog.known_principal(BEARER) is None
    await world.catalog.principal(BEARER)
    world.metadata.secrets.clear()
    await world.feed(9)
    assert world.catalog.known_principal(BEARER) is None
    with pytest.raises(Unauthenticated):
        await world.catalog.principal(BEARER)


async def test_an_unknown_key_is_503_while_metadata_is_away(world: World) -> None:
    """Never 401: the key may be good. A known one goes on for 15 minutes."""
    await world.catalog.principal(BEARER)
    world.metadata.away = True
    world.clock.now += CATALOG_STALE_SECONDS - 1
    assert (await world.catalog.principal(BEARER)).key_id == "k1"
    with pytest.raises(Unavailable):
        await world.catalog.principal("Bearer mp_k2_secret")
    world.clock.now += 2
    with pytest.raises(Unavailable):
        await world.catalog.principal(BEARER)


async def test_open_mode_ends_with_the_first_key(world: World) -> None:
    """Without any key whoever comes is the default tenant; once one was made nobody is without it."""
    world.metadata.any_key = False
    who = await world.catalog.principal(None)
    assert (who.tenant, sorted(who.scopes)) == ("default", ["admin", "consume", "produce"])
    world.metadata.any_key = True
    world.catalog.forget_keys()
    assert world.catalog.known_principal(None) is None
    with pytest.raises(Unauthenticated):
        await world.catalog.principal(None)


@pytest.mark.parametrize("text", ["", "Bearer", "Bearer x", "Basic mp_a_b", "Bearer mp_a", "Bearer mp__b", "mp_a_b"])
def test_what_is_no_credential_is_refused_unseen(text: str) -> None:
    """The problem never repeats what was sent."""
    with pytest.raises(Unauthenticated) as caught:
        parse_credential(text)
    assert "mp_a" not in caught.value.detail


def test_a_secret_may_hold_underscores() -> None:
    """Only the first two separate."""
    assert parse_credential("bearer mp_k1_a_b_c") == ("k1", "a_b_c")


def test_scopes_are_apart() -> None:
    """`any` takes every key; a named scope must be there."""
    who = Principal(1, "t", "k", ["produce"])
    check_scope(who, "any")
    check_scope(who, "produce")
    with pytest.raises(Forbidden):
        check_scope(who, "admin")


def test_open_mode_is_for_this_machine_only() -> None:
    """Without a key a listener elsewhere is refused at start, with the remedy; with one it is fine."""
    check_listen("127.0.0.1:8080", keys_exist=False)
    check_listen("0.0.0.0:8080", keys_exist=True)
    with pytest.raises(StartupError, match="make a key first"):
        check_listen("0.0.0.0:8080", keys_exist=False)
