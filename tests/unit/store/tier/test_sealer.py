"""The sealer over a fake log, a real manifest and a real directory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.faulty import Faulty, raising

from millpond.core.errors import Internal, Unavailable
from millpond.core.limits import MIB, SEAL_QUEUES
from millpond.core.schema import PAYLOAD_COLUMNS, TAG, TIER_SCHEMA
from millpond.metadata.client import TopicSettings
from millpond.store.client import StoredFrame
from millpond.store.tier.work import Begun, Job, Made

if TYPE_CHECKING:
    from conftest import World

NOON = 1_700_049_600_000  # 2023-11-15 12:00 UTC, as in conftest
DAY_MS = 86_400_000


class Crash(Exception):
    """The process dies here."""


def object_files(world: World) -> list[Path]:
    return sorted((world.folder / "tier").rglob("*.parquet"))


async def stored_rows(world: World) -> dict[int, list[bytes]]:
    """Bodies of each queue as the manifest's objects hold them; offsets must be dense from 0."""
    bodies: dict[int, list[bytes]] = {q.queue: [] for q in world.topic.queues}
    for obj in sorted(await world.manifest(), key=lambda each: min(r.first for r in each.ranges)):
        table = pq.read_table(world.folder / "tier" / obj.path, partitioning=None)
        for each in obj.ranges:
            rows = table.filter(pa.compute.equal(table["queue"], each.queue))
            assert rows["offset"].to_pylist() == list(range(each.first, each.end))
            assert each.first == len(bodies[each.queue])
            bodies[each.queue] += rows["body"].to_pylist()
    return bodies


async def test_everything_confirmed_is_sealed_on_demand(world: World) -> None:
    """seal_topic brings every confirmed message of every queue into the tier, with all its columns."""
    world.source.append(0, [b"a", b"b"], columns=PAYLOAD_COLUMNS)
    world.source.append(0, [b"c"], ts=NOON + 5)
    world.source.append(2, [b"d"] * 3, ts=NOON + 7, columns=TAG, compression="zstd")
    tiered = await world.sealer.seal_topic(world.topic.topic_id)
    assert [tiered[world.queue_id(q)] for q in range(3)] == [3, 0, 3] == await world.tiered()
    assert await stored_rows(world) == {0: [b"a", b"b", b"c"], 1: [], 2: [b"d"] * 3}
    (obj,) = await world.manifest()
    table = pq.read_table(world.folder / "tier" / obj.path, partitioning=None)
    assert table.schema.equals(TIER_SCHEMA)
    assert table["store_ts"].cast(pa.int64()).to_pylist() == [NOON, NOON, NOON + 5, *[NOON + 7] * 3]
    assert table["tag"].to_pylist() == [None, "t1", None, None, "t1", None]
    assert table["properties"].to_pylist() == [None, [("a", "1")], None, None, None, None]
    assert table["key"].to_pylist() == [b"k0", b"k1", None, None, None, None]
    assert table["origin"].to_pylist() == ["{}", "{}", None, None, None, None]
    assert [(r.queue, r.first, r.end, r.min_born_ts, r.max_born_ts) for r in obj.ranges] == [
        (0, 0, 3, NOON - 1000, NOON - 999),
        (2, 0, 3, None, None),
    ]


async def test_object_name(world: World) -> None:
    """An object is named by tenant, topic, UTC date, what was tiered before it, and the epoch."""
    world.source.append(0, [b"a"])
    await world.sealer.seal_topic(world.topic.topic_id)
    world.source.append(0, [b"b"])
    await world.sealer.seal_topic(world.topic.topic_id)
    names = [obj.path for obj in await world.manifest()]
    epoch = f"{world.source.epoch:06d}"
    folder = "v1/tenant=default/topic=orders/date=2023-11-15"
    assert [name.rsplit("-", 1)[0] for name in names] == [f"{folder}/{n:020d}-{epoch}" for n in (0, 1)]


async def test_the_engine_is_told(world: World) -> None:
    """After the commit the engine hears how far each queue is tiered, and after a restart hears it again."""
    world.source.append(1, [b"a"] * 4)
    await world.sealer.seal_topic(world.topic.topic_id)
    assert world.source.told[world.queue_id(1)] == 4
    sealer = await world.restart()
    await sealer.seal_topic(world.topic.topic_id)
    assert world.source.told == {world.queue_id(0): 0, world.queue_id(1): 4, world.queue_id(2): 0}
    assert len(await world.manifest()) == 1


