"""Sealing in a process of its own, over a real store: what it makes, and what becomes of its death."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.config import StoreConfig, TierConfig
from millpond.core.errors import Unavailable
from millpond.core.frame import Sidecar, pack_sidecar
from millpond.core.limits import SEAL_GENTLE_BYTES_PER_SECOND
from millpond.core.schema import message_schema
from millpond.core.tier.directory import DirectoryObjects
from millpond.metadata.client import TopicSettings
from millpond.metadata.local import LocalMetadata
from millpond.store.client import AppendRequest, QueueAppend, QueueRef
from millpond.store.disk import SystemDisk
from millpond.store.engine import Engine
from millpond.store.local import LocalStore
from millpond.store.seal_source import EngineSealSource
from millpond.store.tier import apart, pace
from millpond.store.tier.apart import Process, WorkApart
from millpond.store.tier.channel import Channel, Message, Pace
from millpond.store.tier.child import Sealing

SEGMENT_BYTES = 1 << 20


class Place:
    """A store whose segments are small, its tier in a directory, a topic of two queues, and its sealing process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def open(self) -> None:
        clock, random = SystemClock(), SystemRandom()
        self.metadata = await LocalMetadata.open(f"sqlite:///{self.folder}/metadata.db", clock, random)
        self.objects = DirectoryObjects(self.folder / "tier", clock, random)
        config = StoreConfig(data=str(self.folder / "store"), segment_bytes=SEGMENT_BYTES, local_bytes=1 << 40)
        disk = await asyncio.to_thread(SystemDisk, Path(config.data))
        tier = TierConfig()
        self.engine = await Engine.open(config, tier, disk, self.metadata, self.objects, clock, random, seal_apart=True)
        self.store = LocalStore(self.engine)
        self.topic, _ = await self.metadata.put_topic("default", "orders", TopicSettings(queues=2))

    async def close(self) -> None:
        await self.store.close()
        await self.objects.close()
        await self.metadata.close()

    async def append(self, queue: int, bodies: list[bytes]) -> None:
        batch = pa.record_batch([pa.array(bodies, pa.binary())], schema=message_schema(0))
        payload, none = batch.serialize(), np.zeros(len(bodies), np.uint32)
        sidecar = pa.py_buffer(pack_sidecar(Sidecar(none, none, None, None, None, [])))
        crc = google_crc32c.value(payload)
        ref = QueueRef(self.topic.tenant_id, self.topic.topic_id, self.topic.queues[queue].queue_id, queue)
        one = QueueAppend(ref, len(bodies), 0, 0, sidecar, payload, crc, payload.size, "flush", [], 0)
        await self.store.append(AppendRequest([one], 10_000))

    async def fill(self, frames: int = 30) -> None:
        for number in range(frames):
            await self.append(number % 2, [b"%06d" % number * 10_000])

    async def seal(self) -> dict[int, int]:
        return await self.engine.sealer.seal_topic(self.topic.topic_id)

    @property
    def work(self) -> WorkApart:
        work = self.engine.sealer._work
        assert isinstance(work, WorkApart)
        return work

    @property
    def process(self) -> Process:
        assert self.work._process is not None
        return self.work._process

    async def sealed(self) -> dict[int, list[bytes]]:
        """Bodies of each queue by the manifest; every offset once."""
        found: dict[int, dict[int, bytes]] = {0: {}, 1: {}}
        for obj in (await self.metadata.tier_view(self.topic.topic_id)).objects:
            table = pq.read_table(self.folder / "tier" / obj.path, partitioning=None)
            for queue, offset, body in zip(
                *(table[name].to_pylist() for name in ("queue", "offset", "body")), strict=True
            ):
                assert offset not in found[queue], "every offset once"
                found[queue][offset] = body
        return {queue: [rows[offset] for offset in sorted(rows)] for queue, rows in found.items()}

    def temporary(self) -> list[Path]:
        return list((self.folder / "tier" / ".tmp").iterdir())


def wanted(frames: int = 30) -> dict[int, list[bytes]]:
    return {queue: [b"%06d" % number * 10_000 for number in range(queue, frames, 2)] for queue in (0, 1)}


@pytest.fixture(name="place")
async def _place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    await place.open()
    yield place
    await place.close()


async def gone(process: Process) -> int | None:
    """Its exit code, once it has ended."""
    return await asyncio.get_running_loop().run_in_executor(None, process._popen.wait, 20)


