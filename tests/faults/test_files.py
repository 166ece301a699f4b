"""Files of a stopped standalone, cut, flipped, deleted: what recovery makes of each.

The files are real: written by a standalone that was killed. Each damage is done to a copy in memory and opened by the
store's engine there, so that hundreds take seconds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from support.disks import MemoryDisk
from support.load import Http
from support.processes import Process, standalone
from support.stores import StoreMetadata, append, bodies_of, messages, open_store

from millpond.core.errors import Internal
from millpond.core.frame import HEADER_BYTES
from millpond.store.client import ReadRequest, StoredFrame
from millpond.store.local import LocalStore

QUEUES = 2
BATCHES = 120
SEGMENT_BYTES = 64 * 1024
LOG, CHECKPOINT = "log/", "checkpoint/"


class Files(NamedTuple):
    """What a killed standalone left. `bodies` by queue id; `frames` of all queues in order of position."""

    left: dict[str, bytes]
    bodies: dict[int, list[bytes]]
    frames: list[StoredFrame]
    end: int
    checkpoint: int
    fold: dict[str, pa.Table]

    def disk(self) -> MemoryDisk:
        disk = MemoryDisk()
        for name, data in self.left.items():
            disk.write_whole(name, [data])
        return disk


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311  # so that a failure can be repeated


async def fill(service: Process, chance: random.Random, batches: range) -> None:
    """Batches with keys and a session to each queue; a group that acks most of what it has leased."""
    http = Http(service.url)
    await http.ok("PUT", "/v1/topics/kept", {"queues": QUEUES})
    await http.ok("PUT", "/v1/topics/kept/groups/readers", {"start": "earliest"})
    for number in batches:
        queue = number % QUEUES
        bodies = [f"{number}.{row}:" + "x" * chance.randrange(900) for row in range(3)]
        last = number * 10 + 2
        previous = last - 10 * QUEUES if number >= QUEUES else None
        part = {"id": "session", "queue": queue, "previous": previous, "first": number * 10, "last": last}
        sent = {"messages": [{"body": body, "key": f"k{queue}"} for body in bodies], "producer": part}
        await http.ok("POST", "/v1/topics/kept/messages", sent)
        if number % 6 == 5:
            at = "/v1/topics/kept/groups/readers/messages"
            got = await http.ok("POST", f"{at}/receive", {"max_messages": 10, "lease_ms": 3_600_000})
            acks = [one["lease_id"] for one in got["messages"][:9]]
            await http.ok("POST", f"{at}/ack", {"acks": acks})
    await http.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The directory of a standalone that was killed after a few segments and checkpoints."""
    folder = tmp_path_factory.mktemp("files")
    service = standalone(folder, "--segment-bytes", str(SEGMENT_BYTES), "--checkpoint-bytes", "30000")
    try:
        return asyncio.run(_files(service, folder))
    finally:
        service.close()


