"""How fast the log becomes Parquet, and what a producer notices of it.

Our seal: a store's engine in this process, its log and its tier in one directory, 480 MB of one topic from the
confirmed frames to rows COMMITTED in the manifest: read back, checksums compared, encoded, hashed, fsynced, verified.
Beside it pyarrow's own `pq.write_table` of the same rows with the same settings, one file for each object: that is
encoding and writing into the page cache, nothing else. Both on messages that compress to half. And the limits of a
seal: what the disk makes of its traffic with nothing else to do: the log read past the page cache, half of it written,
read back and compared; and its parts side by side, none of which waits for another: that traffic with the checksum of
what is read, the rows encoded and thrown away, and the checksums of as much as the objects are.

The producer: a probe at a steady rate beside a service that seals what was filled in before, on demand.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from itertools import count
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import filling, harness, probe
from benchmarks.harness import Aim, Line, Setup, interleaved
from benchmarks.probe import Probe
from millpond.client.connection import Connection
from millpond.client.topics import Topics
from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.config import StoreConfig, TierConfig
from millpond.core.errors import NotFound
from millpond.core.frame import Sidecar, pack_sidecar
from millpond.core.limits import MIB, ROW_GROUP_BYTES, SEAL_BYTES, SEAL_STREAM_BYTES
from millpond.core.schema import TIER_SCHEMA
from millpond.core.tier.directory import DirectoryObjects
from millpond.core.tier.gentle import GentleFile, Steps, read_through
from millpond.core.tier.layout import PARQUET
from millpond.metadata.client import MetadataClient, TopicInfo, TopicSettings
from millpond.metadata.local import LocalMetadata
from millpond.store.client import AppendRequest, QueueAppend, QueueRef
from millpond.store.local import LocalStore

BATCHES = 480
BATCH_MESSAGES = 1_000
WARMING = 64  # batches: an object's worth
PER_TOPIC = 60  # batches of 1 MB: just under SEAL_BYTES, so sealed on demand only
FILLED = 24  # topics for one round of the probe
REST_SECONDS = 0.6  # until the store is seen to be at rest: beside work it is sealed at a bounded rate
OURS, THEIRS, DISK = "seal, log to manifest", "pq.write_table", "its disk traffic alone"
PARTS = "its parts, side by side"


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """MB/s of raw bodies; produce quantiles while it seals beside those while it does not."""
    return await _rates(setup, tell) + await _noticed(setup, tell)


# -- rates ----------------------------------------------------------------------------------------------------


async def _rates(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    batches = [filling.batch(BATCH_MESSAGES, setup.message_bytes) for _ in range(64)]
    wanted = [batches[at % 64] for at in range(BATCHES)]
    works = {
        OURS: lambda: _seal(wanted, setup.folder),
        THEIRS: lambda: _parquet(wanted, setup),
        DISK: lambda: asyncio.to_thread(_disk, wanted, setup.folder),
        PARTS: lambda: asyncio.to_thread(_parts, wanted, setup.folder),
    }
    found = await interleaved(setup.rounds, works, tell)
    return [
        Line(OURS, "MB/s", found.pop(OURS), THEIRS, aim=Aim(at_least=0.8)),
        *(Line(name, "MB/s", rates, "" if name == THEIRS else THEIRS) for name, rates in found.items()),
    ]


async def _seal(batches: list[pa.RecordBatch], folder: str) -> float:
    """A process that has made an object before, and all of them in one pass."""
    async with _store(folder) as (store, metadata, queue):
        await _seconds_to_seal(batches[:WARMING], store, metadata, queue)
        return _megabytes(batches) / await _seconds_to_seal(batches, store, metadata, queue)


async def _seconds_to_seal(
    batches: list[pa.RecordBatch], store: LocalStore, metadata: _OnDemand, queue: QueueRef
) -> float:
    engine, clock = store.engine, SystemClock()
    metadata.asked = False
    for batch in batches:
        await store.append(AppendRequest([_append(batch, queue)], 10_000))
    await engine.writer.flushed(engine.log.tail)
    await asyncio.sleep(REST_SECONDS)
    begin = clock.monotonic()
    metadata.asked = True
    await engine.sealer.seal_topic(queue.topic_id)
    return clock.monotonic() - begin


async def _parquet(batches: list[pa.RecordBatch], setup: Setup) -> float:
    """`pq.write_table` as pyarrow has it: rows of the tier, ready in memory, to files of one object each."""
    table = _tier_rows(batches)
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="millpond-bench-", dir=setup.folder or None) as folder:
        begin = clock.monotonic()
        for number, rows in enumerate(_objects(table)):
            await asyncio.to_thread(_write_table, rows, Path(folder) / f"{number}.parquet")
        took = clock.monotonic() - begin
    return _megabytes(batches) / took


def _objects(table: pa.Table) -> list[pa.Table]:
    """The rows of one object each."""
    rows = int(SEAL_BYTES * table.num_rows / table.nbytes)
    return [table.slice(start, rows) for start in range(0, table.num_rows, rows)]


def _write_table(table: pa.Table, to: Path) -> None:
    group = int(ROW_GROUP_BYTES * table.num_rows / table.nbytes)
    pq.write_table(table, to, row_group_size=group, **PARQUET)


def _disk(batches: list[pa.RecordBatch], folder: str) -> float:
    with _traffic(_mib(batches), folder, lambda _read: None) as traffic:
        return _rate(batches, traffic)


def _parts(batches: list[pa.RecordBatch], folder: str) -> float:
    objects = _objects(_tier_rows(batches))
    step, steps = _noise(), _mib(batches) * MIB // 2 // SEAL_STREAM_BYTES

    def encode() -> None:
        for rows in objects:
            _write_table(rows, Path(os.devnull))

    def sums() -> None:
        digest = hashlib.sha256()
        for _ in range(steps):
            digest.update(step)
            google_crc32c.value(pa.py_buffer(step))

    with _traffic(_mib(batches), folder, lambda read: google_crc32c.value(pa.py_buffer(read))) as traffic:
        return _rate(batches, traffic, encode, sums)


def _rate(batches: list[pa.RecordBatch], *works: Callable[[], None]) -> float:
    """MB/s of `batches` when all of `works`, each in a thread, have ended."""
    clock = SystemClock()
    with ThreadPoolExecutor(len(works)) as threads:
        begin = clock.monotonic()
        for work in [threads.submit(work) for work in works]:
            work.result()
        return _megabytes(batches) / (clock.monotonic() - begin)


@contextmanager
def _traffic(mib: int, folder: str, look: Callable[[memoryview], object]) -> Iterator[Callable[[], None]]:
    """What reads a log of so many MiB, in a seal's steps, and hands each to `look`, while it writes half as many and
    reads them back."""
    taken = Steps()
    taken.take(0, long=True)
    step = _noise()
    with (
        tempfile.TemporaryDirectory(prefix="millpond-bench-", dir=folder or None) as name,
        ThreadPoolExecutor(1) as other,
    ):

        def write(path: Path, mib: int) -> None:
            with closing(GentleFile(path, taken, read_back=True)) as file:
                for _ in range(mib * MIB // SEAL_STREAM_BYTES):
                    file.write(step)
                file.sync()

        def read_and_write() -> None:
            writing = other.submit(write, Path(name) / "object", mib // 2)
            for read in read_through(Path(name) / "log", taken):
                look(read)
            writing.result()

        write(Path(name) / "log", mib)
        yield read_and_write


def _noise() -> memoryview:
    """SEAL_STREAM_BYTES that begin at a page."""
    step = memoryview(mmap(-1, SEAL_STREAM_BYTES))
    step[:] = np.random.default_rng(1).bytes(SEAL_STREAM_BYTES)
    return step


def _mib(batches: list[pa.RecordBatch]) -> int:
    return int(_megabytes(batches) * 1e6) // MIB


def _megabytes(batches: list[pa.RecordBatch]) -> float:
    return sum(int(batch.nbytes) for batch in batches) / 1e6


def _tier_rows(batches: list[pa.RecordBatch]) -> pa.Table:
    messages = pa.Table.from_batches(batches)
    rows = messages.num_rows
    columns = {
        "queue": pa.array(np.zeros(rows, np.int32)),
        "offset": pa.array(np.arange(rows)),
        "store_ts": pa.array(np.full(rows, SystemClock().wall_ms())),
        "body": messages.column("body"),
    }
    return pa.table(
        [columns[field.name].cast(field.type) if field.name in columns else pa.nulls(rows, field.type)
         for field in TIER_SCHEMA], TIER_SCHEMA,
    )  # fmt: skip


def _append(batch: pa.RecordBatch, queue: QueueRef) -> QueueAppend:
    payload, none = batch.serialize(), np.zeros(batch.num_rows, np.uint32)
    sidecar = pa.py_buffer(pack_sidecar(Sidecar(none, none, None, None, None, [])))
    crc = google_crc32c.value(payload)
    return QueueAppend(queue, batch.num_rows, 0, 0, sidecar, payload, crc, payload.size, "memory", [], 0)


class _OnDemand:
    """`metadata`, except that the sealer finds no topic before it is `asked`: a round of its own would be a pass of its
    own."""

    def __init__(self, metadata: LocalMetadata) -> None:
        self._metadata = metadata
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)

    async def topic_by_id(self, topic_id: int) -> TopicInfo:
        if not self.asked:
            raise NotFound("topic_not_found", f"topic {topic_id} is not sealed yet")
        return await self._metadata.topic_by_id(topic_id)


@asynccontextmanager
async def _store(folder: str) -> AsyncIterator[tuple[LocalStore, _OnDemand, QueueRef]]:
    """A store in this process, and the queue of a topic."""
    clock, random = SystemClock(), SystemRandom()
    data = tempfile.mkdtemp(prefix="millpond-bench-", dir=folder or None)
    metadata = await LocalMetadata.open(f"sqlite:///{data}/metadata.db", clock, random)
    objects = DirectoryObjects(Path(data) / "tier", clock, random)
    topic, _ = await metadata.put_topic("default", "sealing", TopicSettings(queues=1))
    queue = QueueRef(topic.tenant_id, topic.topic_id, topic.queues[0].queue_id, 0)
    config = StoreConfig(data=f"{data}/store", local_bytes=1 << 40)
    on_demand = _OnDemand(metadata)
    store = await LocalStore.open(config, TierConfig(), cast(MetadataClient, on_demand), objects, clock, random)
    try:
        yield store, on_demand, queue
    finally:
        await store.close()
        await objects.close()
        await metadata.close()
        shutil.rmtree(data)


# -- what a producer notices -----------------------------------------------------------------------------------


async def _noticed(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """The probe twice a round on one service: with nothing else, and while filled topics are sealed."""
    found: dict[str, list[Probe]] = {"nothing sealed": [], "while it seals": []}
    rates: list[float] = []
    names = count()
    async with harness.service(setup.folder) as service:
        async with Connection(service.url) as connection:
            await filling.create(connection, ["probe"], setup.queues, "flush")
        for number in range(setup.rounds):
            for case, probes in found.items():
                tell(f"produce {case}, round {number + 1} of {setup.rounds}")
                filled = [f"full{next(names)}" for _ in range(FILLED)]
                await _fill(service.url, filled, setup)  # also before it is alone: the same went before both
                sealing = asyncio.create_task(_flush(service.url, filled)) if case != "nothing sealed" else None
                probes.append(
                    await probe.steady(service.url, "probe", setup.seconds, setup.per_second, setup.message_bytes)
                )
                rates.append(await sealing) if sealing is not None else await _flush(service.url, filled)
    return [
        Line(
            f"produce {field[:3]}, {case}", "ms", [getattr(one.produce, field) for one in probes],
            f"produce {field[:3]}, nothing sealed" if case != "nothing sealed" else "",
            aim=Aim(at_most=1.2) if case != "nothing sealed" and field == "p99_ms" else None,
        )
        for field in ("p50_ms", "p99_ms")
        for case, probes in found.items()
    ] + [Line("sealed meanwhile", "MB/s", rates)]  # fmt: skip


async def _fill(url: str, topics: list[str], setup: Setup) -> None:
    """Each of `topics` with a little less than what would be sealed unasked."""
    body = filling.stream(filling.batch(BATCH_MESSAGES, setup.message_bytes))
    async with Connection(url) as connection:
        await filling.create(connection, topics, 1, "memory")
        await filling.fill(connection, ((name, None) for name in topics for _ in range(PER_TOPIC)), body)


async def _flush(url: str, topics: list[str]) -> float:
    """MB/s of raw bodies sealed, one topic after the other."""
    clock = SystemClock()
    begin = clock.monotonic()
    async with Connection(url) as connection:
        for name in topics:
            await Topics(connection).flush(name)
    return len(topics) * PER_TOPIC * BATCH_MESSAGES * 1024 / 1e6 / (clock.monotonic() - begin)
