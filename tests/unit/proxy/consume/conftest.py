"""A small world for consuming: one topic on fake stores, a fake tier and manifest, and the real listener on top."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millpond.core.clock import SystemRandom
from millpond.core.errors import BelowLocal, Conflict, Internal, NotFound, OffsetExpired, OffsetOutOfRange
from millpond.core.frame import Sidecar, pack_sidecar
from millpond.core.hashing import hash_bytes
from millpond.core.http.routing import Router
from millpond.core.http.server import HttpServer
from millpond.core.schema import KEY, PROPERTIES, TAG, message_schema
from millpond.core.tasks import Tasks
from millpond.core.tier.rows import rows_of
from millpond.metadata.client import (
    GroupInfo,
    LeaseKey,
    ObjectRange,
    Principal,
    QueueInfo,
    Span,
    TierObject,
    TierView,
    TopicInfo,
    TopicSettings,
)
from millpond.proxy.counters import Counters
from millpond.proxy.frames import FrameCache
from millpond.proxy.parts import Stores
from millpond.proxy.queue_lists import QueueLists
from millpond.proxy.read_range import RangeReader
from millpond.proxy.receipts import LeaseTokens
from millpond.proxy.routes import find, lag, read, receive, seek, settle
from millpond.store import client as sc

TENANT, TOPIC, GROUP = 1, 7, 31
QUEUES = (11, 12)
COLUMNS = KEY | TAG | PROPERTIES


class ManualClock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def wall_ms(self) -> int:
        return round(self.now * 1000)

    def boot_ns(self) -> int:
        return round(self.now * 1e9)

    def monotonic(self) -> float:
        return self.now


def make_frame(
    first: int,
    bodies: list[bytes],
    *,
    queue_id: int = QUEUES[0],
    keys: list[bytes | None] | None = None,
    tags: list[str | None] | None = None,
    properties: list[dict[str, str] | None] | None = None,
    store_ts: int = 1_000,
    codec: str | None = None,
) -> sc.StoredFrame:
    count = len(bodies)
    keys, tags = keys or [None] * count, tags or [None] * count
    maps = [None if one is None else list(one.items()) for one in (properties or [None] * count)]
    schema = message_schema(COLUMNS)
    arrays = [pa.array(values, field.type) for values, field in zip((keys, tags, maps, bodies), schema, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    payload = _serialized(batch, codec)
    hashes = [
        np.array([0 if value is None else hash_bytes(value) for value in column], np.uint32)
        for column in ([None if tag is None else tag.encode() for tag in tags], keys)
    ]
    sidecar = pack_sidecar(Sidecar(hashes[0], hashes[1], None, None, None, []))
    return sc.StoredFrame(
        queue_id=queue_id, position=first * 4096 + 8, first_offset=first, count=count, columns=COLUMNS,
        codec=2 if codec else 0, store_ts=store_ts, payload_size=batch.nbytes, sidecar=pa.py_buffer(sidecar),
        payload=pa.py_buffer(payload),
    )  # fmt: skip


def _serialized(batch: pa.RecordBatch, codec: str | None) -> pa.Buffer:
    """The record batch message alone: what a frame holds."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    return reader.read_next_message().serialize()