async def _files(service: Process, folder: Path) -> Files:
    chance = seeded(7)
    await service.start()
    await fill(service, chance, range(BATCHES // 2))
    await service.stop()  # leaves a checkpoint, the next one is taken under way
    await service.start()
    await fill(service, chance, range(BATCHES // 2, BATCHES))
    service.kill()
    root = folder / "data" / "store"
    left = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    left.pop("lock")
    checkpoint = max(int(Path(name).stem) for name in left if name.startswith(CHECKPOINT))
    made = Files(left, {}, [], 0, checkpoint, {})
    async with opened(made.disk()) as store:
        frames = [frame for queue_id in queue_ids(store) for frame in await frames_of(store, queue_id)]
        bodies = {queue_id: [] for queue_id in queue_ids(store)}
        for frame in frames:
            bodies[frame.queue_id] += bodies_of(frame)
        fold = store.engine.fold.snapshot()()
    frames.sort(key=lambda frame: frame.position)
    made = made._replace(bodies=bodies, frames=frames, end=end_of(frames[-1]), fold=fold)
    assert sum(map(len, bodies.values())) == 3 * BATCHES
    assert len([name for name in left if name.endswith(".idx")]) >= 2, "the log has closed segments"
    assert len([name for name in left if name.startswith(CHECKPOINT)]) == 2, "the log has two checkpoints"
    assert checkpoint < frames[-10].position, "frames stand above the checkpoint"
    return made


@asynccontextmanager
async def opened(disk: MemoryDisk) -> AsyncIterator[LocalStore]:
    metadata = StoreMetadata()
    metadata.epoch = 1000
    store = await open_store(disk, metadata, Path("/nonexistent"))
    try:
        yield store
    finally:
        await store.close()


def queue_ids(store: LocalStore) -> list[int]:
    return sorted(queue.ref.queue_id for queue in store.engine.fold.queues)


def end_of(frame: StoredFrame) -> int:
    return frame.position + HEADER_BYTES + len(frame.sidecar) + len(frame.payload)


async def frames_of(store: LocalStore, queue_id: int) -> list[StoredFrame]:
    """Every frame of a queue; its offsets are dense."""
    ends = (await store.queues([queue_id]))[0]
    found: list[StoredFrame] = []
    offset = ends.start_offset
    while offset < ends.end_offset:
        result = await store.read(ReadRequest(queue_id, offset, 10_000, 1 << 24))
        found += result.frames
        assert result.next_offset > offset
        offset = result.next_offset
    rows = [frame.first_offset + row for frame in found for row in range(frame.count)]
    assert rows == list(range(ends.start_offset, ends.end_offset))
    return found


async def content(store: LocalStore, queue_id: int) -> list[bytes]:
    return [body for frame in await frames_of(store, queue_id) for body in bodies_of(frame)]


async def whole(files: Files, disk: MemoryDisk) -> None:
    """Nothing is missing, and the store is the same as before: cursors, leases and sessions too."""
    async with opened(disk) as store:
        assert {queue_id: await content(store, queue_id) for queue_id in queue_ids(store)} == files.bodies
        fold = store.engine.fold.snapshot()()
        assert fold.keys() == files.fold.keys()
        for name, table in fold.items():
            assert table.equals(files.fold[name]), name
        assert (await store.status()).quarantined == []


# -- the end of the log, cut -----------------------------------------------------------------------------------


def segment_of(position: int) -> str:
    return f"{LOG}{position - position % SEGMENT_BYTES:020d}.seg"


async def check_cut(files: Files, at: int, filling: bytes) -> None:
    """The log ends at byte `at`, other bytes follow: exactly the frames before the first spoilt one are there."""
    disk = files.disk()
    segment = disk.inodes[disk.named[segment_of(at)]]
    before, start = bytes(segment), at % SEGMENT_BYTES
    segment[start:] = (filling * SEGMENT_BYTES)[: SEGMENT_BYTES - start]
    for name in [name for name in disk.named if name.startswith(LOG) and name > segment_of(at)]:
        disk.remove(name)
    spoilt = at + next(byte for byte in range(SEGMENT_BYTES) if segment[start + byte] != before[start + byte])
    async with opened(disk) as store:
        for queue_id, bodies in files.bodies.items():
            kept = [frame for frame in files.frames if frame.queue_id == queue_id and end_of(frame) <= spoilt]
            assert await content(store, queue_id) == bodies[: sum(frame.count for frame in kept)], at
        number = 0
        before = len(await content(store, 1))
        result = await append(store, messages([b"after"], number=number))
        assert result.outcomes[0].first_offset == before
        assert (await content(store, 1))[-1] == b"after"


def cuts(files: Files) -> list[int]:
    """Every byte of the last six frames of the log's last segment, and of all that stands between and behind them."""
    base = files.end - files.end % SEGMENT_BYTES
    last = [frame.position for frame in files.frames[-6:] if frame.position >= max(base, files.checkpoint)]
    assert len(last) > 2, "enough frames stand in the open segment"
    return list(range(last[0], files.end + 200))


async def test_the_log_cut_in_its_last_frames(files: Files) -> None:
    """Cut at a sample of bytes, with zeros or noise behind the cut: what is whole is kept, the next offset follows."""
    chance = seeded(1)
    for number, at in enumerate(sorted(chance.sample(cuts(files), 100))):
        await check_cut(files, at, b"\0" if number % 2 else chance.randbytes(97))


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_the_log_cut_at_every_byte_of_its_last_frames(files: Files) -> None:
    """The same at every byte of the last frames."""
    chance = seeded(2)
    for number, at in enumerate(cuts(files)):
        await check_cut(files, at, b"\0" if number % 2 else chance.randbytes(97))


# -- bits flipped in the middle of the log ---------------------------------------------------------------------


async def check_flip(files: Files, position: int, bit: int) -> bool:
    """One bit of the log is wrong: only the frame it stands in may be lost, and only with an error that says so.

    True when messages were lost."""
    disk = files.disk()
    disk.inodes[disk.named[segment_of(position)]][position % SEGMENT_BYTES] ^= 1 << bit
    hit = [frame for frame in files.frames if frame.position <= position < end_of(frame)]
    lost = False
    async with opened(disk) as store:
        assert queue_ids(store) == sorted(files.bodies)
        for queue_id, bodies in files.bodies.items():
            frames = [frame for frame in files.frames if frame.queue_id == queue_id]
            for frame in frames:
                expected = bodies[frame.first_offset : frame.first_offset + frame.count]
                try:
                    result = await store.read(ReadRequest(queue_id, frame.first_offset, 1, 1))
                except Internal as error:
                    assert error.code == "corrupt_range"
                    assert frame in hit, f"byte {position}: the frame at {frame.position} is whole"
                    lost = True
                    continue
                assert bodies_of(result.frames[0]) == expected
        end = (await store.queues([1]))[0].end_offset
        assert end >= len(files.bodies[1])
        assert (await append(store, messages([b"after"], number=0))).outcomes[0].first_offset == end
        quarantined = (await store.status()).quarantined
        assert all(any(first <= frame.position < end for frame in hit) for first, end in quarantined) or not hit
        assert bool(quarantined) or not lost
    return lost


def flips(files: Files, chance: random.Random, number: int) -> list[tuple[int, int]]:
    """(byte, bit) below the last ten frames, most of them in frames of messages, a third of those in headers."""
    found = []
    for _ in range(number):
        frame = files.frames[chance.randrange(len(files.frames) - 10)]
        length = HEADER_BYTES if chance.random() < 0.33 else end_of(frame) - frame.position
        found.append((frame.position + chance.randrange(length), chance.randrange(8)))
    return found + [(chance.randrange(files.frames[-10].position), chance.randrange(8)) for _ in range(number // 4)]


async def test_bits_flipped_in_the_middle_of_the_log(files: Files) -> None:
    """A sample: the damaged range answers corrupt_range, everything else is read, no offset is given twice."""
    lost = [await check_flip(files, position, bit) for position, bit in flips(files, seeded(3), 50)]
    assert 10 < sum(lost) < len(lost)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_many_bits_flipped_in_the_middle_of_the_log(files: Files) -> None:
    """The same for two thousand bits."""
    for position, bit in flips(files, seeded(4), 2000):
        await check_flip(files, position, bit)


# -- other files -----------------------------------------------------------------------------------------------


def names(disk: MemoryDisk, start: str, end: str) -> list[str]:
    return sorted(name for name in disk.named if name.startswith(start) and name.endswith(end))


def removed(start: str, end: str, newest: int | None = None) -> Callable[[MemoryDisk], None]:
    def damage(disk: MemoryDisk) -> None:
        for name in names(disk, start, end)[-newest if newest else None :]:
            disk.remove(name)

    return damage


def flipped(start: str, end: str, at: float, newest: int | None = None) -> Callable[[MemoryDisk], None]:
    """One bit of each of these files is wrong, `at` this share of its length."""

    def damage(disk: MemoryDisk) -> None:
        for name in names(disk, start, end)[-newest if newest else None :]:
            data = disk.inodes[disk.named[name]]
            data[int(at * (len(data) - 1))] ^= 16

    return damage


def shortened(start: str, end: str) -> Callable[[MemoryDisk], None]:
    def damage(disk: MemoryDisk) -> None:
        for name in names(disk, start, end)[-1:]:
            data = disk.inodes[disk.named[name]]
            del data[len(data) // 2 :]

    return damage


DAMAGES: dict[str, Any] = {
    "no index": removed(LOG, ".idx"),
    "an index missing": removed(LOG, ".idx", 1),
    **{f"indexes wrong at {at}": flipped(LOG, ".idx", at) for at in (0, 0.1, 0.5, 0.9, 1)},
    "an index cut short": shortened(LOG, ".idx"),
    "no newest checkpoint": removed(CHECKPOINT, ".ckpt", 1),
    "no checkpoint": removed(CHECKPOINT, ".ckpt"),
    **{f"newest checkpoint wrong at {at}": flipped(CHECKPOINT, ".ckpt", at, 1) for at in (0, 0.01, 0.3, 0.7, 1)},
    "all checkpoints wrong": flipped(CHECKPOINT, ".ckpt", 0.5),
    "newest checkpoint cut short": shortened(CHECKPOINT, ".ckpt"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_what_is_rebuildable_is_rebuilt(files: Files, damage: str) -> None:
    """With indexes or checkpoints deleted or damaged every message, cursor, lease and session is back."""
    disk = files.disk()
    before = {name: bytes(disk.inodes[inode]) for name, inode in disk.named.items()}
    DAMAGES[damage](disk)
    assert {name: bytes(disk.inodes[inode]) for name, inode in disk.named.items()} != before
    await whole(files, disk)


async def test_undamaged_files_are_whole(files: Files) -> None:
    """The measure itself: without any damage all is as it was."""
    await whole(files, files.disk())