async def test_nothing_due_is_nothing_done(world: World) -> None:
    """A round leaves a young and small topic alone."""
    world.source.append(0, [b"a"])
    assert await world.sealer.seal_once(NOON + 1000) == 0
    assert world.source.reads == 0
    assert await world.sealer.seal_once(NOON + world.config.seal_age_ms) == 1


async def test_a_run_never_crosses_midnight(world: World) -> None:
    """Messages before and after midnight UTC become objects of their own dates."""
    midnight = NOON + DAY_MS // 2
    world.source.append(0, [b"old"], ts=midnight - 1)
    world.source.append(0, [b"new"], ts=midnight)
    world.source.append(1, [b"newer"], ts=midnight + 5)
    await world.sealer.seal_topic(world.topic.topic_id)
    dates = [obj.path.split("date=")[1][:10] for obj in await world.manifest()]
    assert dates == ["2023-11-15", "2023-11-16"]
    assert await stored_rows(world) == {0: [b"old", b"new"], 1: [b"newer"], 2: []}


async def test_a_wrong_estimate_of_the_oldest_does_no_harm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The date of an object is that of its rows, whatever the engine's estimate says."""
    midnight = NOON + DAY_MS // 2
    world.source.append(0, [b"old"], ts=midnight - 1)
    world.source.append(0, [b"new"], ts=midnight)
    monkeypatch.setattr(world.source, "unsealed", lambda topic_id: (10, midnight + 5))
    await world.sealer.seal_topic(world.topic.topic_id)
    assert [obj.path.split("date=")[1][:10] for obj in await world.manifest()] == ["2023-11-15", "2023-11-16"]


