"""Reading tier objects: the right rows, for few GETs, or a loud error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.objects import Encoded, encode

from millpond.core.clock import SystemClock
from millpond.core.errors import Internal, TooManyRequests, Unavailable
from millpond.core.limits import COLD_READS_WAITING, MIB
from millpond.core.schema import TIER_SCHEMA
from millpond.core.tier.reader import ObjectRef, TierReader
from millpond.core.tier.rows import row_bytes

if TYPE_CHECKING:
    from conftest import CountingObjects

PATH = "v1/tenant=t/topic=o/date=2023-11-15/x.parquet"
MOST = 1 << 40
Large = tuple[Encoded, dict[int, pa.Table]]


@pytest.fixture
async def reader(objects: CountingObjects) -> AsyncIterator[TierReader]:
    reader = TierReader(objects, 64 * MIB, 2, SystemClock())
    yield reader
    await reader.close()


async def settle(reader: TierReader) -> None:
    """Wait for loads that nobody waits for."""
    await asyncio.gather(*reader._loading.values(), return_exceptions=True)


async def test_rows(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """Any range of any queue is read exactly, over row group borders too."""
    ref = objects.add(PATH, large[0])
    for queue, first, end in (
        (0, 1000, 4200),
        (0, 1837, 1839),
        (0, 4199, 4200),
        (2, 0, 1000),
        (2, 999, 1000),
        (5, 73, 75),
    ):
        table = large[1][queue]
        base = table.column("offset")[0].as_py()
        assert await reader.rows(ref, queue, first, end, 10_000, MOST) == table.slice(first - base, end - first)


async def test_limits_of_a_read(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """At most max_rows and max_bytes, but always at least one row."""
    ref = objects.add(PATH, large[0])
    assert (await reader.rows(ref, 0, 1000, 4200, 7, MOST)).num_rows == 7
    part = await reader.rows(ref, 0, 1500, 4200, 10_000, 100_000)
    assert 15 <= part.num_rows <= 20
    assert row_bytes(part).sum() <= 100_000
    assert (await reader.rows(ref, 0, 1500, 4200, 10_000, 1)).column("offset").to_pylist() == [1500]


async def test_a_cold_seek_takes_two_gets(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """A first read anywhere fetches the footer and one row group, and nothing else."""
    ref = objects.add(PATH, large[0])
    await reader.rows(ref, 0, 2_500, 4_200, 10, MOST)
    await settle(reader)
    assert len(objects.gets) == 2
    assert objects.gets[0] == (PATH, ref.bytes - ref.footer_bytes, ref.bytes)
    assert objects.gets[1][2] - objects.gets[1][1] < 5 * MIB


async def test_a_cold_seek_by_time_takes_two_gets(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """Finding a millisecond and reading from there fetches the footer and one row group."""
    ref = objects.add(PATH, large[0])
    ts = large[1][0].column("store_ts").cast(pa.int64())[2_000].as_py()
    offset = await reader.first_at(ref, 0, ts, "store")
    assert offset == 3_000
    await reader.rows(ref, 0, offset, 4_200, 10, MOST)
    await settle(reader)
    assert len(objects.gets) == 2


async def test_a_repeated_read_takes_no_get(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """What was read a moment ago is in memory."""
    ref = objects.add(PATH, large[0])
    await reader.rows(ref, 0, 2_500, 4_200, 10, MOST)
    count = len(objects.gets)
    await reader.rows(ref, 0, 2_400, 4_200, 10, MOST)
    assert len(objects.gets) == count


async def test_sequential_reading_prefetches(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """Page after page the next row group is there before it is asked for; each is fetched once."""
    ref = objects.add(PATH, large[0])
    at, seen = 1_000, []
    while at < 4_200:
        page = await reader.rows(ref, 0, at, 4_200, 300, MOST)
        seen.append(page)
        at += page.num_rows
        await settle(reader)
    assert pa.concat_tables(seen) == large[1][0]
    assert len(objects.gets) == 1 + 4
    assert len(set(objects.gets)) == len(objects.gets)
    assert reader.counters.prefetches == 3


async def test_concurrent_readers_share_a_load(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """Many who want the same row group cost one GET; one of them giving up does not disturb the others."""
    ref = objects.add(PATH, large[0])
    tasks = [asyncio.create_task(reader.rows(ref, 2, 10 + 3 * i, 500, 1, MOST)) for i in range(20)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert [table.column("offset")[0].as_py() for table in answers[1:]] == list(range(13, 70, 3))
    assert len(objects.gets) == 2


@pytest.mark.parametrize("clock", ["store", "born"])
async def test_first_at(reader: TierReader, objects: CountingObjects, large: Large, clock: str) -> None:
    """The first offset whose clock is at or after a time, as a scan of all rows finds it; None when there is none."""
    ref = objects.add(PATH, large[0])
    for queue, table in large[1].items():
        times = table.column(f"{clock}_ts").cast(pa.int64()).to_pylist()
        known = sorted({t for t in times if t is not None})
        for ts in (known[0] - 1, known[0], known[len(known) // 3] + 1, known[-2], known[-1], known[-1] + 1):
            first = next((i for i, t in enumerate(times) if t is not None and t >= ts), None)
            expected = None if first is None else first + table.column("offset")[0].as_py()
            assert await reader.first_at(ref, queue, ts, clock) == expected, (queue, ts)
    assert await reader.first_at(ref, 99, 0, "store") is None


async def test_find_key(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """All rows with a key in the asked queues, in order; row groups without it are not fetched."""
    ref = objects.add(PATH, large[0])
    found = await reader.find_key(ref, [2, 0], b"key-003501")
    assert found.column("offset").to_pylist() == [3501]
    assert len(objects.gets) == 2
    assert (await reader.find_key(ref, [0, 2, 5], b"key-000071")).select(["queue", "offset"]).to_pylist() == [
        {"queue": 2, "offset": 71},
        {"queue": 5, "offset": 71},
    ]
    assert await reader.find_key(ref, [5], b"nothing") == TIER_SCHEMA.empty_table()


async def test_find_key_without_keys(
    reader: TierReader, objects: CountingObjects, make_rows: Callable[..., pa.Table]
) -> None:
    """A queue without keys costs the footer only."""
    ref = objects.add(PATH, encode([(0, make_rows(0, 0, 50, keyed=False))], 1, 1))
    assert (await reader.find_key(ref, [0], b"k")).num_rows == 0
    assert len(objects.gets) == 1


async def test_offsets_the_object_does_not_hold(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """Asking for what the manifest should never have promised is an error that names object and offset."""
    ref = objects.add(PATH, large[0])
    for queue, first in ((0, 4_200), (1, 0), (5, 80)):
        with pytest.raises(Internal) as error:
            await reader.rows(ref, queue, first, first + 5, 10, MOST)
        assert error.value.code == "tier_corrupt"
        assert f"queue {queue}, offset {first}" in error.value.detail


async def test_offsets_that_were_damaged_before_they_were_sealed(
    reader: TierReader, objects: CountingObjects, large: Large
) -> None:
    """Below the object's first row of a queue: an error that says where to read on, as for a damaged log."""
    ref = objects.add(PATH, large[0])
    with pytest.raises(Internal) as error:
        await reader.rows(ref, 0, 990, 2_000, 10, MOST)
    assert error.value.code == "corrupt_range"
    assert (error.value.extra["offset"], error.value.extra["next_offset"]) == (990, 1_000)