class FakeStore:
    """Frames of some queues; `local`: first local offset. `on_read` runs before every read: to move the boundary."""

    def __init__(self, queue_ids: tuple[int, ...]) -> None:
        self.frames: dict[int, list[sc.StoredFrame]] = {queue_id: [] for queue_id in queue_ids}
        self.start = dict.fromkeys(queue_ids, 0)
        self.local = dict.fromkeys(queue_ids, 0)
        self.corrupt: set[int] = set()
        self.on_read: Callable[[], None] = lambda: None
        self.reads: list[sc.ReadRequest] = []
        self.receives: list[sc.ReceiveRequest] = []
        self.answers: list[sc.ReceiveResult | Exception] = []
        self.waiting: asyncio.Event = asyncio.Event()
        self.cancelled: asyncio.Event = asyncio.Event()
        self.settled: list[sc.SettleRequest] = []
        self.statuses: Callable[[sc.Settle], tuple[list[int], int]] = _all_ok
        self.leased: list[sc.LeaseRequest] = []
        self.seeks: list[sc.SeekRequest] = []
        self.positions: dict[int, sc.QueueLag] = {}
        self.scan_entries = 10**9  # index entries one filtered read looks at

    def add(self, frame: sc.StoredFrame) -> None:
        assert frame.first_offset == self.end(frame.queue_id)
        self.frames[frame.queue_id].append(frame)

    def end(self, queue_id: int) -> int:
        frames = self.frames[queue_id]
        return frames[-1].first_offset + frames[-1].count if frames else 0

    def ends(self, queue_id: int) -> sc.QueueEnds:
        return sc.QueueEnds(queue_id, self.start[queue_id], self.local[queue_id], self.end(queue_id), 0)

    async def queues(self, queue_ids: list[int]) -> list[sc.QueueEnds]:
        return [self.ends(queue_id) for queue_id in queue_ids]

    async def read(self, request: sc.ReadRequest) -> sc.ReadResult:
        self.reads.append(request)
        self.on_read()
        ends, at = self.ends(request.queue_id), request.offset
        numbers = {"start_offset": ends.start_offset, "end_offset": ends.end_offset}
        if at < ends.start_offset:
            raise OffsetExpired("offset_expired", "gone", fields=None, **numbers)
        if at > ends.end_offset:
            raise OffsetOutOfRange("offset_out_of_range", "not yet", fields=None, **numbers)
        if at < ends.local_offset:
            raise BelowLocal("below_local", "cold", first_local_offset=ends.local_offset)
        if at in self.corrupt:
            raise Internal("corrupt_range", f"offset {at} is damaged")
        if at == ends.end_offset and request.wait_ms:
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        chosen: list[sc.StoredFrame] = []
        most = request.max_messages if request.tag_hashes is None else self.scan_entries
        end = min(ends.end_offset, at + most)  # like the real one: frames are whole, what is counted may end inside
        for frame in self.frames[request.queue_id]:
            if frame.first_offset + frame.count <= at or frame.first_offset >= end:
                continue
            rows = sum(one.count for one in chosen)
            size = sum(one.payload.size for one in chosen)
            if chosen and (rows >= request.max_messages or size + frame.payload.size > request.max_bytes):
                return sc.ReadResult(chosen, frame.first_offset, ends)
            hashes = np.frombuffer(frame.sidecar, np.uint32, frame.count)
            if request.tag_hashes is None or np.isin(hashes, request.tag_hashes).any():
                chosen.append(frame)
        return sc.ReadResult(chosen, end, ends)

    async def offsets_at(self, request: sc.TimeRequest) -> sc.TimeResult:
        offsets, local = [], []
        for queue_id in request.queue_ids:
            frames = [f for f in self.frames[queue_id] if f.first_offset >= self.local[queue_id]]
            found = next((f.first_offset for f in frames if f.store_ts >= request.ts), self.end(queue_id))
            offsets.append(found)
            local.append(found > self.local[queue_id] or self.local[queue_id] <= self.start[queue_id])
        return sc.TimeResult(offsets, local)

    async def find(self, request: sc.FindRequest) -> list[sc.StoredFrame]:
        found = [
            frame
            for queue_id in request.queue_ids
            for frame in self.frames[queue_id]
            if frame.first_offset >= self.local[queue_id]
            and request.from_ts <= frame.store_ts < request.to_ts
            and request.key_hash in np.frombuffer(frame.sidecar, np.uint32, frame.count, 4 * frame.count)
        ]
        found.sort(key=lambda frame: -frame.store_ts)
        return found[: request.max_frames]

    async def receive(self, request: sc.ReceiveRequest) -> sc.ReceiveResult:
        self.receives.append(request)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        if request.wait_ms:
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return sc.ReceiveResult([])

    async def lease(self, request: sc.LeaseRequest) -> sc.Grant:
        self.leased.append(request)
        if request.claim < 0:
            raise Conflict("epoch_superseded", "the claim has run out")
        return grant(np.frombuffer(request.take, np.int64).tolist(), queue_id=request.queue_id, local=10**6)

    async def settle(self, request: sc.SettleRequest) -> sc.SettleResult:
        self.settled.append(request)
        outcomes = []
        for one in request.settles:
            statuses, rows = self.statuses(one)
            outcomes.append(sc.SettleOutcome(pa.py_buffer(bytes(statuses)), rows))
        return sc.SettleResult(outcomes)

    async def seek(self, request: sc.SeekRequest) -> sc.SeekResult:
        self.seeks.append(request)
        moves = zip(request.queues, request.offsets, strict=True)
        return sc.SeekResult([sc.SeekOutcome(queue.queue_id, 0, to) for queue, to in moves])

    async def lag(self, request: sc.LagRequest) -> sc.LagResult:
        return sc.LagResult([self.positions[queue.queue_id] for queue in request.queues], now_ts=10_000)


