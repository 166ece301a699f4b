"""Compare-and-set between two processes: two `LocalMetadata` on one file, each with its own writer thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.metadata import PATIENCE

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.errors import Conflict
from millpond.metadata.client import ObjectRange, TierObject, TopicInfo, TopicSettings
from millpond.metadata.local import LocalMetadata

Pair = tuple[LocalMetadata, LocalMetadata]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    url = f"sqlite:///{tmp_path / 'metadata.db'}"
    one = await LocalMetadata.open(url, SystemClock(), SystemRandom(), **PATIENCE)
    two = await LocalMetadata.open(url, SystemClock(), SystemRandom(), **PATIENCE)
    yield one, two
    await one.close()
    await two.close()


def an_object(topic: TopicInfo, name: str, first: int) -> TierObject:
    held = ObjectRange(topic.queues[0].queue_id, 0, first, first + 10, 10, 0, 0, None, None)
    return TierObject(name, topic.topic_id, name, 10, "00", 5, [held])


async def test_one_winner_each_round(pair: Pair) -> None:
    """Of two commits of the same range, one from each process, exactly one wins, every time."""
    await pair[0].register_store("a", "n1", "")
    topic, _ = await pair[0].put_topic("default", "orders", TopicSettings(queues=1))
    for turn in range(20):
        rivals = [an_object(topic, f"{turn}-{number}", turn * 10) for number in range(2)]
        await asyncio.gather(*(each.tier_start("a", 1, obj) for each, obj in zip(pair, rivals, strict=True)))
        commits = (each.tier_commit("a", 1, obj.object_id) for each, obj in zip(pair, rivals, strict=True))
        answers = await asyncio.gather(*commits, return_exceptions=True)
        assert answers.count(turn + 1) == 1
        (lost,) = [answer for answer in answers if answer != turn + 1]
        assert isinstance(lost, Conflict)
        assert lost.code == "manifest_conflict"
    assert len((await pair[1].tier_view(topic.topic_id)).objects) == 20


async def test_every_start_has_its_own_epoch(pair: Pair) -> None:
    """Concurrent starts of a store never share an epoch."""
    infos = await asyncio.gather(*(pair[turn % 2].register_store("a", "n1", "") for turn in range(20)))
    assert sorted(info.epoch for info in infos) == list(range(1, 21))


async def test_one_topic_is_created(pair: Pair) -> None:
    """Of concurrent equal puts one creates and all answer the same topic."""
    puts = (pair[turn % 2].put_topic("default", "orders", TopicSettings(queues=4)) for turn in range(10))
    answers = await asyncio.gather(*puts)
    assert [created for _, created in answers].count(True) == 1
    assert len({info.topic_id for info, _ in answers}) == 1


async def test_one_lease_key_is_made(pair: Pair) -> None:
    """Both processes sign with the same first key."""
    answers = await asyncio.gather(*(pair[turn % 2].lease_keys() for turn in range(10)))
    assert all(answer == answers[0] for answer in answers)


async def test_a_reader_of_changes_misses_nothing(pair: Pair) -> None:
    """Following the feed while both processes write shows every topic exactly once."""
    seen: list[str] = []

    async def follow() -> None:
        version = (await pair[0].changes(0, 0)).version
        while len(seen) < 20:
            changes = await pair[0].changes(version, 5_000)
            assert not changes.full
            seen.extend(info.name for info in changes.topics)
            version = changes.version

    following = asyncio.ensure_future(follow())
    puts = (pair[turn % 2].put_topic("default", f"t{turn}", TopicSettings(queues=1)) for turn in range(20))
    await asyncio.gather(*puts)
    await asyncio.wait_for(following, 10)
    assert sorted(seen) == sorted({f"t{turn}" for turn in range(20)})
