"""A store over its life: restarts, damage, what it answers."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, bodies_of, messages, open_store, texts

from millpond.core.errors import Conflict, Internal, OffsetOutOfRange, Unavailable
from millpond.core.frame import HEADER_BYTES, ProducerPart
from millpond.metadata.client import TopicSettings
from millpond.store import directory as directory_module
from millpond.store.client import (
    AppendRequest,
    FindRequest,
    ReadRequest,
    TimeRequest,
)
from millpond.store.disk import SystemDisk
from millpond.store.identity import DirectoryRefused
from millpond.store.local import LocalStore


async def test_messages_survive_a_restart(tmp_path: Path) -> None:
    """Clean shutdown, new engine: the same messages at the same offsets, and the epoch has risen."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    store = await open_store(disk, metadata, tmp_path)
    await append(store, messages([b"a", b"b"]), messages([b"c"], number=1))
    first_epoch = (await store.status()).epoch
    await store.close()
    store = await open_store(disk, metadata, tmp_path)
    assert await texts(store) == [b"a", b"b"]
    assert await texts(store, number=1) == [b"c"]
    assert (await store.status()).epoch > first_epoch
    assert (await append(store, messages([b"d"]))).outcomes[0].first_offset == 2
    await store.close()


async def test_memory_durability_is_answered_before_the_flush(tmp_path: Path) -> None:
    """A memory append is answered when written, a flush append when synced; readers wait for the sync in both cases."""
    disk = MemoryDisk()
    store = await open_store(disk, StoreMetadata(), tmp_path)
    blocked = asyncio.Event()
    release = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(blocked.set)
        asyncio.run_coroutine_threadsafe(_wait(release), loop).result(10)

    disk.before_sync = hold  # type: ignore[method-assign]  # a sync that hangs until the test says so
    flushing = asyncio.create_task(append(store, messages([b"flush"])))
    await blocked.wait()
    await append(store, messages([b"memory"], durability="memory"))
    assert not flushing.done()
    assert (await store.queues([1]))[0].end_offset == 0, "nobody is shown what is not on the disk"
    release.set_result(None)
    await flushing
    await store.close()


async def _wait(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)


async def test_a_failed_sync_stops_the_store(tmp_path: Path) -> None:
    """After a failed sync nothing is acknowledged, nothing is retried, and the owner is told."""
    disk = MemoryDisk()
    store = await open_store(disk, StoreMetadata(), tmp_path)
    disk.fail_syncs_after = 0
    with pytest.raises(Unavailable):
        await append(store, messages([b"lost"]))
    assert isinstance(await asyncio.wait_for(store.failed, 5), OSError)
    with pytest.raises(Unavailable):
        await append(store, messages([b"refused"]))
    disk.fail_syncs_after = None
    await store.close()


async def test_a_session_part_is_accepted_once(tmp_path: Path) -> None:
    """The same part again, after a restart too, appends nothing and names the first offsets; a gap is refused."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    store = await open_store(disk, metadata, tmp_path)
    first = messages([b"a", b"b"], part=ProducerPart("p", -1, 0, 1, 0, 2))
    second = messages([b"c"], part=ProducerPart("p", 1, 2, 2, 0, 1))
    assert (await append(store, first)).outcomes[0].first_offset == 0
    assert (await append(store, second)).outcomes[0].first_offset == 2
    await store.close()
    store = await open_store(disk, metadata, tmp_path)
    again = (await append(store, first)).outcomes[0]
    assert [(duplicate.row, duplicate.offset) for duplicate in again.duplicates] == [(0, 0), (1, 1)]
    refused = (await append(store, messages([b"x"], part=ProducerPart("p", 7, 8, 8, 0, 1)))).outcomes[0].error
    assert refused is not None
    assert refused.code == "out_of_order"
    stranger = (await append(store, messages([b"x"], part=ProducerPart("q", 7, 8, 8, 0, 1)))).outcomes[0].error
    assert stranger is not None
    assert stranger.code == "unknown_producer"
    assert await texts(store) == [b"a", b"b", b"c"]
    await store.close()


async def test_a_dedup_id_is_accepted_once(tmp_path: Path) -> None:
    """The same id within the window names the first message, also after a restart; rows without an id never do."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    store = await open_store(disk, metadata, tmp_path)
    ids: list[str | None] = ["one", None, "two", None]
    await append(store, messages([b"1", b"n", b"2", b"n"], dedup_ids=ids))
    await store.close()
    store = await open_store(disk, metadata, tmp_path)
    outcome = (await append(store, messages([b"2", b"n", b"other"], dedup_ids=["two", None, "one"]))).outcomes[0]
    assert [(duplicate.row, duplicate.offset, duplicate.mismatch) for duplicate in outcome.duplicates] == [
        (0, 2, False),
        (2, 0, True),
    ]
    assert len(await texts(store)) == 4
    await store.close()