def when_asked(monkeypatch: pytest.MonkeyPatch, place: Place, act: Any) -> None:
    """`act()` once, when the process asks where frames are."""
    spots, left = place.engine.seal_source.spots, [act]

    async def first(*arguments: Any) -> Any:
        if left:
            left.pop()()
        return await spots(*arguments)

    monkeypatch.setattr(place.engine.seal_source, "spots", first)


async def test_it_seals_what_the_log_holds(place: Place) -> None:
    """Frames of several segments, closed and open, of both queues, as one object; nothing temporary stays."""
    await place.fill(60)
    await place.seal()
    assert len(place.engine.log.segments) > 3
    assert await place.sealed() == wanted(60)
    assert place.temporary() == []
    assert place.engine.sealer.counters()["seal_failures_total"] == 0


async def test_its_command_line_says_nothing(place: Place) -> None:
    """Settings and places go over the channel: others on the machine see none of them."""
    await place.fill(1)
    await place.seal()
    line = Path(f"/proc/{place.process._popen.pid}/cmdline").read_bytes().split(b"\0")[1:-1]
    assert line[:3] == [b"-P", b"-m", b"millpond.store.tier.child"]
    assert line[3].isdigit()
    assert line[4:] == [b"idle"]


async def test_it_runs_when_nobody_else_wants_the_core(place: Place) -> None:
    """Every thread of it has the idle policy, which counts within one session only where Linux groups by session."""
    await place.fill(1)
    await place.seal()
    pid = place.process._popen.pid
    assert os.getsid(pid) == os.getsid(0)
    threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
    assert len(threads) > 2
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_IDLE}


def test_it_stands_back_from_its_first_moment_on() -> None:
    """Also while it imports what it needs."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        popen = apart._start(theirs.fileno(), eager=False)
        policy = os.sched_getscheduler(popen.pid)
        popen.kill()
        popen.wait(10)
    assert policy == os.SCHED_IDLE


@pytest.mark.parametrize(
    ("appended", "half"), [(0, True), (SEAL_GENTLE_BYTES_PER_SECOND, False)], ids=["little", "much"]
)
async def test_beside_work_it_leaves_half_of_the_cores_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch, appended: int, half: bool
) -> None:
    """Every thread of it, as long as little is appended; to keep up with much it takes what it gets."""
    enough = max(SEAL_GENTLE_BYTES_PER_SECOND, 2 * appended)
    monkeypatch.setattr(pace.Pace, "begin", lambda *_: enough)
    monkeypatch.setattr(pace.Pace, "look", lambda *_: enough)
    await place.fill(1)
    await place.seal()
    cores = sorted(os.sched_getaffinity(0))
    wanted = set(cores[len(cores) // 2 :] if half else cores)
    threads = list(Path(f"/proc/{place.process._popen.pid}/task").iterdir())
    assert len(threads) > 2
    assert [os.sched_getaffinity(int(path.name)) for path in threads] == [wanted] * len(threads)


async def test_at_rest_it_takes_all_cores_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "LOOK_SECONDS", 0.05)
    enough = [SEAL_GENTLE_BYTES_PER_SECOND]
    monkeypatch.setattr(pace.Pace, "begin", lambda *_: enough[0])
    monkeypatch.setattr(pace.Pace, "look", lambda *_: enough[0])
    await place.fill(1)
    await place.seal()
    enough[0] = 0
    threads = list(Path(f"/proc/{place.process._popen.pid}/task").iterdir())
    async with asyncio.timeout(20):
        while any(os.sched_getaffinity(int(path.name)) != os.sched_getaffinity(0) for path in threads):
            await place.fill(1)
            await place.seal()


async def test_behind_another_process_stands_back_no_longer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk holds too much, the next run is made at the usual priority; the process before has ended."""
    await place.fill(4)
    await place.seal()
    first = place.process
    monkeypatch.setattr(EngineSealSource, "behind", True)
    await place.fill(4)
    await place.seal()
    assert place.process is not first
    assert await gone(first) in {0, -signal.SIGKILL}  # which it is where the cores leave it none to end by itself
    pid = place.process._popen.pid
    assert (os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)) == (os.SCHED_OTHER, 0)
    rows = await place.sealed()
    assert [len(rows[queue]) for queue in (0, 1)] == [4, 4]


async def test_behind_is_a_quarter_more_than_the_disk_should_hold(place: Place) -> None:
    """As long as it holds less, sealing is in no hurry."""
    source = place.engine.seal_source
    await place.fill(60)
    held = len(place.engine.log.segments) * SEGMENT_BYTES
    source._local_bytes = held
    assert not source.behind
    source._local_bytes = held * 3 // 4
    assert source.behind


