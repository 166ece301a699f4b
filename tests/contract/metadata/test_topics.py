"""Topics and groups."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import create_engine, literal, select
from sqlalchemy.exc import IntegrityError
from support.metadata import SETTINGS, Pond, made, refuses

from millpond.core import limits
from millpond.core.errors import BadRequest, Conflict, NotFound
from millpond.metadata.client import (
    MetadataClient,
    Span,
    TopicSettings,
)
from millpond.metadata.tables import IN_LIST, TOPICS

# -- topics -----------------------------------------------------------------------------------------------


async def test_put_topic_creates(metadata: MetadataClient) -> None:
    """A new topic has its settings, its queues in order, one span each, and is found by name and by id."""
    info = await made(metadata)
    assert (info.tenant, info.name, info.tier_name, info.settings) == ("default", "orders", "orders", SETTINGS)
    assert [queue.queue for queue in info.queues] == [0, 1, 2]
    assert [queue.spans for queue in info.queues] == [[Span(0, "a")]] * 3
    assert await metadata.topic("default", "orders") == info
    assert await metadata.topic_by_id(info.topic_id) == info


async def test_settings_of_many_topics(metadata: MetadataClient) -> None:
    """One call answers for more topics than one statement takes; deleted ones are told from those that never were."""
    settings = [TopicSettings(queues=1, retention_ms=1000 + number) for number in range(3)]
    ids = [(await metadata.put_topic("default", f"t{i}", each))[0].topic_id for i, each in enumerate(settings)]
    await metadata.delete_topic("default", "t1")
    unknown = list(range(10**6, 10**6 + 2 * IN_LIST))
    found = await metadata.topic_settings([ids[0], *unknown, *ids[1:]])
    assert found == {ids[0]: settings[0], ids[1]: None, ids[2]: settings[2]}
    assert await metadata.topic_settings([]) == {}


async def test_put_topic_again(metadata: MetadataClient) -> None:
    """Equal settings answer the topic there is; others are topic_differs."""
    info = await made(metadata)
    assert await metadata.put_topic("default", "orders", SETTINGS) == (info, False)
    with refuses(Conflict, "topic_differs"):
        await metadata.put_topic("default", "orders", TopicSettings(queues=4))


@pytest.mark.parametrize("name", ["", "a..b", "a/b", "a\0b", ".a", "x" * 128, "a~2", "ü"])
async def test_bad_names(metadata: MetadataClient, name: str) -> None:
    """A bad name is refused for topics and groups, written or read."""
    with refuses(BadRequest, "invalid_name"):
        await metadata.put_topic("default", name, SETTINGS)
    with refuses(BadRequest, "invalid_name"):
        await metadata.topic("default", name)
    with refuses(BadRequest, "invalid_name"):
        await metadata.group(1, name)


@pytest.mark.parametrize(
    "changes",
    [
        {"queues": 0},
        {"queues": limits.QUEUES_PER_TOPIC + 1},
        {"max_message_bytes": limits.MESSAGE_BYTES + 1},
        {"max_message_bytes": 0},
        {"retention_ms": 0},
        {"retention_bytes": -1},
        {"dedup_window_ms": -1},
        {"dedup_window_ms": 2**62},
    ],
)
async def test_settings_have_bounds(metadata: MetadataClient, changes: dict[str, int]) -> None:
    """A setting out of its bounds is refused, in a new topic and in a patch, and nothing is half done."""
    with refuses(BadRequest, "invalid_request"):
        await metadata.put_topic("default", "orders", msgspec.structs.replace(SETTINGS, **changes))
    with refuses(NotFound, "topic_not_found"):
        await metadata.topic("default", "orders")
    info = await made(metadata)
    with refuses(BadRequest, "invalid_request"):
        await metadata.patch_topic("default", "orders", dict(changes))
    assert await metadata.topic("default", "orders") == info


async def test_patch_topic(metadata: MetadataClient) -> None:
    """A patch changes what it names; queues grow with fresh ids and never shrink."""
    info = await made(metadata)
    patched = await metadata.patch_topic("default", "orders", {"queues": 5, "retention_ms": 1_000})
    assert patched.settings == TopicSettings(queues=5, retention_ms=1_000)
    assert patched.queues[:3] == info.queues
    assert [queue.queue for queue in patched.queues] == [0, 1, 2, 3, 4]
    assert patched.version > info.version
    with refuses(BadRequest, "invalid_request"):
        await metadata.patch_topic("default", "orders", {"queues": 4})
    assert (await metadata.patch_topic("default", "orders", {"retention_ms": None})).settings == TopicSettings(queues=5)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"colour": "red"}, "unknown_field"),
        ({"queues": "four"}, "invalid_request"),
        ({"durability": "no"}, "invalid_request"),
    ],
)
async def test_patch_topic_is_strict(metadata: MetadataClient, changes: dict[str, object], code: str) -> None:
    """Unknown fields and wrong types are refused."""
    await made(metadata)
    with refuses(BadRequest, code):
        await metadata.patch_topic("default", "orders", changes)


async def test_topics_in_pages(metadata: MetadataClient) -> None:
    """Topics come by name in code point order, page by page."""
    names = ["b", "B", "a-1", "a.1", "a_1", "a1", "Z", "0"]
    for name in names:
        await made(metadata, name)
    found: list[str] = []
    while page := await metadata.topics("default", found[-1] if found else "", 3):
        found += [info.name for info in page]
    assert found == sorted(names)


async def test_deleted_topic_is_gone(metadata: MetadataClient) -> None:
    """A deleted topic and its groups are found no more; deleting twice is topic_not_found."""
    info = await made(metadata)
    await metadata.put_group(info.topic_id, "g", "earliest", None, 10)
    assert (await metadata.delete_topic("default", "orders")).topic_id == info.topic_id
    for call in (
        metadata.topic("default", "orders"),
        metadata.topic_by_id(info.topic_id),
        metadata.delete_topic("default", "orders"),
        metadata.groups(info.topic_id),
        metadata.put_group(info.topic_id, "g", "earliest", None, 10),
        metadata.tier_view(info.topic_id),
    ):
        with refuses(NotFound, "topic_not_found"):
            await call
    assert await metadata.topics("default", "", 10) == []


async def test_recreated_topic_shares_nothing(metadata: MetadataClient) -> None:
    """A topic made again has new topic and queue ids and its own tier name, each time another."""
    seen: set[int] = set()
    queues: set[int] = set()
    tier_names = []
    for _ in range(3):
        info = await made(metadata)
        assert info.topic_id not in seen
        assert queues.isdisjoint(queue.queue_id for queue in info.queues)
        seen.add(info.topic_id)
        queues |= {queue.queue_id for queue in info.queues}
        tier_names.append(info.tier_name)
        await metadata.delete_topic("default", "orders")
    assert tier_names == ["orders", "orders~2", "orders~3"]


async def test_placement_takes_turns(metadata: MetadataClient) -> None:
    """Queues of a new topic are spread over the registered store groups, also those a patch adds."""
    for store_group in ("a", "b", "c"):
        await metadata.register_store(store_group, f"node-{store_group}", "")
    info = await made(metadata, settings=TopicSettings(queues=4))
    info = await metadata.patch_topic("default", "orders", {"queues": 6})
    placed = [queue.spans[0].store_group for queue in info.queues]
    assert sorted(placed) == ["a", "a", "b", "b", "c", "c"]
    assert placed[:3] == placed[3:]


async def test_foreign_tenant_sees_nothing(metadata: MetadataClient) -> None:
    """The same topic name of two tenants is two topics."""
    await metadata.create_key("other", "k", ["admin"])
    mine = await made(metadata)
    with refuses(NotFound, "topic_not_found"):
        await metadata.topic("other", "orders")
    theirs, created = await metadata.put_topic("other", "orders", TopicSettings(queues=1))
    assert created
    assert theirs.topic_id != mine.topic_id
    assert [info.tenant for info in await metadata.topics("other", "", 10)] == ["other"]
    with refuses(BadRequest, "invalid_request"):
        await metadata.put_topic("nobody", "orders", SETTINGS)


# -- groups -----------------------------------------------------------------------------------------------


async def test_groups(metadata: MetadataClient) -> None:
    """A group is made once, found again, and refused with another filter."""
    topic = await made(metadata)
    info, created = await metadata.put_group(topic.topic_id, "mail", "earliest", "a || b", 100)
    assert created
    assert (info.topic_id, info.name, info.start, info.filter_tag, info.max_in_flight) == (
        topic.topic_id, "mail", "earliest", "a || b", 100,
    )  # fmt: skip
    assert await metadata.put_group(topic.topic_id, "mail", "latest", "a || b", 5) == (info, False)
    with refuses(Conflict, "filter_differs"):
        await metadata.put_group(topic.topic_id, "mail", "earliest", None, 100)
    assert await metadata.group(topic.topic_id, "mail") == info
    assert await metadata.groups(topic.topic_id) == [info]


async def test_patch_group(metadata: MetadataClient) -> None:
    """Only a changed filter raises filter_version; unknown fields, types and bounds are checked."""
    topic = await made(metadata)
    info, _ = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    more = await metadata.patch_group(topic.topic_id, "mail", {"max_in_flight": 200})
    assert (more.max_in_flight, more.filter_version) == (200, info.filter_version)
    tagged = await metadata.patch_group(topic.topic_id, "mail", {"filter_tag": "x"})
    assert (tagged.filter_tag, tagged.filter_version) == ("x", info.filter_version + 1)
    assert await metadata.patch_group(topic.topic_id, "mail", {"filter_tag": "x"}) == tagged
    assert (await metadata.patch_group(topic.topic_id, "mail", {"filter_tag": None})).filter_tag is None
    with refuses(BadRequest, "unknown_field"):
        await metadata.patch_group(topic.topic_id, "mail", {"start": "earliest"})
    for changes in ({"max_in_flight": 0}, {"max_in_flight": "many"}, {"filter_tag": ""}, {"filter_tag": "\0"}):
        with refuses(BadRequest, "invalid_request"):
            await metadata.patch_group(topic.topic_id, "mail", dict(changes))


async def test_group_ids_are_not_reused(metadata: MetadataClient) -> None:
    """A group made again after deletion is another group."""
    topic = await made(metadata)
    first, _ = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    assert await metadata.delete_group(topic.topic_id, "mail") == first
    with refuses(NotFound, "group_not_found"):
        await metadata.delete_group(topic.topic_id, "mail")
    second, created = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    assert created
    assert second.group_id > first.group_id


async def test_groups_that_are_there(metadata: MetadataClient) -> None:
    """One call answers for more groups than one statement takes; neither deleted ones nor those of deleted topics."""
    orders, other = [(await metadata.put_topic("default", name, SETTINGS))[0].topic_id for name in ("orders", "other")]
    made = [(orders, "a"), (orders, "b"), (other, "c"), (orders, "d")]
    ids = [(await metadata.put_group(topic_id, name, "latest", None, 100))[0].group_id for topic_id, name in made]
    await metadata.delete_group(orders, "b")
    await metadata.delete_topic("default", "other")
    unknown = list(range(10**6, 10**6 + 2 * IN_LIST))
    assert sorted(await metadata.living_groups([*ids[:2], *unknown, *ids[2:]])) == [ids[0], ids[3]]
    assert await metadata.living_groups([]) == []


async def test_the_database_refuses_a_second_living_topic_of_a_name(pond: Pond) -> None:
    """Whoever writes it; one that is deleted does not stand in the way."""
    await pond.metadata.put_topic("default", "orders", SETTINGS)
    await pond.metadata.delete_topic("default", "orders")
    await pond.metadata.put_topic("default", "orders", SETTINGS)
    engine = create_engine(pond.url.replace("postgresql:", "postgresql+psycopg:"))
    columns = [column for column in TOPICS.c if column.name != "topic_id"]
    living = select(*(literal(9) if column is TOPICS.c.generation else column for column in columns))
    again = TOPICS.insert().from_select(columns, living.where(TOPICS.c.deleted_ms.is_(None)))
    try:
        with engine.connect() as connection, pytest.raises(IntegrityError):
            connection.execute(again)
    finally:
        engine.dispose()