async def test_offsets_by_time_and_frames_by_key(tmp_path: Path) -> None:
    """A time finds the first message stamped then or later, in a closed segment too; a key hash finds its frames."""
    disk = MemoryDisk()
    store = await open_store(disk, StoreMetadata(), tmp_path)
    stamps = []
    for number in range(40):
        outcome = (await append(store, messages([b"x" * 4000], keys=[b"k%d" % (number % 10)]))).outcomes[0]
        stamps.append(outcome.store_ts)
        await asyncio.sleep(0.002)
    for number in (0, 7, 20, 39):
        found = await store.offsets_at(TimeRequest([1], stamps[number]))
        assert found.offsets == [stamps.index(stamps[number])]
    assert (await store.offsets_at(TimeRequest([1], stamps[-1] + 1))).offsets == [40]
    from millpond.core.hashing import hash_bytes

    frames = await store.find(FindRequest([1], hash_bytes(b"k3"), 0, 1 << 50, 100))
    assert [frame.first_offset for frame in frames] == [33, 23, 13, 3]
    await store.close()


async def test_reads_beyond_the_end_say_so(tmp_path: Path) -> None:
    """Past the end is an error with numbers; at the end is empty, or waits for the next message."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    await append(store, messages([b"a"]))
    with pytest.raises(OffsetOutOfRange) as error:
        await store.read(ReadRequest(1, 2, 10, 1000))
    assert error.value.extra["end_offset"] == 1
    assert (await store.read(ReadRequest(1, 1, 10, 1000))).frames == []
    waiting = asyncio.create_task(store.read(ReadRequest(1, 1, 10, 1000, wait_ms=5000)))
    await asyncio.sleep(0)
    await append(store, messages([b"b"]))
    assert [bodies_of(frame) for frame in (await waiting).frames] == [[b"b"]]
    await store.close()


async def test_damage_under_a_reader_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit in a stored body: what stands before it is read, the read of it fails with corrupt_range and says
    where it goes on, what stands behind it is read."""
    monkeypatch.setattr("millpond.store.engine.RECENT_BYTES", 0)  # or it would never look at the disk
    disk = MemoryDisk()
    store = await open_store(disk, StoreMetadata(), tmp_path)
    for number in range(3):
        await append(store, messages([b"body %d" % number]))
    spot = (await store.engine.directory.spots(1, 1, 1))[0]
    disk.inodes[disk.named["log/00000000000000000000.seg"]][spot.position + HEADER_BYTES + 30] ^= 4
    before = await store.read(ReadRequest(1, 0, 10, 1 << 20))
    assert ([frame.first_offset for frame in before.frames], before.next_offset) == ([0], 1)
    with pytest.raises(Internal) as error:
        await store.read(ReadRequest(1, 1, 10, 1 << 20))
    assert (error.value.code, error.value.extra["next_offset"]) == ("corrupt_range", 2)
    assert (await store.status()).quarantined == [(spot.position, spot.position + spot.length)]
    assert await texts(store, 2) == [b"body 2"]
    await store.close()


async def test_a_lost_checkpoint_costs_time_not_messages(tmp_path: Path) -> None:
    """With the newest checkpoint damaged, and then all of them gone, the log alone brings everything back."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    store = await open_store(disk, metadata, tmp_path, checkpoint_bytes=16 * 1024)
    bodies = [b"%d" % number + b"x" * 3000 for number in range(50)]
    for body in bodies:
        await append(store, messages([body]))
    await store.close()
    newest = sorted(name for name in disk.named if name.startswith("checkpoint/"))[-1]
    disk.inodes[disk.named[newest]][200] ^= 1
    store = await open_store(disk, metadata, tmp_path)
    assert await texts(store) == bodies
    await store.close()
    for name in [name for name in disk.named if name.startswith("checkpoint/") or name.endswith(".idx")]:
        disk.remove(name)
    store = await open_store(disk, metadata, tmp_path)
    assert await texts(store) == bodies
    await store.close()


@pytest.mark.parametrize("at_once", [1, 3, 5, 7, 1_000])
async def test_places_are_found_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Of full segments and the open one, however few entries of a frame are looked at in one turn of the loop."""
    monkeypatch.setattr(directory_module, "_ENTRIES_AT_ONCE", at_once)
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    for _ in range(30):
        await append(store, messages([b"x" * 2_000] * 5))
    await store.engine.housekeeping.write_indexes()
    assert len(store.engine.log.segments) > 3
    spots = await store.engine.directory.spots(1, 2, 146)
    assert [(spot.first, spot.end) for spot in spots] == [
        (2, 5),
        *((first, first + 5) for first in range(5, 145, 5)),
        (145, 148),
    ]
    assert len({spot.position for spot in spots}) == 30
    assert await store.engine.directory.spots(1, 150, 5) == []
    await store.close()


async def crash(store: LocalStore, disk: MemoryDisk) -> None:
    """End it, and leave the disk as it was just before, without checkpoints: the next start reads the whole log."""
    left = {name: bytes(disk.inodes[inode]) for name, inode in disk.named.items()}
    await store.close()
    for name, data in left.items():
        disk.write_whole(name, [data])
    for name in [name for name in disk.named if name.startswith("checkpoint/")]:
        disk.remove(name)


