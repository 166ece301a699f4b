"""Reading a queue across the boundary between store and tier, while that boundary moves."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpond.core.errors import Internal, OffsetExpired, OffsetOutOfRange
from millpond.core.limits import MIB, TURN_ROWS
from millpond.proxy.tags import parse

QUEUE_ID = 11


def fill(world: Any, frame: Any, frames: int = 20, rows: int = 10) -> None:
    for number in range(frames):
        first = number * rows
        bodies = [b"%d" % offset for offset in range(first, first + rows)]
        tags = ["odd" if offset % 2 else "even" for offset in range(first, first + rows)]
        world.store.add(frame(first, bodies, tags=tags, store_ts=1000 + number))


def bodies(batches: list[pa.RecordBatch]) -> list[int]:
    return [int(value) for batch in batches for value in batch["body"].to_pylist()]


async def read_all(world: Any, **more: Any) -> list[int]:
    queue, at, found = world.topic.queues[0], 0, []
    while True:
        result = await world.reader.read(world.topic, queue, at, more.get("limit", 7), MIB, 0, more.get("tag"))
        found += bodies(result.batches)
        if result.next_offset == at:
            return found
        at = result.next_offset


async def test_pages_end_inside_of_frames(world: Any, frame: Any) -> None:
    """Pages of any size meet exactly, though the store only gives whole frames."""
    fill(world, frame)
    assert await read_all(world, limit=7) == list(range(200))
    assert await read_all(world, limit=1000) == list(range(200))


async def test_bytes_bound_a_page_but_one_row_always_comes(world: Any, frame: Any) -> None:
    """`max_bytes` is kept to the row, except that a reader never stands still."""
    world.store.add(frame(0, [b"x" * 1000] * 10))
    queue = world.topic.queues[0]
    few = await world.reader.read(world.topic, queue, 0, 100, 3500)
    assert (sum(one.num_rows for one in few.batches), few.next_offset) == (3, 3)
    one = await world.reader.read(world.topic, queue, 0, 100, 10)
    assert (sum(part.num_rows for part in one.batches), one.next_offset) == (1, 1)


async def test_messages_that_came_one_by_one_are_few_batches(world: Any, frame: Any) -> None:
    """A batch of its own for each would cost more than all else that is done for a message."""
    fill(world, frame, frames=600, rows=1)
    result = await world.reader.read(world.topic, world.topic.queues[0], 0, 1_000, MIB)
    assert bodies(result.batches) == list(range(600))
    assert [batch.num_rows for batch in result.batches] == [TURN_ROWS, TURN_ROWS, 600 - 2 * TURN_ROWS]


async def test_a_pause_behind_each_large_batch(world: Any, frame: Any) -> None:
    """Not behind small ones: who reads a few messages does not wait."""
    paused = 0

    async def pause() -> None:
        nonlocal paused
        paused += 1

    for at, rows in enumerate((TURN_ROWS, 10, TURN_ROWS)):
        first = at * TURN_ROWS - (at == 2) * (TURN_ROWS - 10)
        world.store.add(frame(first, [b"%d" % offset for offset in range(first, first + rows)]))
    queue = world.topic.queues[0]
    result = await world.reader.read(world.topic, queue, 0, 1_000, MIB, pause=pause)
    assert bodies(result.batches) == list(range(2 * TURN_ROWS + 10))
    assert paused == 2


async def test_a_page_ends_with_a_frame_rather_than_in_the_next(world: Any, frame: Any) -> None:
    """More than half of `max_bytes` is enough: who reads on from page to page has each frame read once."""
    for number in range(4):
        world.store.add(frame(10 * number, [b"x" * 1000] * 10))
    queue = world.topic.queues[0]
    found = await world.reader.read(world.topic, queue, 0, 100, 16_000)
    assert found.next_offset == 10
    few = await world.reader.read(world.topic, queue, 0, 100, 25_000)
    assert few.next_offset % 10 == 0


async def test_no_gap_and_no_repeat_while_the_boundary_moves(world: Any, frame: Any) -> None:
    """Segments are sealed and recycled between any two calls: every message comes once, in order."""
    fill(world, frame)

    def recycle() -> None:
        local = world.store.local[QUEUE_ID]
        if local < 160:
            world.seal(f"o{local}", 40, first=local)
            world.store.local[QUEUE_ID] = local + 40

    for limit in (3, 7, 25, 1000):
        world.store.local[QUEUE_ID], world.metadata.objects = 0, []
        world.tier.objects.clear()
        calls = iter(range(10_000))
        world.store.on_read = lambda calls=calls: recycle() if next(calls) % 3 == 2 else None
        assert await read_all(world, limit=limit) == list(range(200))
    assert world.tier.calls


async def test_a_page_goes_on_from_the_tier_into_the_store(world: Any, frame: Any) -> None:
    """One read crosses the hand-over: tail=N needs its N messages wherever they are."""
    fill(world, frame)
    world.seal("o", 60)
    world.store.local[QUEUE_ID] = 50
    result = await world.reader.read(world.topic, world.topic.queues[0], 45, 30, MIB)
    assert bodies(result.batches) == list(range(45, 75))
    assert result.ends.end_offset == 200


async def test_a_stale_window_is_refreshed_when_its_object_is_gone(world: Any, frame: Any) -> None:
    """Compaction put two objects into one: a reader with the old manifest asks again and goes on."""
    fill(world, frame)
    world.seal("one", 40)
    world.seal("two", 40, first=40)
    world.store.local[QUEUE_ID] = 80
    assert (await read_all(world))[:1] == [0]
    world.metadata.objects, world.tier.objects = [], {}
    world.seal("both", 80)
    assert await read_all(world) == list(range(200))


async def test_a_missing_object_is_an_error_that_names_it(world: Any, frame: Any) -> None:
    """Never zeros, never a silent skip."""
    fill(world, frame)
    world.seal("gone", 40)
    world.store.local[QUEUE_ID] = 40
    del world.tier.objects["gone"]
    with pytest.raises(Internal) as caught:
        await read_all(world)
    assert caught.value.code == "tier_corrupt"
    assert "gone" in caught.value.detail


async def test_a_tier_that_skips_is_not_believed(world: Any, frame: Any) -> None:
    """Rows that do not begin where the last ones ended are refused."""
    fill(world, frame)
    world.seal("o", 40)
    world.store.local[QUEUE_ID] = 40
    world.tier.shift = 1
    with pytest.raises(Internal, match="expected, it gave 1 to"):
        await read_all(world)


async def test_a_store_that_skips_is_not_believed(world: Any, frame: Any) -> None:
    """A gap or a repeat in the store's frames is refused."""
    fill(world, frame)
    for other in (world.store.frames[QUEUE_ID][3], world.store.frames[QUEUE_ID][1]):
        frames = world.store.frames[QUEUE_ID]
        world.store.frames[QUEUE_ID] = [frames[0], frames[1], other, *frames[4:]]
        with pytest.raises(Internal, match="must come next"):
            await world.reader.read(world.topic, world.topic.queues[0], 0, 100, MIB)
        world.store.frames[QUEUE_ID] = frames


