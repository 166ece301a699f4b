"""The tier's manifest, and replays."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from support.metadata import an_object, made, refuses, sealed

from millpond.core.errors import BadRequest, Conflict, NotFound
from millpond.metadata.client import MetadataClient, ReplayPlan, TopicInfo

# -- tier manifest ----------------------------------------------------------------------------------------


@pytest.fixture
async def topic(metadata: MetadataClient) -> TopicInfo:
    await metadata.register_store("a", "n1", "")
    return await made(metadata)


async def test_commit_moves_tiered_to(metadata: MetadataClient, topic: TopicInfo) -> None:
    """A committed object is in the view, its queues are tiered to its ends, and the version is one more."""
    obj = an_object(topic, "o1", (0, 0, 10), (2, 0, 5))
    await metadata.tier_start("a", 1, obj)
    assert (await metadata.tier_view(topic.topic_id)).objects == []
    assert await metadata.tier_commit("a", 1, "o1") == 1
    view = await metadata.tier_view(topic.topic_id)
    ids = [queue.queue_id for queue in topic.queues]
    assert (view.version, view.objects) == (1, [obj])
    assert view.tiered_to == {ids[0]: 10, ids[1]: 0, ids[2]: 5}
    assert await metadata.tiered_to([*ids, 10**6]) == view.tiered_to
    assert await sealed(metadata, an_object(topic, "o2", (0, 10, 20))) == 2


async def test_start_and_commit_are_idempotent(metadata: MetadataClient, topic: TopicInfo) -> None:
    """Repeating a start or a commit, also after a later commit, answers the same and changes nothing."""
    obj = an_object(topic, "o1", (1, 0, 10), (0, 0, 3))
    await metadata.tier_start("a", 1, obj)
    await metadata.tier_start("a", 1, obj)
    assert await metadata.tier_commit("a", 1, "o1") == 1
    await sealed(metadata, an_object(topic, "o2", (0, 3, 4)))
    assert await metadata.tier_commit("a", 1, "o1") == 1
    await metadata.tier_start("a", 1, obj)
    assert (await metadata.tier_view(topic.topic_id)).version == 2


@pytest.mark.parametrize("ranges", [[(0, 5, 15)], [(0, 11, 20)], [(1, 0, 4), (0, 0, 10)], [(1, 0, 4), (0, 12, 13)]])
async def test_commit_is_all_or_nothing(
    metadata: MetadataClient, topic: TopicInfo, ranges: list[tuple[int, int, int]]
) -> None:
    """A gap or an overlap in any queue aborts the commit for every queue."""
    await sealed(metadata, an_object(topic, "o1", (0, 0, 10)))
    before = await metadata.tier_view(topic.topic_id)
    await metadata.tier_start("a", 1, an_object(topic, "o2", *ranges))
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_commit("a", 1, "o2")
    assert await metadata.tier_view(topic.topic_id) == before


async def test_only_one_of_two_rivals_commits(metadata: MetadataClient, topic: TopicInfo) -> None:
    """Of objects with the same range committed at once exactly one wins."""
    for number in range(6):
        await metadata.tier_start("a", 1, an_object(topic, f"o{number}", (0, 0, 10)))
    answers = await asyncio.gather(
        *(metadata.tier_commit("a", 1, f"o{number}") for number in range(6)), return_exceptions=True
    )
    lost = [answer for answer in answers if isinstance(answer, Conflict) and answer.code == "manifest_conflict"]
    assert (answers.count(1), len(lost)) == (1, 5)
    assert len((await metadata.tier_view(topic.topic_id)).objects) == 1


async def test_superseded_epoch_cannot_write(metadata: MetadataClient, topic: TopicInfo) -> None:
    """After a restart of the store the earlier epoch can neither start nor commit, nor be committed by the new one."""
    await metadata.tier_start("a", 1, an_object(topic, "o1", (0, 0, 10)))
    await metadata.register_store("a", "n1", "")
    with refuses(Conflict, "epoch_superseded"):
        await metadata.tier_commit("a", 1, "o1")
    with refuses(Conflict, "epoch_superseded"):
        await metadata.tier_start("a", 1, an_object(topic, "o2", (0, 0, 10)))
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_commit("a", 2, "o1")
    assert await sealed(metadata, an_object(topic, "o3", (0, 0, 10)), epoch=2) == 1


async def test_aborted_object_stays_out(metadata: MetadataClient, topic: TopicInfo) -> None:
    """An aborted object cannot be committed or started again; a committed one cannot be aborted."""
    obj = an_object(topic, "o1", (0, 0, 10))
    await metadata.tier_start("a", 1, obj)
    await metadata.tier_abort("o1")
    await metadata.tier_abort("o1")
    await metadata.tier_abort("never seen")
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_commit("a", 1, "o1")
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_start("a", 1, obj)
    await sealed(metadata, an_object(topic, "o2", (0, 0, 10)))
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_abort("o2")


async def test_start_is_strict(metadata: MetadataClient, topic: TopicInfo) -> None:
    """Objects with foreign queues, of unknown stores or topics, or with impossible ranges are refused."""
    good = an_object(topic, "o1", (0, 0, 10))
    replace = msgspec.structs.replace
    other = await made(metadata, "other")
    foreign = replace(an_object(other, "o1", (0, 0, 10)), topic_id=topic.topic_id)
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_start("a", 1, foreign)
    with refuses(Conflict, "epoch_superseded"):
        await metadata.tier_start("z", 1, good)
    with refuses(NotFound, "topic_not_found"):
        await metadata.tier_start("a", 1, replace(good, topic_id=10**6))
    for bad in (
        replace(good, ranges=[]),
        replace(good, ranges=good.ranges * 2),
        replace(good, footer_bytes=1_001),
        replace(good, path=""),
        an_object(topic, "o1", (0, 10, 10)),
        an_object(topic, "o1", (0, -1, 3)),
    ):
        with refuses(BadRequest, "invalid_request"):
            await metadata.tier_start("a", 1, bad)
    await metadata.tier_start("a", 1, good)
    for rival in (replace(good, bytes=2_000), replace(good, object_id="o9")):
        with refuses(Conflict, "manifest_conflict"):
            await metadata.tier_start("a", 1, rival)


async def test_store_starts_objects_of_its_own_queues_only(metadata: MetadataClient) -> None:
    """Of a topic whose queues are spread over two store groups each group starts objects of its own."""
    epochs = {group: (await metadata.register_store(group, f"n-{group}", "")).epoch for group in ("a", "b")}
    topic = await made(metadata)
    holders = [queue.spans[0].store_group for queue in topic.queues]
    assert set(holders) == {"a", "b"}
    for number, holder in enumerate(holders):
        for group, epoch in epochs.items():
            starting = metadata.tier_start(group, epoch, an_object(topic, f"{group}{number}", (number, 0, 10)))
            if group == holder:
                await starting
            else:
                with refuses(Conflict, "manifest_conflict"):
                    await starting


async def test_view_of_a_window(metadata: MetadataClient, topic: TopicInfo) -> None:
    """A view of queues and offsets holds exactly the objects that overlap, whole, sorted by path."""
    for number in range(20):
        second = [(1, number * 5, number * 5 + 5)] if number % 2 == 0 and number < 2 else []
        await sealed(metadata, an_object(topic, f"o{number:02}", (0, number * 10, number * 10 + 10), *second))
    first, second_queue, empty = (queue.queue_id for queue in topic.queues)

    async def names(queue_ids: list[int] | None, from_offset: int = 0, to_offset: int | None = None) -> list[str]:
        view = await metadata.tier_view(topic.topic_id, queue_ids, from_offset, to_offset)
        return [obj.object_id for obj in view.objects]

    everything = [f"o{number:02}" for number in range(20)]
    assert await names(None) == everything
    assert await names([first]) == everything
    assert await names([first], 95) == everything[9:]
    assert await names([first], 100) == everything[10:]
    assert await names([first], 95, 101) == everything[9:11]
    assert await names([first], 0, 10) == everything[:1]
    assert await names([first], 200) == []
    assert await names([first], 50, 50) == []
    assert await names([second_queue]) == ["o00"]
    assert await names([second_queue], 5) == []
    assert await names([empty]) == []
    assert await names([]) == []
    assert await names(None, 190) == ["o19"]
    assert await names([first, second_queue], 0, 10) == ["o00"]
    (obj,) = (await metadata.tier_view(topic.topic_id, [second_queue])).objects
    assert len(obj.ranges) == 2


# -- replays ----------------------------------------------------------------------------------------------


def a_plan(**changes: Any) -> ReplayPlan:
    plan = ReplayPlan(
        replay_id="r1",
        tenant_id=1,
        source_topic="orders",
        source_topic_id=1,
        target_topic="again",
        target_topic_id=2,
        target_queues=4,
        clock="born",
        from_ms=1,
        to_ms=None,
        filter_tag="a || b",
        filter_properties={"status": "cancelled"},
        ranges={0: (0, 10), 1: (5, 7)},
        rate=None,
        created_ms=5,
    )
    return msgspec.structs.replace(plan, **changes)


async def test_replay_is_fixed_at_creation(metadata: MetadataClient) -> None:
    """The same request answers the first plan with its ranges; another one under that id is replay_differs."""
    info, created = await metadata.put_replay(a_plan())
    assert created
    assert (info.plan, info.state, info.progress, info.version) == (a_plan(), "planned", {}, 1)
    assert await metadata.put_replay(a_plan(ranges={0: (0, 99)}, created_ms=6)) == (info, False)
    with refuses(Conflict, "replay_differs"):
        await metadata.put_replay(a_plan(target_topic_id=3))
    assert await metadata.replay("default", "r1") == info
    assert await metadata.replays("default") == [info]
    with refuses(NotFound, "replay_not_found"):
        await metadata.replay("default", "r2")


async def test_replay_progress(metadata: MetadataClient) -> None:
    """Reports raise the version; progress never goes back; done is final."""
    await metadata.put_replay(a_plan())
    await metadata.update_replay("default", "r1", "running", {0: 5}, 5, 2, "")
    late = await metadata.update_replay("default", "r1", "running", {0: 3, 1: 6}, 6, 3, "line\none")
    assert (late.progress, late.read, late.published, late.version) == ({0: 5, 1: 6}, 6, 3, 3)
    assert late.detail == "line one"
    done = await metadata.update_replay("default", "r1", "done", {0: 10, 1: 7}, 12, 4, "")
    assert await metadata.update_replay("default", "r1", "running", {0: 1}, 1, 1, "") == done
    with refuses(BadRequest, "invalid_request"):
        await metadata.update_replay("default", "r1", "paused?", {}, 0, 0, "")