async def test_killed_at_work_it_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is told; the next pass seals everything, once."""
    await place.fill(2)
    await place.seal()
    await place.fill(30)
    first = place.process
    when_asked(monkeypatch, place, first._popen.kill)
    with pytest.raises(Unavailable, match="sealing process"):
        await place.seal()
    await place.seal()
    assert place.process is not first
    rows = await place.sealed()
    assert [len(rows[queue]) for queue in (0, 1)] == [16, 16]


async def test_killed_between_put_and_commit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that was put is committed, once, whatever became of the process."""
    await place.fill(4)
    commit = place.metadata.tier_commit

    async def after_death(*arguments: Any) -> Any:
        if place.work._process is not None:
            place.process._popen.kill()
            await gone(place.process)
        return await commit(*arguments)

    monkeypatch.setattr(place.metadata, "tier_commit", after_death)
    await place.seal()
    assert await place.sealed() == wanted(4)


async def test_a_process_that_hangs_is_killed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing for too long: whoever waits is told, and another one takes its place."""
    await place.fill(2)
    await place.seal()
    await place.fill(2)
    monkeypatch.setattr(apart, "SEAL_SILENT_SECONDS", 0.3)
    place.process._popen.send_signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match="sealing process"):
        await place.seal()
    monkeypatch.setattr(apart, "SEAL_SILENT_SECONDS", 60)
    await place.seal()
    rows = await place.sealed()
    assert [len(rows[queue]) for queue in (0, 1)] == [2, 2]


async def test_it_ends_with_the_store(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the store ended, its end of the channel is closed: the process ends, and removes what it had staged."""
    await place.fill(30)
    staged = asyncio.Event()
    held = asyncio.Event()
    start = place.metadata.tier_start

    async def hold(*arguments: Any) -> Any:
        staged.set()
        await held.wait()
        return await start(*arguments)

    monkeypatch.setattr(place.metadata, "tier_start", hold)
    sealing = asyncio.create_task(place.seal())
    async with asyncio.timeout(30):
        await staged.wait()
    assert place.temporary() != []
    place.process.channel._writer.transport.abort()
    assert await gone(place.process) == 0
    assert place.temporary() == []
    held.set()
    with pytest.raises(Unavailable):
        await sealing


