"""A store over its life: restarts, damage, a full disk, recycling."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from support.deliveries import turns
from support.disks import MemoryDisk
from support.stores import StoreMetadata, append, bodies_of, messages, open_store, queue

from millpond.core.errors import BelowLocal, Conflict, DiskFull, Internal, NotFound, OffsetOutOfRange, Unavailable
from millpond.core.frame import HEADER_BYTES, ProducerPart
from millpond.metadata.client import TopicSettings
from millpond.store import directory as directory_module
from millpond.store.client import (
    AppendRequest,
    FindRequest,
    GroupRef,
    LagRequest,
    QueueRef,
    ReadRequest,
    ReceiveRequest,
    SeekRequest,
    TimeRequest,
    TimeResult,
)
from millpond.store.commitlog import Segment
from millpond.store.disk import SystemDisk
from millpond.store.fold import operations as ops
from millpond.store.housekeeping import Housekeeping
from millpond.store.identity import DirectoryRefused
from millpond.store.local import LocalStore


async def texts(store: LocalStore, offset: int = 0, number: int = 0) -> list[bytes]:
    """All message bodies of a queue from `offset` on."""
    found: list[bytes] = []
    end = (await store.queues([number + 1]))[0].end_offset
    while offset < end:
        result = await store.read(ReadRequest(number + 1, offset, 1000, 1 << 20))
        found += [body for frame in result.frames for body in bodies_of(frame)]
        offset = result.next_offset
    return found


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


async def test_a_full_disk_refuses_messages_and_takes_acks(tmp_path: Path) -> None:
    """507 once the open segment is full; receive and settle go on; room brings produce back; nothing is lost."""
    disk = MemoryDisk(capacity=3 * 64 * 1024)
    store = await open_store(disk, StoreMetadata(), tmp_path)
    kept = await fill(store)
    group = GroupRef(1, 1, 5)
    result = await store.receive(ReceiveRequest(group, [queue()], "earliest", 10, 1 << 20, 30_000))
    assert len(result.grants) == 1
    disk.capacity = 1 << 30
    assert await texts(store) == kept
    for _ in range(100):
        if (await append(store, messages([b"again"]))).outcomes[0].error is None:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("produce did not come back")
    await store.close()


async def fill(store: LocalStore) -> list[bytes]:
    """Messages until the disk is full; those that were taken."""
    kept: list[bytes] = []
    for number in range(200):
        body = b"%d:" % number + b"x" * 2000
        outcome = (await append(store, messages([body]))).outcomes[0]
        if outcome.error is not None:
            assert outcome.error.code == "disk_full"
            return kept
        kept.append(body)
    pytest.fail("the disk is never full")


async def test_not_even_room_for_state(tmp_path: Path) -> None:
    """Once what is kept back for state is used up as well, whatever would need more of it is refused as disk_full,
    nothing of it is done, and room brings it all back; also for a start."""
    disk, metadata = MemoryDisk(capacity=3 * 64 * 1024), StoreMetadata()
    metadata.settings[1] = TopicSettings(queues=2, retention_bytes=1)
    store = await open_store(disk, metadata, tmp_path)
    await append(store, msgspec.structs.replace(messages([b"other"]), queue=QueueRef(1, 2, 7, 0)))
    kept = await fill(store)
    for operation in (ops.QueueTrim(1, 0), ops.QueueDrop(99)):  # a short one, and the shortest
        with pytest.raises(DiskFull):
            while True:
                store.engine.tail.operation(operation)
    group = GroupRef(1, 1, 5)
    receive = ReceiveRequest(group, [queue(), queue(1)], "latest", 10, 1 << 20, 30_000)
    refused: list[Callable[[], Awaitable[object]]] = [
        lambda: store.receive(receive),
        lambda: store.seek(SeekRequest(group, [queue(), queue(1)], [1, 0], "one", dry_run=False)),
        lambda: store.delete_topic(2),
        store.engine.retention.trim,
    ]
    for call in refused:
        with pytest.raises(DiskFull):
            await call()
    assert not (await store.lag(LagRequest(group, [queue()], "latest"))).queues[0].exists
    assert await texts(store) == kept
    disk.capacity = 1 << 30
    while store.engine.housekeeping.disk_full:
        await store.engine.housekeeping.segment_ready()
    await store.receive(receive)
    lags = (await store.lag(LagRequest(group, [queue(), queue(1)], "latest"))).queues
    assert [(lag.exists, lag.committed) for lag in lags] == [(True, len(kept)), (True, 0)]
    await store.delete_topic(2)
    await store.close()
    store = await open_store(disk, metadata, tmp_path)
    assert await texts(store) == kept
    assert store.engine.quarantined == []
    await store.close()


async def test_who_waits_for_a_segment_hears_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and as disk_full: it is found to be full while an append waits already."""
    monkeypatch.setattr("millpond.store.append.UNFLUSHED_WAIT_MS", 60_000)
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    waited_for = threading.Event()

    def full(_zeroed: bool, *, hurry: Callable[[], bool]) -> Segment:
        assert waited_for.wait(30)
        assert hurry()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(store.engine.log, "allocate_segment", full)
    ready = store.engine.housekeeping.segment_ready

    async def segment_ready() -> None:
        waiting = asyncio.create_task(ready())
        await asyncio.sleep(0)
        waited_for.set()
        await waiting

    monkeypatch.setattr(store.engine.housekeeping, "segment_ready", segment_ready)
    codes = set()
    async with asyncio.timeout(30):
        while not codes:
            outcome = (await append(store, messages([b"x" * 2_000]))).outcomes[0]
            codes |= {outcome.error.code} if outcome.error is not None else set()
    assert codes == {"disk_full"}
    monkeypatch.undo()
    await store.close()


