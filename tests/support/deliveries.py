"""A delivery over a log in memory, and short words for what tests do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from millpond.store.client import (
    SETTLE_STATUSES,
    Grant,
    GroupRef,
    LagRequest,
    QueueEnds,
    QueueLag,
    QueueRef,
    ReceiveRequest,
    ReceiveResult,
    SeekRequest,
    Settle,
    SettleRequest,
    StoredFrame,
)
from millpond.store.delivery import Delivery
from millpond.store.directory import FrameSpot
from millpond.store.fold.cursors import Cursors

GROUP = GroupRef(1, 2, 3)
Q = [QueueRef(1, 2, 40 + number, number) for number in range(3)]


class MemoryLog:
    """A `DeliveryLog` whose queues are lists of tag hashes, and which can be made to wait."""

    def __init__(self) -> None:
        self.tags: dict[int, list[int]] = {}
        self.start: dict[int, int] = {}
        self.local: dict[int, int] = {}
        self.row_size = 100.0
        self.without_frames = False
        self.in_memory = False  # the index and the frames: nothing has to be waited for
        self.looked = 0  # how often the index was asked for frames
        self.frame_rows = 100
        self.calls: list[str] = []
        self.gate: asyncio.Event | None = None
        self.write_gate: asyncio.Event | None = None
        self.reached = asyncio.Event()
        self.now = 1_000_000
        self.unconfirmed: dict[int, int] = {}  # messages of each queue that are being flushed
        self.flushing = self.flushed = 0
        self.flush: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def now_ms(self) -> int:
        return self.now

    def ends(self, queue_id: int) -> QueueEnds:
        start = self.start.get(queue_id, 0)
        end = len(self.tags.get(queue_id, ())) - self.unconfirmed.get(queue_id, 0)
        return QueueEnds(queue_id, start, max(start, self.local.get(queue_id, 0)), end, 0)

    def open_queue(self, queue: QueueRef) -> None:
        self.tags.setdefault(queue.queue_id, [])

    async def _pass(self, gate: asyncio.Event | None) -> None:
        if gate is not None:
            self.reached.set()
            await gate.wait()

    async def tag_hashes(self, queue_id: int, first: int, end: int) -> np.ndarray:
        await self._pass(self.gate)
        return np.array(self.tags[queue_id][first:end], np.uint32)

    async def row_bytes(self, queue_id: int, first: int, end: int) -> np.ndarray:
        await self._pass(self.gate)
        return np.full(end - first, self.row_size)

    async def frames_for(self, queue_id: int, offsets: np.ndarray, max_bytes: int) -> list[StoredFrame]:
        assert offsets[0] >= self.ends(queue_id).local_offset
        return []

    async def spots(self, queue_id: int, first: int, end: int) -> list[FrameSpot]:
        await self._pass(self.gate)
        self.looked += 1
        return self._spots(queue_id, first, end)

    def spots_in_memory(self, queue_id: int, first: int, end: int) -> list[FrameSpot]:
        return self._spots(queue_id, first, end) if self.in_memory else []

    def _spots(self, queue_id: int, first: int, end: int) -> list[FrameSpot]:
        rows = self.frame_rows
        last = min(end, len(self.tags[queue_id]))
        starts = [first, *range(first - first % rows + rows, last, rows)]
        ends = [*starts[1:], last]
        return [FrameSpot(s // rows, int(rows * self.row_size), s, e) for s, e in zip(starts, ends, strict=True)]

    def frames_in_memory(self, spots: list[FrameSpot], max_bytes: int) -> list[StoredFrame] | None:
        return self._frames(spots) if self.in_memory and not self.without_frames else None

    async def frames_at(self, queue_id: int, spots: list[FrameSpot], max_bytes: int) -> list[StoredFrame]:
        return [] if self.without_frames else self._frames(spots)

    def _frames(self, spots: list[FrameSpot]) -> list[StoredFrame]:
        nothing = pa.py_buffer(b"")
        return [StoredFrame(0, spot.position, 0, 0, 0, 0, 0, 0, nothing, nothing) for spot in spots]

    async def timestamp_at(self, queue_id: int, offset: int) -> int:
        return 7_000 + offset

    def state_changed(self) -> None:
        self.calls.append("changed")

    async def state_written(self) -> None:
        self.calls.append("written")
        await self._pass(self.write_gate)

    async def state_flushed(self) -> None:
        self.calls.append("flushed")

    async def confirmed(self) -> None:
        self.calls.append("confirmed")

    def flushing_end(self, queue_id: int) -> int:
        return len(self.tags.get(queue_id, ()))

    async def shown(self, position: int) -> None:
        if position > self.flushed:
            await asyncio.shield(self.flush)


class Waits:
    """A receive that waits without a task; `woken`: how that ends."""

    def __init__(self, delivery: Delivery, request: ReceiveRequest) -> None:
        self.woken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        parked = delivery.park(request, self._rises)
        assert parked is not None
        self.receive, self.shown, self.leave = parked.receive, parked.shown, parked.leave

    def _rises(self, how: bool | Exception) -> None:
        if isinstance(how, Exception):
            self.woken.set_exception(how)
        else:
            self.woken.set_result(how)


class Bench:
    """A delivery with its log, and short words for what the tests do."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.cursors = Cursors()
        self.delivery = Delivery(self.log, self.cursors, self.log.now_ms)
        self.tasks: list[asyncio.Task[Any]] = []
        self.queues = Q[:1]  # the list that a group knows by its identity
        self.woken = False

    def put(self, count: int, queue: QueueRef = Q[0], tag: int = 1) -> None:
        self.log.tags.setdefault(queue.queue_id, []).extend([tag] * count)
        self.delivery.on_confirmed(queue.queue_id)

    def parks(self, request: ReceiveRequest) -> bool:
        """Whether that receive could only wait; it does not go on."""
        parked = self.delivery.park(request, lambda how: None)
        if parked is not None:
            parked.leave()
        return parked is not None

    def begin_flush(self, count: int, queue: QueueRef = Q[0], tag: int = 1) -> None:
        """Of so many new messages."""
        self.log.tags.setdefault(queue.queue_id, []).extend([tag] * count)
        self.log.unconfirmed[queue.queue_id] = count
        self.log.flushing += 1
        self.woken = self.delivery.on_flushing(queue.queue_id)

    def end_flush(self, error: Exception | None = None) -> None:
        flush, self.log.flush = self.log.flush, asyncio.get_running_loop().create_future()
        if error is not None:
            flush.set_exception(error)
            return
        self.log.flushed = self.log.flushing
        flush.set_result(None)
        queue_ids = list(self.log.unconfirmed)
        self.log.unconfirmed.clear()
        for queue_id in queue_ids:
            self.delivery.on_confirmed(queue_id)

    def pass_time(self, ms: int) -> None:
        self.log.now += ms
        self.delivery.wake_due()

    def request(self, count: int = 10, queues: list[QueueRef] | None = None, **more: Any) -> ReceiveRequest:
        plain = ReceiveRequest(GROUP, queues or Q[:1], "earliest", count, 1 << 20, 30_000)
        return msgspec.structs.replace(plain, **more)

    async def receive(self, count: int = 10, queues: list[QueueRef] | None = None, **more: Any) -> ReceiveResult:
        return await self.delivery.receive(self.request(count, queues, **more))

    async def take(self, count: int = 10, **more: Any) -> Grant:
        result = await self.receive(count, **more)
        assert len(result.grants) == 1
        return result.grants[0]

    def waiting(
        self, count: int = 10, queues: list[QueueRef] | None = None, **more: Any
    ) -> asyncio.Task[ReceiveResult]:
        return self.spawn(self.receive(count, queues, wait_ms=60_000, **more))

    def spawn(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coro)
        self.tasks.append(task)
        return task

    async def settle(
        self, grant: Grant, action: Any = "ack", offsets: list[int] | None = None, **more: Any
    ) -> list[str]:
        buffer = grant.offsets if offsets is None else pa.py_buffer(np.array(offsets, np.int64))
        one = Settle(grant.queue_id, grant.generation, grant.lease, action, buffer, **more)
        result = await self.delivery.settle(SettleRequest(GROUP, [one], "flush", 1000))
        return [SETTLE_STATUSES[status] for status in np.frombuffer(result.outcomes[0].statuses, np.uint8)]

    async def lag(self, queue: QueueRef = Q[0]) -> QueueLag:
        return (await self.delivery.lag(LagRequest(GROUP, [queue]))).queues[0]

    async def seek(self, to: int, seek_id: str = "s", **more: Any) -> tuple[int, int]:
        request = SeekRequest(GROUP, [Q[0]], [to], seek_id, more.pop("dry_run", False), **more)
        outcome = (await self.delivery.seek(request)).queues[0]
        return outcome.from_offset, outcome.to_offset


def offsets(grant: Grant) -> list[int]:
    return np.frombuffer(grant.offsets, np.int64).tolist()


def attempts(grant: Grant) -> list[int]:
    return np.frombuffer(grant.attempts, np.uint32).tolist()


def got(result: ReceiveResult) -> list[int]:
    return [offset for grant in result.grants for offset in offsets(grant)]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