@pytest.fixture(name="told")
def _told(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[Pace]:
    """What sealing processes are told from here on, looked at twenty times a second."""
    monkeypatch.setattr(pace, "LOOK_SECONDS", 0.05)
    told: asyncio.Queue[Pace] = asyncio.Queue()
    tell = Channel.tell

    def listened(self: Channel, message: Message) -> None:
        if isinstance(message, Pace):
            told.put_nowait(message)
        tell(self, message)

    monkeypatch.setattr(Channel, "tell", listened)
    return told


async def test_it_is_told_whether_the_log_is_still(place: Place, told: asyncio.Queue[Pace]) -> None:
    """A segment is read past the page cache while nothing is appended: else a write would wait for such a read."""
    await place.fill(1)
    await place.seal()
    async with asyncio.timeout(20):
        assert not (await told.get()).still
        while not (await told.get()).still:
            pass
        await place.fill(1)
        while (await told.get()).still:
            pass


async def test_a_rest_ends_with_the_first_message(
    place: Place, told: asyncio.Queue[Pace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told to be slow at once, whatever the last look found, and until the next one only."""
    monkeypatch.setattr(pace.Pace, "look", lambda *_: 0)
    await place.fill(1)
    await place.seal()
    async with asyncio.timeout(20):
        while await told.get() != Pace(0, True):
            pass
        await place.fill(1)
        assert await told.get() == Pace(SEAL_GENTLE_BYTES_PER_SECOND, False)
        assert not (await told.get()).bytes_per_second


@pytest.mark.parametrize(
    ("told", "eager", "long"),
    [
        (Pace(0, True), False, True),
        (Pace(0, False), False, False),
        (Pace(1 << 30, True), False, False),
        (Pace(0, True), True, False),
    ],
    ids=["at rest", "a little is appended", "the store is at work", "others want the cores"],
)
async def test_the_disk_is_held_for_longer_when_nobody_waits_for_it(
    place: Place, told: Pace, eager: bool, long: bool
) -> None:
    """Long steps are for a store at rest: also one that has much of its core left may flush now and then."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel = await Channel.open(ours, 1)
        sealing = Sealing(channel, eager=eager)
        try:
            await sealing.handle(place.work._begin)
            await sealing.handle(told)
            assert sealing._steps.long is long
        finally:
            await sealing.end()
            channel.close("the test ends")


async def test_signals_for_the_store_are_not_for_it(place: Place) -> None:
    """A manager that tells every process to end lets the store drain first; a terminal's Ctrl-C does not reach it, nor
    does the terminal stop it."""
    await place.fill(2)
    await place.seal()
    assert os.getpgid(place.process._popen.pid) != os.getpgid(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTTOU):
        place.process._popen.send_signal(number)
    await place.fill(2)
    await place.seal()
    assert place.process._popen.poll() is None


async def test_without_work_it_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while; it costs nothing at rest. What comes later is sealed by another one."""
    await place.fill(2)
    await place.seal()
    process = place.process
    await place.work.rest()
    assert process._popen.poll() is None
    monkeypatch.setattr(apart, "SEAL_REST_SECONDS", 0)
    await place.work.rest()
    assert process._popen.returncode == 0
    await place.fill(2)
    await place.seal()
    assert place.process is not process


async def test_a_cancelled_run_ends_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what it has done by then; the next run is another one's."""
    await place.fill(2)
    await place.seal()
    process = place.process
    asked = asyncio.Event()
    when_asked(monkeypatch, place, asked.set)
    await place.fill(30)
    sealing = asyncio.create_task(place.seal())
    async with asyncio.timeout(30):
        await asked.wait()
    sealing.cancel()
    await asyncio.gather(sealing, return_exceptions=True)
    assert await gone(process) is not None
    await place.seal()
    rows = await place.sealed()
    assert [len(rows[queue]) for queue in (0, 1)] == [16, 16]


async def test_damage_is_found_quarantined_and_sealed_around(place: Place) -> None:
    """The process finds a damaged frame, the store looks and says so: what is before and behind it is sealed."""
    await place.fill(10)
    queue_id = place.topic.queues[0].queue_id
    (spot,) = await place.engine.directory.spots(queue_id, 2, 1)
    segment = place.engine.log.segment_of(spot.position)
    assert segment is not None
    segment.file.write(spot.position - segment.base + spot.length // 2, [b"\xff" * 8])
    await asyncio.to_thread(segment.file.sync)
    place.engine.reader._recent._frames.clear()
    tiered = await place.seal()
    assert tiered[queue_id] == 5
    assert place.engine.quarantined == [(spot.position, spot.position + spot.length)]
    rows = await place.sealed()
    assert rows[0] == [body for number, body in enumerate(wanted(10)[0]) if number != 2]
    assert rows[1] == wanted(10)[1]


@pytest.mark.parametrize("part", [False, True])
async def test_a_segment_that_the_process_cannot_read(place: Place, *, part: bool) -> None:
    """Not at all, or no longer to its end. The store can, so nothing is damaged: sealing waits, says why, and loses
    nothing."""
    await place.fill(40)
    path = place.folder / "store" / "log" / f"{0:020d}.seg"
    away = path.rename(path.with_suffix(".away"))
    if part:
        path.write_bytes(away.read_bytes()[: SEGMENT_BYTES // 2])
    with pytest.raises(Unavailable, match="cannot be read for sealing"):
        await place.seal()
    assert place.engine.quarantined == []
    away.rename(path)
    await place.seal()
    assert await place.sealed() == wanted(40)


async def test_a_queue_that_is_dropped_meanwhile(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that is deleted while it is sealed is no failure of sealing."""
    await place.fill(30)

    def drop() -> None:
        for queue in place.topic.queues:
            place.engine.fold.queues.drop(queue.queue_id)

    when_asked(monkeypatch, place, drop)
    assert await place.engine.sealer.seal_once(SystemClock().wall_ms()) == 0
    assert place.engine.sealer.counters()["seal_failures_total"] == 0


async def test_a_tier_that_is_full(place: Place) -> None:
    """The process says what the disk says; nothing temporary stays, and the store goes on."""
    await place.fill(2)
    (place.folder / "tier").mkdir(exist_ok=True)
    (place.folder / "tier" / ".tmp").write_bytes(b"not a directory")
    with pytest.raises(Unavailable) as refused:
        await place.seal()
    assert refused.value.code == "tier_unavailable"
    assert "not a directory" in refused.value.detail
    (place.folder / "tier" / ".tmp").unlink()
    await place.seal()
    assert await place.sealed() == wanted(2)
