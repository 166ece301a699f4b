"""Frames decoded into tier columns, and the cache that keeps them within its bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest

from millpond.core.errors import Internal
from millpond.core.limits import TURN_ROWS
from millpond.core.schema import TIER_SCHEMA
from millpond.core.tier.rows import rows_of
from millpond.proxy.frames import RUN_BYTES, SMALL_BYTES, FrameCache, decode, runs, within


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_a_frame_opens_as_tier_rows(frame: Any, codec: str | None) -> None:
    """Columns, types and values are those of the tier, whatever the payload's compression."""
    stored = frame(5, [b"x", b"\xff"], tags=["a", None], keys=[b"k", None], properties=[{"p": "q"}, None], codec=codec)
    batch = decode(stored, 3)
    assert batch.schema.equals(TIER_SCHEMA, check_metadata=True)
    batch.validate(full=True)
    assert pa.Table.from_batches([batch]).equals(rows_of(3, [stored]))
    assert batch["offset"].to_pylist() == [5, 6]


def test_a_frame_of_a_newer_version_is_refused(frame: Any) -> None:
    """An unknown column bit, other rows than promised, or broken bytes are corrupt_range that names the offsets."""
    good = frame(5, [b"x", b"y"])
    for bad in (
        msgspec.structs.replace(good, columns=good.columns | 1 << 9),
        msgspec.structs.replace(good, count=3),
        msgspec.structs.replace(good, payload=good.payload.slice(0, 40)),
    ):
        with pytest.raises(Internal) as caught:
            decode(bad, 0)
        assert caught.value.code == "corrupt_range"
        assert caught.value.extra["first"] == 5


def test_compressed_frames_are_decoded_once(frame: Any) -> None:
    """The second look at a compressed frame gives the very same batch; an offset inside of it finds it too."""
    cache = FrameCache(1 << 20)
    stored = frame(100, [b"x" * 100] * 50, codec="lz4")
    batch = cache.open("a", stored, 0)
    assert cache.open("a", stored, 0) is batch
    assert cache.find("a", 11, 149) is batch
    for group, queue_id, offset in (("a", 11, 150), ("a", 11, 99), ("b", 11, 100), ("a", 12, 100)):
        assert cache.find(group, queue_id, offset) is None


def test_plain_frames_are_kept_only_when_wanted(frame: Any) -> None:
    """Opening a plain frame copies nothing and remembers nothing, unless it will be wanted again."""
    cache = FrameCache(1 << 20)
    stored = frame(0, [b"x"])
    cache.open("a", stored, 0)
    assert len(cache) == 0
    cache.open("a", stored, 0, keep=True)
    assert len(cache) == 1