async def test_an_offset_in_neither_place_is_an_error(world: Any, frame: Any) -> None:
    """The store says cold and the manifest has nothing: named, after looking again."""
    fill(world, frame)
    world.store.local[QUEUE_ID] = 40
    with pytest.raises(Internal, match="neither in the store nor in the tier"):
        await world.reader.read(world.topic, world.topic.queues[0], 5, 10, MIB)
    assert world.metadata.views == 3


async def test_retention_in_between_is_expired_not_corrupt(world: Any, frame: Any) -> None:
    """Objects deleted because the topic's start moved: the answer is 410 with the new start."""
    fill(world, frame)
    world.store.local[QUEUE_ID] = 40
    reads = iter(range(100))

    def expire() -> None:
        if next(reads):
            world.store.start[QUEUE_ID] = 40

    world.store.on_read = expire
    with pytest.raises(OffsetExpired) as caught:
        await world.reader.read(world.topic, world.topic.queues[0], 5, 10, MIB)
    assert caught.value.extra["start_offset"] == 40


async def test_a_quarantined_range_is_served_from_the_tier(world: Any, frame: Any) -> None:
    """Damage on the store's disk does not show when the tier has the range; else it is an explicit error."""
    fill(world, frame)
    world.store.corrupt = set(range(20, 30))
    with pytest.raises(Internal) as caught:
        await read_all(world, limit=10)
    assert caught.value.code == "corrupt_range"
    world.seal("o", 40)
    assert await read_all(world, limit=10) == list(range(200))


