"""What the suites of the metadata part share: a clock that stands still, a topic, an object, the error expected."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from millpond.core.clock import SystemClock
from millpond.core.errors import MillpondError
from millpond.metadata.client import MetadataClient, ObjectRange, TierObject, TopicInfo, TopicSettings

SETTINGS = TopicSettings(queues=3)
PATIENCE = {"busy_ms": 30_000, "call_ms": 60_000}  # on a machine with much else to do


class SteppedClock(SystemClock):
    """The wall clock stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def wall_ms(self) -> int:
        return self.now_ms


class Pond(NamedTuple):
    """The metadata as its caller sees it, its clock, and the URL of its database."""

    metadata: MetadataClient
    clock: SteppedClock
    url: str


async def made(metadata: MetadataClient, name: str = "orders", settings: TopicSettings = SETTINGS) -> TopicInfo:
    info, created = await metadata.put_topic("default", name, settings)
    assert created
    return info


def refuses(error: type[MillpondError], code: str) -> pytest.RaisesExc[MillpondError]:
    return pytest.RaisesExc(error, check=lambda raised: raised.code == code)


def an_object(topic: TopicInfo, name: str, *ranges: tuple[int, int, int]) -> TierObject:
    """Object `name` with ranges (queue, first, end)."""
    held = [
        ObjectRange(topic.queues[queue].queue_id, queue, first, end, end - first, first, end, None, None)
        for queue, first, end in ranges
    ]
    return TierObject(name, topic.topic_id, f"v1/{name}.parquet", 1_000, "00" * 32, 100, held)


async def sealed(metadata: MetadataClient, obj: TierObject, epoch: int = 1) -> int:
    await metadata.tier_start("a", epoch, obj)
    return await metadata.tier_commit("a", epoch, obj.object_id)