def _all_ok(one: sc.Settle) -> tuple[list[int], int]:
    if one.offsets is not None:
        count = one.offsets.size // 8
        return [0] * count, count
    pairs = np.frombuffer(one.ranges, np.int64).reshape(-1, 2)
    return [0], int((pairs[:, 1] - pairs[:, 0]).sum())


def grant(
    offsets: list[int],
    *,
    frames: list[sc.StoredFrame] | None = None,
    queue_id: int = QUEUES[0],
    lease: int = 5,
    local: int = 0,
    attempts: list[int] | None = None,
) -> sc.Grant:
    return sc.Grant(
        queue_id=queue_id, generation=2, lease=lease, offsets=pa.py_buffer(np.array(offsets, np.int64).tobytes()),
        attempts=pa.py_buffer(np.array(attempts or [1] * len(offsets), np.uint32).tobytes()), lease_until_ts=0,
        local_offset=local, frames=frames or [],
    )  # fmt: skip


class FakeTier:
    """Objects by path, as tables. `calls`: what was asked of it."""

    def __init__(self) -> None:
        self.objects: dict[str, pa.Table] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.shift = 0

    def _table(self, path: str) -> pa.Table:
        if path not in self.objects:
            raise Internal("tier_corrupt", f"tier object {path} is missing", path=path, missing=True)
        return self.objects[path]

    async def rows(self, ref: Any, queue: int, first: int, end: int, max_rows: int, max_bytes: int) -> pa.Table:
        self.calls.append((ref.path, first, end))
        table = self._table(ref.path)
        table = table.filter(pc.equal(table["queue"], queue))
        offsets = table["offset"].to_numpy()
        at = int(np.searchsorted(offsets, first + self.shift))
        return table.slice(at, max(1, min(max_rows, end - first, max_bytes // 100)))

    async def first_at(self, ref: Any, queue: int, ts: int, clock: str) -> int | None:
        table = self._table(ref.path)
        table = table.filter(pc.equal(table["queue"], queue))
        times = table[f"{clock}_ts"].cast(pa.int64()).to_numpy()
        found = np.flatnonzero(times >= ts)
        return int(table["offset"][int(found[0])].as_py()) if len(found) else None

    async def find_key(self, ref: Any, queues: list[int], key: bytes) -> pa.Table:
        table = self._table(ref.path)
        return table.filter(
            pc.and_(pc.equal(table["key"], key), pc.is_in(table["queue"], pa.array(queues, pa.int32())))
        )


class FakeMetadata:
    def __init__(self, clock: ManualClock) -> None:
        self.objects: list[TierObject] = []
        self.views = 0
        self.keys = [LeaseKey(1, b"one" * 11, clock.wall_ms() + 10**9)]
        self.away: Exception | None = None
        self.asked = 0

    async def lease_keys(self) -> list[LeaseKey]:
        self.asked += 1
        if self.away is not None:
            raise self.away
        return list(self.keys)

    async def tier_view(
        self, topic_id: int, queue_ids: list[int] | None = None, from_offset: int = 0, to_offset: int | None = None
    ) -> TierView:
        self.views += 1
        wanted = [
            obj
            for obj in self.objects
            if any(
                (queue_ids is None or one.queue_id in queue_ids)
                and one.end > from_offset
                and (to_offset is None or one.first < to_offset)
                for one in obj.ranges
            )
        ]
        return TierView(topic_id, 1, {}, wanted)


class World:
    """Everything in one place: `store` (queue 0) and, when split, `other` (queue 1)."""

    def __init__(self, *, split: bool = False) -> None:
        self.clock = ManualClock()
        self.store = FakeStore(QUEUES[:1] if split else QUEUES)
        self.other = FakeStore(QUEUES[1:])
        self.metadata = FakeMetadata(self.clock)
        self.tier = FakeTier()
        self.groups: dict[str, GroupInfo] = {"g": GroupInfo(GROUP, TOPIC, "g", "earliest", None, 1, 1000, 0)}
        names = ("a", "b" if split else "a")
        queues = [QueueInfo(queue_id, number, [Span(0, names[number])]) for number, queue_id in enumerate(QUEUES)]
        self.topic = TopicInfo(TENANT, "default", TOPIC, "t", "t", TopicSettings(2, "memory"), queues, 0, 1)
        self.cache = FrameCache(1 << 20)
        clients: Any = {"a": self.store, "b": self.other}
        tier: Any = self.tier
        metadata: Any = self.metadata
        self.reader = RangeReader(Stores(clients), metadata, tier, self.cache)
        self.tokens = LeaseTokens(metadata, self.clock)
        self.parts: Any = SimpleNamespace(
            clock=self.clock, random=SystemRandom(), metadata=metadata, catalog=self, stores=Stores(clients),
            tokens=self.tokens, reader=self.reader, counters=Counters(), queue_lists=QueueLists(), releases=Tasks(),
        )  # fmt: skip
        self.server = HttpServer(
            Router([*receive.ROUTES, *settle.ROUTES, *read.ROUTES, *find.ROUTES, *seek.ROUTES, *lag.ROUTES]),
            _Open(), self.parts, SystemRandom(),
        )  # fmt: skip
        self.session: aiohttp.ClientSession

    def seal(self, name: str, count: int, *, first: int = 0, queue: int = 0) -> None:
        """Frames of the queue that lie in [first, first + count) become an object of the manifest."""
        store = self.other if QUEUES[queue] not in self.store.frames else self.store
        frames = [f for f in store.frames[QUEUES[queue]] if first <= f.first_offset < first + count]
        self.tier.objects[name] = rows_of(queue, frames)
        times = [f.store_ts for f in frames]
        one = ObjectRange(QUEUES[queue], queue, first, first + count, count, min(times), max(times), None, None)
        self.metadata.objects.append(TierObject(name, TOPIC, name, 1, "", 1, [one]))

    # -- the catalog
    async def group(
        self, topic: TopicInfo, name: str, create: Any = None, filter_tag: str | None = None
    ) -> tuple[GroupInfo, bool]:
        if name in self.groups:
            known = self.groups[name]
            if create is not None and filter_tag is not None and filter_tag != known.filter_tag:
                raise Conflict("filter_differs", "another filter")
            return known, False
        if create is None:
            raise NotFound("group_not_found", f"no group {name!r}")
        made = GroupInfo(GROUP + len(self.groups), TOPIC, name, create, filter_tag, 1, 1000, 0)
        self.groups[name] = made
        return made, True

    async def call(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self.session.request(method, f"{self.server.address}/v1/topics/t{path}", **more) as response:
            body = await response.read()
            kind = response.content_type
            return response.status, msgspec.json.decode(body) if kind.endswith("json") else body

    async def receive(self, **body: Any) -> tuple[int, Any]:
        return await self.call("POST", "/groups/g/messages/receive", json=body)


class Catalog:
    """`World` as the catalog: `topic` is a call there and a field here."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.group = world.group
        self.prompt = True  # False: nothing is known without asking, so every receive goes the usual way

    def known_topic(self, tenant: str, name: str) -> TopicInfo | None:
        return self._world.topic if name == "t" and self.prompt else None

    def known_group(self, tenant: str, topic: str, name: str) -> tuple[TopicInfo, GroupInfo] | None:
        found, group = self.known_topic(tenant, topic), self._world.groups.get(name)
        return None if found is None or group is None else (found, group)

    async def topic(self, tenant: str, name: str) -> TopicInfo:
        if name != "t":
            raise NotFound("topic_not_found", f"no topic {name!r}")
        return self._world.topic


class _Open:
    def known(self, request: Any, scope: Any) -> Principal:
        return Principal(TENANT, "default", "", ["consume"])

    async def admit(self, request: Any, scope: Any) -> Principal:
        return self.known(request, scope)


async def _running(world: World) -> AsyncIterator[World]:
    world.parts.catalog = Catalog(world)
    await world.server.start("127.0.0.1:0")
    async with aiohttp.ClientSession() as session:
        world.session = session
        yield world
    await world.server.stop(0.1)


@pytest.fixture(params=["prompt", "usual"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Both ways that a receive may take."""
    async for one in _running(World()):
        one.parts.catalog.prompt = request.param == "prompt"
        yield one


@pytest.fixture
async def split_world() -> AsyncIterator[World]:
    """Each queue on a store group of its own."""
    async for one in _running(World(split=True)):
        yield one


@pytest.fixture
def frame() -> Callable[..., sc.StoredFrame]:
    return make_frame


@pytest.fixture
def granted() -> Callable[..., sc.Grant]:
    return grant