async def test_a_filter_compares_texts_in_store_and_tier(world: Any, frame: Any) -> None:
    """The same rows on both sides of the boundary, and pages still meet."""
    fill(world, frame)
    world.seal("o", 100)
    world.store.local[QUEUE_ID] = 90
    assert await read_all(world, tag=parse("odd"), limit=7) == list(range(1, 200, 2))
    assert await read_all(world, tag=parse("nobody")) == []


async def test_a_scan_that_ends_inside_of_a_frame_repeats_nothing(world: Any, frame: Any) -> None:
    """The store gives whole frames but may have looked at a part of the last one only."""
    fill(world, frame)
    for world.store.scan_entries in (3, 15, 28):
        assert await read_all(world, tag=parse("odd"), limit=50) == list(range(1, 200, 2))


async def test_ends_are_errors_with_numbers(world: Any, frame: Any) -> None:
    """Below the start 410, beyond the end 416, at the end nothing."""
    fill(world, frame, frames=2)
    world.store.start[QUEUE_ID] = 5
    queue = world.topic.queues[0]
    with pytest.raises(OffsetExpired):
        await world.reader.read(world.topic, queue, 4, 10, MIB)
    with pytest.raises(OffsetOutOfRange):
        await world.reader.read(world.topic, queue, 21, 10, MIB)
    result = await world.reader.read(world.topic, queue, 20, 10, MIB)
    assert (result.batches, result.next_offset) == ([], 20)


async def test_select_takes_exactly_the_wanted_rows(world: Any, frame: Any) -> None:
    """Sparse offsets from frames that came along, the cache, the store and the tier, in order, each once."""
    fill(world, frame)
    world.seal("o", 60)
    world.store.local[QUEUE_ID] = 60
    wanted = np.array([3, 4, 5, 58, 59, 60, 77, 78, 120, 199], np.int64)
    frames = [world.store.frames[QUEUE_ID][7]]
    for _ in range(2):
        found = await world.reader.select(world.topic, world.topic.queues[0], wanted, frames, 60, MIB)
        assert bodies(found.batches) == wanted.tolist()
        assert (found.missing.tolist(), found.error) == ([], None)
    reads = len(world.store.reads)
    await world.reader.select(world.topic, world.topic.queues[0], wanted[5:], frames, 60, MIB)
    assert len(world.store.reads) == reads, "the cache has them"


async def test_select_says_what_it_could_not_get(world: Any, frame: Any) -> None:
    """What was had before the error comes, the others are named with the reason."""
    fill(world, frame)
    world.seal("o", 20)
    world.store.local[QUEUE_ID] = 40
    wanted = np.array([3, 19, 20, 45], np.int64)
    found = await world.reader.select(world.topic, world.topic.queues[0], wanted, [], 40, MIB)
    assert bodies(found.batches) == [3, 19]
    assert found.missing.tolist() == [20, 45]
    assert isinstance(found.error, Internal)


async def test_cold_rows_are_bounded_by_their_bytes(world: Any, frame: Any) -> None:
    """The store does not know how large cold rows are: the reader stops, and says which rows it left."""
    world.store.add(frame(0, [b"x" * 1000] * 100))
    world.seal("o", 100)
    world.store.local[QUEUE_ID] = 100
    wanted = np.arange(100)
    found = await world.reader.select(world.topic, world.topic.queues[0], wanted, [], 100, 5000)
    had = sum(batch.num_rows for batch in found.batches)
    assert 1 <= had < 60
    assert found.missing.tolist() == list(range(had, 100))
    assert found.error is None


async def test_a_damaged_frame_is_named(world: Any, frame: Any) -> None:
    """A frame that came along and does not open is an error of its offsets, not of the whole process."""
    bad = msgspec.structs.replace(frame(0, [b"x"] * 3), count=4)
    found = await world.reader.select(world.topic, world.topic.queues[0], np.arange(3), [bad], 0, MIB)
    assert found.missing.tolist() == [0, 1, 2]
    assert isinstance(found.error, Internal)