def test_the_cache_stays_within_its_bytes(frame: Any) -> None:
    """The least recently used goes first, a frame larger than all of it never comes in, and the count is exact."""
    one = frame(0, [b"x" * 1000] * 10, codec="zstd")
    size = decode(one, 0).get_total_buffer_size()
    cache = FrameCache(3 * size + size // 2)
    for number in range(3):
        cache.open("a", frame(10 * number, [b"x" * 1000] * 10, codec="zstd"), 0)
    assert cache.find("a", 11, 0) is not None
    cache.open("a", frame(30, [b"x" * 1000] * 10, codec="zstd"), 0)
    assert [cache.find("a", 11, at) is not None for at in (0, 10, 20, 30)] == [True, False, True, True]
    assert cache.bytes <= 3 * size + size // 2
    cache.open("a", frame(40, [b"x" * 10_000] * 10, codec="zstd"), 0)
    assert cache.find("a", 11, 40) is None
    assert len(cache) == 3


def test_a_frame_at_another_position_takes_the_place(frame: Any) -> None:
    """The same offsets from elsewhere in the log replace the entry, and its bytes are counted once."""
    cache = FrameCache(1 << 20)
    stored = frame(0, [b"x"], codec="lz4")
    first = cache.open("a", stored, 0)
    size = cache.bytes
    again = cache.open("a", msgspec.structs.replace(stored, position=stored.position + 8), 0)
    assert again is not first
    assert (len(cache), cache.bytes) == (1, size)


@pytest.mark.parametrize("count", [64, 65, 1000, 1024])
def test_columns_that_a_frame_does_not_have_are_null(frame: Any, count: int) -> None:
    """Null columns that many frames have in common are as long as each of them, and written as such."""
    batch = decode(frame(0, [b"x"] * count), 0)
    batch.validate(full=True)
    assert {name: batch[name].null_count for name in ("born_ts", "origin")} == {"born_ts": count, "origin": count}
    written = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
    assert written.equals(batch)
    assert written.nbytes <= batch.nbytes


def layout(frame: Any, counts: list[int], body: bytes = b"x", **more: Any) -> list[Any]:
    """Frames of so many messages that follow each other, each a moment after the one before."""
    frames, first = [], 0
    for number, count in enumerate(counts):
        frames.append(frame(first, [body] * count, store_ts=1_000 + number, **more))
        first += count
    return frames


def test_small_frames_become_one_batch(frame: Any) -> None:
    """Offsets, store timestamps and values are those of each frame alone, also of a part of the run."""
    frames = [
        frame(5, [b"a", b"b"], tags=["red", None], keys=[b"k", None], store_ts=1_000),
        frame(7, [b""], properties=[{"p": "q"}], store_ts=2_000),
        frame(8, [b"c", b"d", b"e"], store_ts=3_000),
    ]
    assert list(runs(frames)) == [frames]
    alone = pa.Table.from_batches([decode(one, 3) for one in frames])
    cache = FrameCache(1 << 20)
    for offsets in (None, range(5, 11), range(6, 10), range(7, 9)):
        batch = cache.open_run("a", frames, 3, offsets)
        batch.validate(full=True)
        assert batch.schema.equals(TIER_SCHEMA, check_metadata=True)
        skipped, count = (offsets.start - 5, len(offsets)) if offsets is not None else (0, 6)
        assert pa.Table.from_batches([batch]).equals(alone.slice(skipped, count).combine_chunks())
    assert len(cache) == 0


def test_runs_end_where_frames_differ(frame: Any) -> None:
    """A gap, other columns, a compressed or a large frame: each begins a run, and none of them is lost."""
    small = layout(frame, [1] * 8)
    gap = [*small[:2], *small[3:5]]
    assert [len(run) for run in runs(gap)] == [2, 2]
    fewer = [*small[:2], *(msgspec.structs.replace(one, columns=0) for one in small[2:5]), *small[5:]]
    assert [len(run) for run in runs(fewer)] == [2, 3, 3]
    for other in (frame(3, [b"x"], codec="lz4"), frame(3, [b"x" * SMALL_BYTES])):
        mixed = [*small[:3], other, *small[4:]]
        assert [len(run) for run in runs(mixed)] == [3, 1, 4]
        assert [one for run in runs(mixed) for one in run] == mixed
    assert list(runs([])) == []


def test_runs_are_bounded(frame: Any) -> None:
    """By rows, so that the loop gets its turns, and by the bytes that are copied."""
    singles = layout(frame, [1] * (2 * TURN_ROWS + 5))
    assert [len(run) for run in runs(singles)] == [TURN_ROWS, TURN_ROWS, 5]
    wide = layout(frame, [1] * 40, b"x" * (SMALL_BYTES // 2))
    sizes = [sum(len(one.payload) for one in run) for run in runs(wide)]
    assert max(sizes) < RUN_BYTES + SMALL_BYTES
    assert len(sizes) == 3


def test_an_unreadable_frame_of_a_run_is_named(frame: Any) -> None:
    """Not the ones beside it."""
    frames = layout(frame, [2, 2, 2])
    frames[1] = msgspec.structs.replace(frames[1], payload=frames[1].payload.slice(0, 40))
    with pytest.raises(Internal) as caught:
        FrameCache(1 << 20).open_run("a", frames, 0)
    assert (caught.value.code, caught.value.extra["first"], caught.value.extra["end"]) == ("corrupt_range", 2, 4)


def test_offsets_within(frame: Any) -> None:
    """Of frames that follow each other, those asked for."""
    frames = layout(frame, [3, 4])
    assert within(frames) == range(7)
    assert within(frames, 2, 5) == range(2, 5)