async def test_the_local_disk_is_a_cache(tmp_path: Path) -> None:
    """Above `local_bytes`, segments whose messages are tiered are recycled; older offsets answer BelowLocal, and the
    disk does not grow."""
    disk = MemoryDisk()
    store = await open_store(disk, StoreMetadata(), tmp_path, local_bytes=4 * 64 * 1024, checkpoint_bytes=32 * 1024)
    for round_number in range(60):
        await append(store, messages([b"%d" % round_number + b"x" * 9000]))
        for state in store.engine.fold.queues:
            store.engine.seal_source.tiered(state.ref.queue_id, state.confirmed_end)
        if round_number % 8 == 7:
            await store.engine.housekeeping.checkpoint()
            await store.engine.retention.free(store.engine.housekeeping)
    ends = (await store.queues([1]))[0]
    assert ends.local_offset > 20
    assert disk.allocated < 8 * 64 * 1024
    with pytest.raises(BelowLocal):
        await store.read(ReadRequest(1, 0, 10, 1 << 20))
    assert len(await texts(store, ends.local_offset)) == 60 - ends.local_offset
    await store.close()


@pytest.mark.parametrize("at_the_end", [False, True])
async def test_a_burst_is_recycled_when_no_checkpoint_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    """Nothing is appended after it: the checkpoints that segments wait for are taken all the same, all that they need,
    and none after that. One that stands at the log's end already is not enough: two must cover a segment."""
    monkeypatch.setattr("millpond.store.housekeeping.CHECKPOINT_SECONDS_LEAST", 0)
    limits = {"local_bytes": 4 * 64 * 1024, "checkpoint_bytes": 1 << 30}
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path, **limits)
    housekeeping, log = store.engine.housekeeping, store.engine.log
    for round_number in range(60):
        await append(store, messages([b"%d" % round_number + b"x" * 9000]))
        store.engine.seal_source.tiered(1, round_number + 1)
        if at_the_end and round_number == 5:
            await housekeeping.checkpoint()
    if at_the_end:
        store.engine.writer.mark()
        await housekeeping.checkpoint()
    async with asyncio.timeout(10):
        while len(log.segments) * 64 * 1024 > limits["local_bytes"] or housekeeping._checkpoint_wake.is_set():
            await store.engine.retention.free(housekeeping)
            await asyncio.sleep(0.01)
    tail = log.tail
    await store.engine.retention.free(housekeeping)
    assert (housekeeping._checkpoint_wake.is_set(), log.tail) == (False, tail)
    await store.close()


async def test_retention_of_a_topic(tmp_path: Path) -> None:
    """By size: what is behind the size goes. A topic that is gone from the metadata meanwhile holds up no other."""
    metadata = StoreMetadata()
    store = await open_store(MemoryDisk(), metadata, tmp_path)
    gone = QueueRef(1, 2, 7, 0)
    await append(store, msgspec.structs.replace(messages([b"gone"]), queue=gone))
    for _ in range(10):
        await append(store, messages([b"x" * 1000]))
    metadata.settings[1] = TopicSettings(queues=1, retention_bytes=3500)
    await store.engine.retention.trim()
    ends = await store.queues([1, 7])
    assert [end.start_offset for end in ends] == [7, 0]
    await store.close()