async def test_a_missing_object(reader: TierReader, large: Large) -> None:
    """An object that is gone is an error that says so, for a caller who looks the manifest up once more."""
    with pytest.raises(Internal) as error:
        await reader.rows(ObjectRef(PATH, 1000, 500), 0, 0, 1, 1, MOST)
    assert error.value.code == "tier_corrupt"
    assert error.value.extra == {"path": PATH, "missing": True}
    assert PATH in error.value.detail


async def test_damage_is_an_error_and_is_not_cached(reader: TierReader, objects: CountingObjects, large: Large) -> None:
    """Flipped bytes and a cut object are errors naming object and range; the intact object is read afterwards."""
    ref = objects.add(PATH, large[0])
    whole = objects.data[PATH]
    for at in (10, 2 * MIB, len(whole) - 3, len(whole) - ref.footer_bytes + 5, len(whole) - 2_000):
        reader._cache.drop((PATH,))
        objects.data[PATH] = whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :]
        with pytest.raises(Internal) as error:
            await reader.rows(ref, 0, 1000, 4200, 10_000, MOST)
        assert (error.value.code, error.value.extra["missing"]) == ("tier_corrupt", False)
        assert PATH in error.value.detail
        assert "bytes" in error.value.detail
        await settle(reader)
        reader._cache.drop((PATH, 0))
    objects.data[PATH] = whole[:-100]
    reader._cache.drop((PATH,))
    with pytest.raises(Internal):
        await reader.rows(ref, 0, 1000, 4200, 10_000, MOST)
    objects.data[PATH] = whole
    assert await reader.rows(ref, 0, 1000, 4200, 10_000, MOST) == large[1][0]