async def test_damage_below_the_checkpoint_never_gives_an_offset_twice(tmp_path: Path) -> None:
    """A frame whose header cannot be read may have held any queue's messages: the next offset is above all it can
    have held."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    store = await open_store(disk, metadata, tmp_path)
    await append(store, messages([b"a"]))
    await append(store, messages([b"lost"]))
    await append(store, messages([b"of another queue"], number=1))
    await store.engine.writer.flushed(store.engine.log.tail)
    spot = (await store.engine.directory.spots(1, 1, 1))[0]
    await append(store, messages([b"later"], number=1))
    await crash(store, disk)
    segment = disk.inodes[disk.named["log/00000000000000000000.seg"]]
    segment[spot.position : spot.position + 50] = bytes(50)
    store = await open_store(disk, metadata, tmp_path)
    assert (await append(store, messages([b"new"]))).outcomes[0].first_offset > 1
    assert await texts(store, number=1) == [b"of another queue", b"later"]
    with pytest.raises(Internal):
        await store.read(ReadRequest(1, 1, 1, 1000))
    await store.close()


async def test_a_search_by_time_passes_over_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what can be read behind it, and so retention goes on there."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    metadata.settings[1] = TopicSettings(queues=1, retention_ms=1_500)
    store = await open_store(disk, metadata, tmp_path)
    begin = store.engine.time.now_ms() + 1_000
    for number in range(3):
        monkeypatch.setattr(store.engine.time, "now_ms", lambda number=number: begin + 1_000 * number)
        await append(store, messages([b"%d" % number]))
    [spot] = await store.engine.directory.spots(1, 1, 1)
    await crash(store, disk)
    disk.inodes[disk.named["log/00000000000000000000.seg"]][spot.position + HEADER_BYTES] ^= 1
    store = await open_store(disk, metadata, tmp_path)
    assert store.engine.lost == [(1, 1, 2)]
    for ts, offset in ((0, 0), (begin, 0), (begin + 1, 2), (begin + 1_500, 2), (begin + 2_001, 3)):
        assert (await store.offsets_at(TimeRequest([1], ts))).offsets == [offset]
    assert (await store.offsets_at(TimeRequest([1], begin, "born"))).offsets == [3], "none has such a time"
    monkeypatch.setattr(store.engine.time, "now_ms", lambda: begin + 3_000)
    await store.engine.retention.trim()
    assert (await store.queues([1]))[0].start_offset == 2
    await store.close()


async def test_a_directory_is_not_shared(tmp_path: Path) -> None:
    """A second engine on the same directory is refused, one of another group and one of a newer format too."""
    first = await open_store(SystemDisk(tmp_path / "a"), StoreMetadata(), tmp_path)
    with pytest.raises(DirectoryRefused, match="another process"):
        await open_store(SystemDisk(tmp_path / "a"), StoreMetadata(), tmp_path)
    await first.close()
    with pytest.raises(DirectoryRefused, match="belongs to store group"):
        await open_store(SystemDisk(tmp_path / "a"), StoreMetadata(), tmp_path, group="b")
    identity = tmp_path / "a" / "store.json"
    identity.write_text(identity.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(DirectoryRefused, match="format 9"):
        await open_store(SystemDisk(tmp_path / "a"), StoreMetadata(), tmp_path)


async def test_an_older_metadata_database_is_refused(tmp_path: Path) -> None:
    """Epochs never go back: a database restored from before the store's last start is noticed."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    for _ in range(3):
        await (await open_store(disk, metadata, tmp_path)).close()
    metadata.epoch = 1
    with pytest.raises(DirectoryRefused, match="older than this store"):
        await open_store(disk, metadata, tmp_path)


async def test_an_append_outlives_its_caller(tmp_path: Path) -> None:
    """Cancelling the caller does not take the message back."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    call = asyncio.create_task(append(store, messages([b"stays"])))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call})
    await append(store, messages([b"after"]))
    assert await texts(store) == [b"stays", b"after"]
    await store.close()


async def test_an_append_that_is_not_flushed_in_time_has_an_unknown_outcome(tmp_path: Path) -> None:
    """It stands at the tail already: asking again without a sequence may write it twice, so it is not a refusal."""
    disk = MemoryDisk()
    store = await open_store(disk, StoreMetadata(), tmp_path)
    released = threading.Event()
    disk.before_sync = lambda: released.wait(10) and None  # type: ignore[method-assign]  # a sync that hangs
    try:
        with pytest.raises(Unavailable) as error:
            await store.append(AppendRequest([messages([b"late"])], 50))
        assert error.value.code == "unknown_outcome"
    finally:
        released.set()
    await append(store, messages([b"after"]))
    assert await texts(store) == [b"late", b"after"]
    await store.close()


def test_conflict_is_what_the_producers_raise() -> None:
    """The codes that sessions answer with belong to Conflict."""
    assert {"out_of_order", "unknown_producer"} <= set(Conflict.codes)