async def test_a_damaged_frame_does_not_stop_its_topic(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """What is before and behind it is sealed; the range behind has fewer rows than offsets; it is logged once."""
    for body in (b"a", b"b", b"c", b"d"):
        world.source.append(0, [body] * 10)
    world.source.damaged = {10, 20}
    tiered = await world.sealer.seal_topic(world.topic.topic_id)
    assert tiered[world.queue_id(0)] == 40
    ranges = sorted((r.first, r.end, r.rows) for obj in await world.manifest() for r in obj.ranges)
    assert ranges == [(0, 10, 10), (10, 40, 10)]
    bodies = {r.first: pq.read_table(world.folder / "tier" / o.path, partitioning=None) for o in await world.manifest()
              for r in o.ranges}  # fmt: skip
    assert [set(bodies[first]["body"].to_pylist()) for first in (0, 10)] == [{b"a"}, {b"d"}]
    assert bodies[10]["offset"].to_pylist() == list(range(30, 40))
    await world.sealer.seal_topic(world.topic.topic_id)
    assert [line for line in caplog.messages if "not in the tier" in line] == [
        "topic orders, queue 0: messages 10 to 19 are not in the tier, sealing goes on behind them: log damaged",
        "topic orders, queue 0: messages 20 to 29 are not in the tier, sealing goes on behind them: log damaged",
    ]
    assert world.sealer.counters()["seal_lost_rows_total"] == 20


async def test_damage_at_the_end_waits_for_what_comes_behind_it(world: World) -> None:
    """A damaged last frame is not sealed over until a whole one follows; other queues are not held up."""
    world.source.append(0, [b"a"] * 10)
    world.source.append(0, [b"b"] * 10)
    world.source.append(1, [b"other"])
    world.source.damaged = {10}
    assert (await world.sealer.seal_topic(world.topic.topic_id))[world.queue_id(0)] == 10
    assert await world.tiered() == [10, 1, 0]
    world.source.append(0, [b"c"] * 10)
    assert (await world.sealer.seal_topic(world.topic.topic_id))[world.queue_id(0)] == 30


async def test_a_damaged_first_frame_is_left_out(world: World) -> None:
    """The first range of a queue may begin with what cannot be read."""
    world.source.append(0, [b"a"] * 10)
    world.source.append(0, [b"b"] * 10)
    world.source.damaged = {0}
    await world.sealer.seal_topic(world.topic.topic_id)
    ((found,),) = [obj.ranges for obj in await world.manifest()]
    assert (found.first, found.end, found.rows) == (0, 20, 10)


async def test_messages_that_expired_before_they_were_sealed(world: World) -> None:
    """Sealing goes on behind them: the manifest's ranges still follow each other, and count the rows there are."""
    queue_id = world.queue_id(0)
    for body in (b"a", b"b", b"c"):
        world.source.append(0, [body] * 10)
    world.source.append(1, [b"all gone"])
    world.source.starts = {queue_id: 15, world.queue_id(1): 1}
    del world.source.log[queue_id][0]  # its segment was recycled
    assert await world.sealer.seal_topic(world.topic.topic_id) == {
        queue_id: 30,
        world.queue_id(1): 0,
        world.queue_id(2): 0,
    }
    (obj,) = await world.manifest()
    assert [(r.first, r.end, r.rows) for r in obj.ranges] == [(0, 30, 15)]
    table = pq.read_table(world.folder / "tier" / obj.path, partitioning=None)
    assert table["offset"].to_pylist() == list(range(15, 30))
    world.source.append(0, [b"d"])
    await world.sealer.seal_topic(world.topic.topic_id)
    assert (await world.tiered())[0] == 31


async def test_after_midnight_only_the_old_day_is_due(world: World) -> None:
    """A round after midnight seals the day that is over and leaves the new one to grow."""
    midnight = NOON + DAY_MS // 2
    world.source.append(0, [b"old"], ts=midnight - 1)
    world.source.append(0, [b"new"], ts=midnight)
    assert await world.sealer.seal_once(midnight + 10) == 1
    assert await world.tiered() == [1, 0, 0]


async def test_a_run_closes_at_its_size(world: World) -> None:
    """A run takes what makes one object and leaves the rest; a round stops when less than that is left."""
    await world.sealer.close()
    world.config = msgspec.structs.replace(world.config, seal_bytes=MIB)
    world.sealer = world.new_sealer()
    for _ in range(25):
        world.source.append(0, [bytes(1024)] * 100)
    assert await world.sealer.seal_once(NOON) == 2
    sizes = [sum(r.rows for r in obj.ranges) for obj in await world.manifest()]
    assert all(1000 <= rows <= 1100 for rows in sizes)


async def test_no_queue_waits_for_ever(world: World) -> None:
    """Runs begin after the queue that the last one ended with: a busy queue does not starve its neighbours."""
    await world.sealer.close()
    world.config = msgspec.structs.replace(world.config, seal_bytes=100_000)
    world.sealer = world.new_sealer()
    for _ in range(10):
        world.source.append(0, [bytes(1000)] * 100)
    world.source.append(1, [b"quiet"])
    await world.sealer.seal_once(NOON)
    first, second = (await world.manifest())[:2]
    assert [r.queue for r in first.ranges] == [0]
    assert [r.queue for r in second.ranges] == [0, 1]


async def test_a_busy_queue_gives_way_to_the_others_turn(world: World) -> None:
    """In an object the queues stand in their order; one that had its turn takes what the others' messages leave."""
    await world.sealer.close()
    world.config = msgspec.structs.replace(world.config, seal_bytes=100_000)
    world.sealer = world.new_sealer()
    for _ in range(200):
        world.source.append(0, [bytes(1000)])
    for _ in range(30):
        world.source.append(2, [bytes(1000)])
    await world.sealer.seal_topic(world.topic.topic_id)
    sizes = [{r.queue: r.rows for r in obj.ranges} for obj in await world.manifest()]
    assert 90 <= sizes[0][0] <= 92
    assert set(sizes[0]) == {0}
    assert set(sizes[1]) == {0, 2}
    assert sizes[1][2] == 30
    assert sum(each.get(0, 0) for each in sizes) == 200


async def test_many_queues_are_spread_over_objects(world: World) -> None:
    """An object holds at most SEAL_QUEUES queues, so that it never has more than 64 row groups."""
    world.topic, _ = await world.metadata.put_topic("default", "wide", TopicSettings(queues=SEAL_QUEUES + 5))
    world.source.topic = world.topic
    world.source.log = {q.queue_id: [] for q in world.topic.queues}
    for queue in range(SEAL_QUEUES + 5):
        world.source.append(queue, [b"x"])
    await world.sealer.seal_topic(world.topic.topic_id)
    assert [len(obj.ranges) for obj in await world.manifest()] == [SEAL_QUEUES, 5]
    assert await world.tiered() == [1] * (SEAL_QUEUES + 5)


async def test_goes_on_in_the_middle_of_a_frame(world: World) -> None:
    """Where the manifest stands inside a frame, only the rest of it is sealed."""
    world.source.append(0, [b"a", b"b"])
    await world.sealer.seal_topic(world.topic.topic_id)
    ref = world.source.log[world.queue_id(0)].pop()
    world.source.append(0, [b"a", b"b", b"c", b"d"])
    assert world.source.log[world.queue_id(0)][0].first_offset == ref.first_offset == 0
    await world.sealer.seal_topic(world.topic.topic_id)
    assert await stored_rows(world) == {0: [b"a", b"b", b"c", b"d"], 1: [], 2: []}


STEPS = [
    ("metadata", "before", "tier_start"),
    ("metadata", "after", "tier_start"),
    ("objects", "before", "put_new"),
    ("objects", "after", "put_new"),
    ("objects", "before", "head"),
    ("objects", "after", "head"),
    ("metadata", "before", "tier_commit"),
    ("metadata", "after", "tier_commit"),
]


@pytest.mark.parametrize(("part", "when", "step"), STEPS)
async def test_a_crash_at_any_step_repeats_work_never_offsets(world: World, part: str, when: str, step: str) -> None:
    """The process dies before or after any step: run again, every message is in the manifest exactly once."""
    world.source.append(0, [b"a", b"b"])
    world.source.append(1, [b"c"])
    act = raising(step, Crash())
    faulty = Faulty(getattr(world, part), act if when == "before" else None, act if when == "after" else None)
    sealer = await world.restart(**{part: faulty})
    with pytest.raises(Crash):
        await sealer.seal_topic(world.topic.topic_id)
    world.source.append(0, [b"d"])
    sealer = await world.restart()
    await sealer.seal_topic(world.topic.topic_id)
    assert await stored_rows(world) == {0: [b"a", b"b", b"d"], 1: [b"c"], 2: []}
    assert len(object_files(world)) - len(await world.manifest()) in (0, 1), "at most one orphan"


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_of_unknown_outcome_is_resolved_first(world: World, when: str) -> None:
    """The metadata is away at the commit: the next pass ends that commit, without a second upload."""
    world.source.append(0, [b"a"])
    act = raising("tier_commit", Unavailable("metadata_unavailable", "away"), times=4)
    faulty = Faulty(world.metadata, act if when == "before" else None, act if when == "after" else None)
    sealer = await world.restart(metadata=faulty)
    with pytest.raises(Unavailable):
        await sealer.seal_topic(world.topic.topic_id)
    assert await sealer.seal_topic(world.topic.topic_id) == {world.queue_id(q): int(q == 0) for q in range(3)}
    assert len(object_files(world)) == 1 == len(await world.manifest())


async def test_a_lost_answer_of_a_put_is_ones_own_success(world: World) -> None:
    """A put that is refused because the object is there is compared, and committed when it is the same."""

    class Repeating(Faulty):
        async def put_new(self, key: str, data: bytes, sha256: str) -> None:
            await self.target.put_new(key, data, sha256)
            await self.target.put_new(key, data, sha256)

    world.source.append(0, [b"a"])
    sealer = await world.restart(objects=Repeating(world.objects, None, None))
    await sealer.seal_topic(world.topic.topic_id)
    assert await world.tiered() == [1, 0, 0]


async def test_an_object_with_other_bytes_is_never_committed(world: World) -> None:
    """Bytes that changed between PUT and HEAD are found: nothing is committed, nothing may be recycled."""

    class Damaging(Faulty):
        async def put_new(self, key: str, data: bytes, sha256: str) -> None:
            await self.target.put_new(key, bytes([data[0] ^ 1]) + data[1:], sha256)

    world.source.append(0, [b"a"])
    sealer = await world.restart(objects=Damaging(world.objects, None, None))
    with pytest.raises(Internal) as error:
        await sealer.seal_topic(world.topic.topic_id)
    assert error.value.code == "tier_corrupt"
    assert await world.tiered() == [0, 0, 0]
    assert not any(world.source.told.values())


async def test_a_gap_in_the_log_is_an_error(world: World) -> None:
    """Frames that do not follow each other, or that do not open, are never sealed."""
    world.source.append(0, [b"a"])
    world.source.append(0, [b"b"])
    world.source.append(0, [b"c"])
    frames = world.source.log[world.queue_id(0)]
    whole = list(frames)
    del frames[1]
    with pytest.raises(Internal) as gap:
        await world.sealer.seal_topic(world.topic.topic_id)
    assert gap.value.code == "corrupt_range"
    frames[:] = [*whole[:2], msgspec.structs.replace(whole[2], payload=pa.py_buffer(b"\0" * 200))]
    with pytest.raises(Internal) as damaged:
        await world.sealer.seal_topic(world.topic.topic_id)
    assert damaged.value.code == "corrupt_range"
    assert await world.tiered() == [0, 0, 0]


async def test_a_deleted_topic_is_left_alone(world: World) -> None:
    """A topic that is gone from the catalog does not stop the round."""
    world.source.append(0, [b"a"])
    await world.metadata.delete_topic("default", "orders")
    assert await world.sealer.seal_once(NOON + DAY_MS) == 0


async def test_a_run_is_read_while_the_one_before_is_uploaded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload does not stop the next run from being read; its commit follows, and both are in the manifest."""
    world.config = msgspec.structs.replace(world.config, seal_bytes=1_000)
    go = asyncio.Event()
    uploading = asyncio.Event()

    class Slow(Faulty):
        async def put_new(self, *arguments: Any) -> None:
            uploading.set()
            await go.wait()
            await self.target.put_new(*arguments)

    sealer = await world.restart(objects=Slow(world.objects, None, None))
    for _ in range(3):
        world.source.append(0, [bytes(1_000)])
    read = world.source.frames
    second = asyncio.Event()

    async def frames(queue_id: int, offset: int, end: int, max_bytes: int) -> list[StoredFrame]:
        if offset == 1:
            second.set()
        return await read(queue_id, offset, end, max_bytes)

    monkeypatch.setattr(world.source, "frames", frames)
    sealing = asyncio.create_task(sealer.seal_topic(world.topic.topic_id))
    async with asyncio.timeout(10):
        await uploading.wait()
        await second.wait()
    assert await world.tiered() == [0, 0, 0]
    go.set()
    await sealing
    assert await world.tiered() == [3, 0, 0]
    assert [r.first for obj in await world.manifest() for r in obj.ranges] == [0, 1, 2]


async def test_a_run_is_read_while_the_one_before_is_finished(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bytes of an object do not keep the next run waiting."""
    world.config = msgspec.structs.replace(world.config, seal_bytes=1_000)
    sealer = await world.restart()
    for _ in range(2):
        world.source.append(0, [bytes(1_000)])
    begin, finish, second = sealer._work.begin, sealer._work.finish, asyncio.Event()

    async def begun(job: Job) -> Begun | None:
        found = await begin(job)
        if found is not None and found.pieces[0].first == 1:
            second.set()
        return found

    async def finished(number: int) -> Made:
        await second.wait()
        return await finish(number)

    monkeypatch.setattr(sealer._work, "begin", begun)
    monkeypatch.setattr(sealer._work, "finish", finished)
    async with asyncio.timeout(10):
        await sealer.seal_topic(world.topic.topic_id)
    assert await world.tiered() == [2, 0, 0]


async def test_nothing_is_committed_behind_an_upload_that_failed(world: World) -> None:
    """The run that was read meanwhile is dropped, and sealed in its turn the next time."""
    world.config = msgspec.structs.replace(world.config, seal_bytes=1_000)
    away = Unavailable("tier_unavailable", "away")
    sealer = await world.restart(objects=Faulty(world.objects, raising("put_new", away), None))
    for _ in range(3):
        world.source.append(0, [bytes(1_000)])
    with pytest.raises(Unavailable):
        await sealer.seal_topic(world.topic.topic_id)
    assert await world.tiered() == [0, 0, 0]
    await sealer.seal_topic(world.topic.topic_id)
    assert await stored_rows(world) == {0: [bytes(1_000)] * 3, 1: [], 2: []}