async def test_a_damaged_queue_does_not_hold_up_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own start stays where it is; the others' advance."""
    metadata = StoreMetadata()
    metadata.settings[1] = TopicSettings(queues=2, retention_ms=1)
    store = await open_store(MemoryDisk(), metadata, tmp_path)
    await append(store, messages([b"a"]), messages([b"b"], number=1))
    reads, real = store.engine.reads, store.engine.reads.offsets_at

    async def offsets_at(request: TimeRequest) -> TimeResult:
        if request.queue_ids == [1]:
            raise reads.missing(1, 0)
        return await real(TimeRequest(request.queue_ids, request.ts + 60_000))

    monkeypatch.setattr(reads, "offsets_at", offsets_at)
    await store.engine.retention.trim()
    assert [end.start_offset for end in await store.queues([1, 2])] == [0, 1]
    await store.close()


async def test_a_few_unsealed_messages_do_not_pin_a_segment(tmp_path: Path) -> None:
    """What is not tiered of an old segment is appended again, unchanged: same offset, same timestamp, also after a
    restart."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    config = {"local_bytes": 4 * 64 * 1024, "checkpoint_bytes": 32 * 1024}
    store = await open_store(disk, metadata, tmp_path, **config)
    await append(store, messages([b"small and slow"], number=1))
    stamp = (await store.read(ReadRequest(2, 0, 1, 1000))).frames[0].store_ts
    for round_number in range(60):
        await append(store, messages([b"%d" % round_number + b"x" * 9000]))
        store.engine.seal_source.tiered(1, round_number + 1)
        if round_number % 8 == 7:
            await store.engine.housekeeping.checkpoint()
            await store.engine.retention.free(store.engine.housekeeping)
    assert store.engine.log.first_position > 0
    assert await texts(store, number=1) == [b"small and slow"]
    await store.close()
    store = await open_store(disk, metadata, tmp_path, **config)
    result = await store.read(ReadRequest(2, 0, 1, 1000))
    assert [bodies_of(frame) for frame in result.frames] == [[b"small and slow"]]
    assert result.frames[0].store_ts == stamp
    assert (await append(store, messages([b"next"], number=1))).outcomes[0].first_offset == 1
    await store.close()


@pytest.mark.parametrize("full", [False, True])
async def test_no_room_to_copy_unsealed_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """A round of retention ends all the same, and the next one goes on; on a full disk, which nothing else would give
    room, the messages are sealed instead."""
    config = {"local_bytes": 2 * 64 * 1024, "checkpoint_bytes": 8192}
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path, **config)
    housekeeping, retention = store.engine.housekeeping, store.engine.retention
    await append(store, messages([b"small and slow"], number=1))
    for number in range(30):
        await append(store, messages([b"x" * 9000]))
        store.engine.seal_source.tiered(1, number + 1)
    for _ in range(2):
        store.engine.writer.mark(again=True)
        await housekeeping.checkpoint()
    await housekeeping.write_indexes()
    assert retention.wanted() is not None
    sealed: list[int] = []

    async def seal(topic_id: int) -> None:
        sealed.append(topic_id)
        store.engine.seal_source.tiered(2, 1)

    with monkeypatch.context() as patch:
        patch.setattr(store.engine.tail, "has_room", lambda _: False)
        patch.setattr(Housekeeping, "disk_full", property(lambda _: full, lambda *_: None), raising=False)
        patch.setattr(retention, "_seal", seal)
        async with asyncio.timeout(10):
            await retention.free(housekeeping)
    assert sealed == [1] * full
    assert (store.engine.log.first_position > 0) == full
    await retention.free(housekeeping)
    assert store.engine.log.first_position > 0
    await store.close()


async def test_what_shared_a_segment_with_copied_messages_is_in_the_tier(tmp_path: Path) -> None:
    """Of a recycled segment, what was tiered is no longer local, though something else in it was copied."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path, local_bytes=4 * 64 * 1024, checkpoint_bytes=8192)
    await append(store, messages([b"never sealed"], number=1))
    count = 0
    while store.engine.log.first_position == 0:
        await append(store, messages([b"%d" % count + b"x" * 9000]))
        count += 1
        store.engine.seal_source.tiered(1, count)
        await store.engine.housekeeping.checkpoint()
        await store.engine.retention.free(store.engine.housekeeping)
    with pytest.raises(BelowLocal) as cold:
        await store.read(ReadRequest(1, 0, 10, 1 << 20))
    local = cold.value.extra["first_local_offset"]
    assert 0 < local == (await store.queues([1]))[0].local_offset
    assert len(await texts(store, local)) == count - local
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
    left = {name: bytes(disk.inodes[inode]) for name, inode in disk.named.items()}
    await store.close()
    for name, data in left.items():
        disk.write_whole(name, [data])
    segment = disk.inodes[disk.named["log/00000000000000000000.seg"]]
    segment[spot.position : spot.position + 50] = bytes(50)
    for name in [name for name in disk.named if name.startswith("checkpoint/")]:
        disk.remove(name)
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
    left = {name: bytes(disk.inodes[inode]) for name, inode in disk.named.items()}
    await store.close()
    for name, data in left.items():
        disk.write_whole(name, [data])
    disk.inodes[disk.named["log/00000000000000000000.seg"]][spot.position + HEADER_BYTES] ^= 1
    for name in [name for name in disk.named if name.startswith("checkpoint/")]:
        disk.remove(name)
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