async def test_the_cache_is_bounded(objects: CountingObjects, large: Large) -> None:
    """Never more bytes are kept than were allowed; with room for nothing reading still works."""
    for bytes_most in (0, 6 * MIB):
        reader = TierReader(objects, bytes_most, 2, SystemClock())
        ref = objects.add(PATH, large[0])
        assert await reader.rows(ref, 0, 1000, 4200, 10_000, MOST) == large[1][0]
        await settle(reader)
        assert reader._cache.bytes <= bytes_most
        await reader.close()


async def test_concurrency_is_bounded_and_fair(objects: CountingObjects, make_rows: Callable[..., pa.Table]) -> None:
    """At most so many loads at once; a tenant that asks for very many is refused, and does not delay another."""
    running, peak, order = 0, 0, []
    gate, two = asyncio.Event(), asyncio.Event()

    async def on_get() -> None:
        nonlocal running, peak
        running, peak = running + 1, max(peak, running + 1)
        order.append(objects.gets[-1][0])
        if len(order) == 2:
            two.set()
        await gate.wait()
        running -= 1

    encoded = encode([(0, make_rows(0, 0, 10))], 1, 1)
    count = COLD_READS_WAITING + 2
    greedy = [objects.add(f"v1/tenant=greedy/{i}", encoded) for i in range(count + 1)]
    modest = objects.add("v1/tenant=modest/1", encoded)
    reader = TierReader(objects, 64 * MIB, 2, SystemClock())
    objects.on_get = on_get
    tasks = [asyncio.create_task(reader.first_at(ref, 0, 0, "store")) for ref in greedy[:count]]
    await two.wait()
    tasks.append(asyncio.create_task(reader.first_at(modest, 0, 0, "store")))
    with pytest.raises(TooManyRequests) as refused:
        await reader.first_at(greedy[-1], 0, 0, "store")
    assert refused.value.code == "cold_read_limit"
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    await settle(reader)
    assert peak == 2
    assert order.index(modest.path) <= 4
    await reader.close()


async def test_close_ends_waiting_reads(objects: CountingObjects, large: Large) -> None:
    """Who waits for a load while the reader closes hears that it is shutting down."""

    asked = asyncio.Event()

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    objects.on_get = never
    reader = TierReader(objects, MIB, 1, SystemClock())
    waiting = asyncio.create_task(reader.rows(objects.add(PATH, large[0]), 0, 1000, 1001, 1, MOST))
    await asked.wait()
    await reader.close()
    with pytest.raises(Unavailable) as closed:
        await waiting
    assert closed.value.code == "shutting_down"


def test_stats_help_is_real(large: Large) -> None:
    """The test object is such that pruning can be seen: keys differ between its row groups."""
    keys = large[1][0].column("key")
    assert pc.min(keys.slice(0, 800)).as_py() < pc.min(keys.slice(1_600, 800)).as_py()
