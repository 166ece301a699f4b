"""Frames decoded into tier columns, and the cache that keeps them within its bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest

from millpond.core.errors import Internal
from millpond.core.schema import TIER_SCHEMA
from millpond.core.tier.rows import rows_of
from millpond.proxy.frames import FrameCache, decode


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
