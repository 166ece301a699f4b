"""What the sealer sees of a real store."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, messages, open_store

from millpond.core.errors import Internal
from millpond.core.frame import HEADER_BYTES


async def test_a_damaged_frame_says_where_sealing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to it frames are given; it is corrupt_range with its own offsets; behind it frames are given again."""
    monkeypatch.setattr("millpond.store.engine.RECENT_BYTES", 0)  # or it would never look at the disk
    disk = MemoryDisk()
    store = await open_store(disk, StoreMetadata(), tmp_path)
    for number in range(3):
        await append(store, messages([b"body %d" % number] * 2))
    spot = (await store.engine.directory.spots(1, 2, 1))[0]
    disk.inodes[disk.named["log/00000000000000000000.seg"]][spot.position + HEADER_BYTES + 30] ^= 4
    source = store.engine.seal_source
    with pytest.raises(Internal) as error:
        await source.frames(1, 0, 6, 1 << 20)
    assert (error.value.extra["offset"], error.value.extra["next_offset"]) == (2, 4)
    assert [frame.first_offset for frame in await source.frames(1, 0, 2, 1 << 20)] == [0]
    assert [frame.first_offset for frame in await source.frames(1, 4, 6, 1 << 20)] == [4]
    await store.close()


async def test_offsets_that_recovery_gave_up_say_where_sealing_goes_on(tmp_path: Path) -> None:
    """They have no entry in the index, and the sealer is told so instead of being given nothing."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    await append(store, messages([b"a"]))
    store.engine.lost.append((1, 1, 10))
    queue = store.engine.fold.queues.get(1)
    assert queue is not None
    queue.confirmed_end = 11
    with pytest.raises(Internal) as error:
        await store.engine.seal_source.frames(1, 1, 11, 1 << 20)
    assert (error.value.code, error.value.extra["next_offset"]) == ("corrupt_range", 10)
    await store.close()


async def test_what_was_appended_is_counted(tmp_path: Path) -> None:
    """Over all topics and queues: the sealer tells a burst by it."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    await append(store, messages([b"four"]), messages([b"four"], number=1))
    assert store.engine.seal_source.appended_bytes == 8
    await store.close()