async def test_a_deleted_topic_does_not_come_back(tmp_path: Path) -> None:
    """Who has not heard of it yet opens none of its queues again: by a message, a receive, or a seek."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    await append(store, messages([b"a"]), messages([b"b"], number=1))
    await store.delete_topic(1)
    outcomes = (await append(store, messages([b"late"]), messages([b"late"], number=2))).outcomes
    assert [outcome.error and outcome.error.code for outcome in outcomes] == ["topic_not_found"] * 2
    group = GroupRef(1, 1, 5)
    with pytest.raises(NotFound):
        await store.receive(ReceiveRequest(group, [queue()], "earliest", 10, 1 << 20, 30_000))
    with pytest.raises(NotFound):
        await store.seek(SeekRequest(group, [queue()], [0], "one", dry_run=False))
    assert list(store.engine.fold.queues) == []
    await store.close()


async def test_nothing_is_left_of_a_deleted_topic(tmp_path: Path) -> None:
    """Receives that wait are told at once, and neither the group nor what its topic has gathered is kept."""
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    other, group = QueueRef(1, 2, 7, 0), GroupRef(1, 1, 5)
    await append(store, messages([b"a"]), msgspec.structs.replace(messages([b"b"]), queue=other))
    request = ReceiveRequest(group, [queue()], "latest", 10, 1 << 20, 30_000, wait_ms=30_000)
    kept = ReceiveRequest(GroupRef(1, 2, 6), [other], "latest", 10, 1 << 20, 30_000)
    await store.receive(kept)
    async with asyncio.timeout(10):
        waiting = asyncio.create_task(store.receive(request))
        await turns()
        assert store.engine.delivery.waiting == 1
        await store.delete_topic(1)
        with pytest.raises(NotFound) as error:
            await waiting
    assert error.value.code == "topic_not_found"
    assert [each.ref.group_id for each in store.engine.delivery._groups] == [6]
    assert list(store.engine.seal_source._gathered) == [2]
    await store.close()


async def test_no_more_deleted_topics_are_remembered_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was deleted first is forgotten first."""
    monkeypatch.setattr("millpond.store.tail.DROPPED_TOPICS", 1)
    store = await open_store(MemoryDisk(), StoreMetadata(), tmp_path)
    for topic_id in (1, 2):
        await store.delete_topic(topic_id)
    other = msgspec.structs.replace(messages([b"a"]), queue=QueueRef(1, 2, 7, 0))
    outcomes = (await append(store, messages([b"a"]), other)).outcomes
    assert [outcome.error is None for outcome in outcomes] == [True, False]
    await store.close()


async def test_topics_that_were_deleted_while_the_store_was_away(tmp_path: Path) -> None:
    """A round of retention drops them. A late message in a queue that the tier has more of does not keep the store from
    starting; in a queue of a living topic, or of one that metadata never had, that is an older copy of the log."""
    disk, metadata = MemoryDisk(), StoreMetadata()
    store = await open_store(disk, metadata, tmp_path)
    await append(store, messages([b"late"]), msgspec.structs.replace(messages([b"b"]), queue=QueueRef(1, 2, 7, 0)))
    metadata.settings = {2: None}
    await store.engine.retention.trim()
    assert [each.ref.topic_id for each in store.engine.fold.queues] == [1]
    await store.close()
    metadata.tiered = {1: 900}
    for settings in ({}, {1: TopicSettings(queues=1)}):
        metadata.settings = settings
        with pytest.raises(DirectoryRefused, match="older copy"):
            await open_store(disk, metadata, tmp_path)
    metadata.settings = {1: None}
    store = await open_store(disk, metadata, tmp_path)
    assert list(store.engine.fold.queues) == []
    await store.close()
