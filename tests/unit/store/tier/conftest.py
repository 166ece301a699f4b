"""A store, a tier and a manifest in memory, for the sealer's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.config import TierConfig
from millpond.core.errors import Internal
from millpond.core.schema import BORN_TS, KEY, ORIGIN, PROPERTIES, PROPERTIES_TYPE, TAG, TIMESTAMP, message_schema
from millpond.core.tier.directory import DirectoryObjects
from millpond.metadata.client import TierObject, TopicInfo, TopicSettings
from millpond.metadata.local import LocalMetadata
from millpond.store.client import QueueRef, StoredFrame
from millpond.store.tier.making import LocalWork
from millpond.store.tier.sealer import Sealer

NOON = 1_700_049_600_000  # 2023-11-15 12:00 UTC
DAY_MS = 86_400_000


class FakeClock(SystemClock):
    now_ms = NOON

    def wall_ms(self) -> int:
        return self.now_ms


def payload(bodies: list[bytes], columns: int, compression: str | None = None) -> pa.Buffer:
    """One record batch of these bodies, with the other columns of `columns` filled in."""
    n = len(bodies)
    values = {
        KEY: lambda: pa.array([b"k%d" % (i % 7) for i in range(n)], pa.binary()),
        TAG: lambda: pa.array([f"t{i % 3}" if i % 2 else None for i in range(n)], pa.string()),
        PROPERTIES: lambda: pa.array([[("a", str(i))] if i % 2 else None for i in range(n)], PROPERTIES_TYPE),
        BORN_TS: lambda: pa.array(np.arange(n) + NOON - 1000).cast(TIMESTAMP),
        ORIGIN: lambda: pa.array(["{}"] * n, pa.string()),
    }
    arrays = [values[bit]() for bit in values if columns & bit]
    batch = pa.RecordBatch.from_arrays([*arrays, pa.array(bodies, pa.binary())], schema=message_schema(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_batch(batch)
    schema_message, message = pa.ipc.MessageReader.open_stream(sink.getvalue())
    assert (schema_message.type, message.type) == ("schema", "record batch")
    return message.serialize()


class FakeSource:
    """A `SealSource` whose log is a list of frames for each queue."""

    store_group = "a"

    def __init__(self, topic: TopicInfo, epoch: int) -> None:
        self.topic = topic
        self.epoch = epoch
        self.wake = asyncio.Event()
        self.log: dict[int, list[StoredFrame]] = {q.queue_id: [] for q in topic.queues}
        self.told: dict[int, int] = {}
        self.reads = 0
        self.appended_bytes = 0
        self.starts: dict[int, int] = {}
        self.damaged: set[int] = set()  # first offsets of frames that cannot be read, in every queue

    def ref(self, queue: int) -> QueueRef:
        info = self.topic.queues[queue]
        return QueueRef(self.topic.tenant_id, self.topic.topic_id, info.queue_id, info.queue)

    def append(self, queue: int, bodies: list[bytes], ts: int = NOON, columns: int = 0, **options: Any) -> None:
        ref = self.ref(queue)
        data = payload(bodies, columns, **options)
        first = self.confirmed_end(ref.queue_id)
        size = sum(map(len, bodies)) + 100
        position = sum(map(len, self.log.values()))
        frame = StoredFrame(ref.queue_id, position, first, len(bodies), columns, 0, ts, size, pa.py_buffer(b""), data)
        self.log[ref.queue_id].append(frame)

    def topic_ids(self) -> list[int]:
        return [self.topic.topic_id]

    def queue_refs(self, topic_id: int) -> list[QueueRef]:
        assert topic_id == self.topic.topic_id
        return [self.ref(info.queue) for info in self.topic.queues]

    def confirmed_end(self, queue_id: int) -> int:
        frames = self.log[queue_id]
        return frames[-1].first_offset + frames[-1].count if frames else 0

    def start_offset(self, queue_id: int) -> int:
        return self.starts.get(queue_id, 0)

    def unsealed(self, topic_id: int) -> tuple[int, int]:
        left = [f for q, frames in self.log.items() for f in frames if f.first_offset >= self.told.get(q, 0)]
        return sum(f.payload_size for f in left), min((f.store_ts for f in left), default=0)

    def unsealed_of(self, queue_id: int) -> int:
        told = self.told.get(queue_id, 0)
        return sum(f.payload_size for f in self.log[queue_id] if f.first_offset >= told)

    async def frames(self, queue_id: int, offset: int, end: int, max_bytes: int) -> list[StoredFrame]:
        self.reads += 1
        found: list[StoredFrame] = []
        for frame in self.log[queue_id]:
            behind = frame.first_offset + frame.count
            if behind > offset and frame.first_offset < end:
                if frame.first_offset in self.damaged:
                    at = max(offset, frame.first_offset)
                    raise Internal("corrupt_range", "log damaged", offset=at, next_offset=behind)
                found.append(frame)
                max_bytes -= frame.payload_size
                if max_bytes <= 0:
                    break
        return found

    def tiered(self, queue_id: int, end: int) -> None:
        assert end >= self.told.get(queue_id, 0), "never goes back"
        self.told[queue_id] = end


class World:
    """A topic of three queues, its manifest, a tier in a directory, and the sealer over them."""

    def __init__(self, folder: Path, metadata: LocalMetadata) -> None:
        self.folder = folder
        self.metadata = metadata
        self.clock = FakeClock()
        self.objects = DirectoryObjects(folder / "tier", self.clock, SystemRandom())
        self.config = TierConfig()

    async def start(self) -> None:
        store = await self.metadata.register_store("a", "node", "")
        self.topic, _ = await self.metadata.put_topic("default", "orders", TopicSettings(queues=3))
        self.source = FakeSource(self.topic, store.epoch)
        self.sealer = self.new_sealer()

    def new_sealer(self, **other: Any) -> Sealer:
        parts = {"metadata": self.metadata, "objects": self.objects, "config": self.config} | other
        work = LocalWork(self.source, parts["objects"])
        metadata, objects, config = parts["metadata"], parts["objects"], parts["config"]
        return Sealer(self.source, metadata, objects, work, config, self.clock, SystemRandom())

    async def restart(self, **other: Any) -> Sealer:
        """The store starts again, as after a crash: a new epoch, and nothing remembered."""
        store = await self.metadata.register_store("a", "node", "")
        self.source.epoch = store.epoch
        self.source.told = {}
        await self.sealer.close()
        self.sealer = self.new_sealer(**other)
        return self.sealer

    async def manifest(self) -> list[TierObject]:
        return (await self.metadata.tier_view(self.topic.topic_id)).objects

    async def tiered(self) -> list[int]:
        tiered = await self.metadata.tiered_to([q.queue_id for q in self.topic.queues])
        return [tiered[q.queue_id] for q in self.topic.queues]

    def queue_id(self, queue: int) -> int:
        return self.topic.queues[queue].queue_id


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    metadata = await LocalMetadata.open(f"sqlite:///{tmp_path}/metadata.db", SystemClock(), SystemRandom())
    world = World(tmp_path, metadata)
    await world.start()
    yield world
    await world.sealer.close()
    await world.objects.close()
    await metadata.close()
