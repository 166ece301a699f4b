"""`LocalStore`: the `StoreClient` that calls a store in the same process.

It behaves as HTTP would: an accepted call goes on when its caller leaves (except `receive` and a waiting `read`,
which end with it), deadlines hold, errors are `MillpondError`s. Only the launcher imports this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from millpond.core.clock import Clock, Random
from millpond.core.config import StoreConfig, TierConfig
from millpond.core.deadlines import Deadlines
from millpond.core.errors import DiskFull, Unavailable
from millpond.core.limits import CALL_MS
from millpond.core.tier.objects import ObjectStore
from millpond.metadata.client import MetadataClient
from millpond.store.client import (
    AppendRequest,
    AppendResult,
    FindRequest,
    Grant,
    GroupRef,
    LagRequest,
    LagResult,
    LeaseRequest,
    ParkedReceive,
    ProducerState,
    QueueEnds,
    ReadRequest,
    ReadResult,
    ReceiveRequest,
    ReceiveResult,
    Risen,
    SeekRequest,
    SeekResult,
    SettleRequest,
    SettleResult,
    StoredFrame,
    StoreStatus,
    TimeRequest,
    TimeResult,
)
from millpond.store.disk import SystemDisk
from millpond.store.engine import Engine
from millpond.store.fold import operations as ops
from millpond.store.parked import Parked

T = TypeVar("T")


class LocalStore:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._deadlines = Deadlines()

    @classmethod
    async def open(
        cls,
        config: StoreConfig,
        tier: TierConfig,
        metadata: MetadataClient,
        objects: ObjectStore,
        clock: Clock,
        random: Random,
    ) -> LocalStore:
        """Recover the data directory `config.data` and start. Raises DirectoryRefused, OSError."""
        disk = await asyncio.get_running_loop().run_in_executor(None, SystemDisk, Path(config.data))
        return cls(await Engine.open(config, tier, disk, metadata, objects, clock, random, seal_apart=True))

    @property
    def failed(self) -> asyncio.Future[BaseException]:
        """Done when the store has died: its process must end and start again through recovery."""
        return self.engine.failed

    async def close(self) -> None:
        await self.engine.close()

    # -- StoreClient -----------------------------------------------------------------------------------------

    async def append(self, request: AppendRequest) -> AppendResult:
        # needs no task of its own to outlive its caller: what is placed is placed in one step, and stays
        try:
            return await self._bounded(self.engine.appends.append(request), request.deadline_ms)
        except Unavailable as error:
            if error.code != "deadline_exceeded":
                raise
            raise Unavailable("unknown_outcome", "the store did not answer in time; messages may be written") from None

    async def read(self, request: ReadRequest) -> ReadResult:
        return await self._bounded(self.engine.reads.read(request), request.wait_ms + CALL_MS)

    async def queues(self, queue_ids: list[int]) -> list[QueueEnds]:
        self._check()
        return [self.engine.reads.ends(queue_id) for queue_id in queue_ids]

    async def offsets_at(self, request: TimeRequest) -> TimeResult:
        return await self._bounded(self.engine.reads.offsets_at(request), CALL_MS)

    async def find(self, request: FindRequest) -> list[StoredFrame]:
        return await self._bounded(self.engine.reads.find(request), CALL_MS)

    async def receive(self, request: ReceiveRequest) -> ReceiveResult:
        return await self._bounded(self.engine.delivery.receive(request), request.wait_ms + CALL_MS)

    def park(self, request: ReceiveRequest, rises: Callable[[Risen], None]) -> ParkedReceive | None:
        if self.engine.failed.done() or not self.engine.serving:
            return None
        parked = self.engine.delivery.park(request, rises)
        return None if parked is None else _LocalParked(parked, self._bounded)

    async def lease(self, request: LeaseRequest) -> Grant:
        return await self._accepted(self.engine.delivery.lease(request), CALL_MS)

    async def settle(self, request: SettleRequest) -> SettleResult:
        return await self._accepted(self.engine.delivery.settle(request), request.deadline_ms)

    async def seek(self, request: SeekRequest) -> SeekResult:
        return await self._accepted(self.engine.delivery.seek(request), CALL_MS)

    async def lag(self, request: LagRequest) -> LagResult:
        return await self._bounded(self.engine.delivery.lag(request), CALL_MS)

    async def producers(self, queue_ids: list[int], producer_id: str) -> list[ProducerState]:
        self._check()
        states = self._sessions(queue_ids, producer_id)
        if states:
            await self._accepted(self.engine.writer.flushed(self.engine.log.tail), CALL_MS)
        return states

    async def close_producer(self, queue_ids: list[int], producer_id: str) -> None:
        self._check()
        known = [state.queue_id for state in self._sessions(queue_ids, producer_id)]
        tail = self.engine.tail
        await self._flushed(lambda: [tail.operation(ops.ProducerClose(queue_id, producer_id)) for queue_id in known])

    async def seal(self, topic_id: int, deadline_ms: int) -> dict[int, int]:
        return await self._accepted(self.engine.sealer.seal_topic(topic_id), deadline_ms)

    async def delete_topic(self, topic_id: int) -> None:
        self._check()
        await self._flushed(lambda: self.engine.tail.drop_topic(topic_id))

    async def delete_group(self, group: GroupRef) -> None:
        await self._accepted(self.engine.delivery.delete_group(group), CALL_MS)

    async def status(self) -> StoreStatus:
        return self.engine.status()

    def _sessions(self, queue_ids: list[int], producer_id: str) -> list[ProducerState]:
        states = (self.engine.fold.producers.state(queue_id, producer_id) for queue_id in queue_ids)
        return [state for state in states if state is not None]

    # -- how calls are made ----------------------------------------------------------------------------------

    async def _flushed(self, operate: Callable[[], object]) -> None:
        """Put operations at the tail, and wait until they are on the disk."""
        try:
            operate()
        finally:
            self.engine.writer.wake()
        await self._accepted(self.engine.writer.flushed(self.engine.log.tail), CALL_MS)

    def _check(self) -> None:
        if self.engine.failed.done():
            raise Unavailable("store_unavailable", "the store has stopped; it restarts through recovery")
        if not self.engine.serving:
            raise Unavailable("shutting_down", "the store is shutting down")

    async def _accepted(self, call: Coroutine[Any, Any, T], deadline_ms: int) -> T:
        """Run a call that outlives its caller: when the deadline passes its outcome is unknown to the caller."""
        try:
            self._check()
        except Unavailable:
            call.close()
            raise
        task = self.engine.spawn_call(call)
        done, _ = await asyncio.wait({task}, timeout=deadline_ms / 1000)
        if not done:
            if self.engine.housekeeping.disk_full:
                raise DiskFull("disk_full", "the store's disk is full")
            raise Unavailable("deadline_exceeded", "the store did not answer in time; the outcome is unknown")
        return task.result()

    async def _bounded(self, call: Coroutine[Any, Any, T], deadline_ms: int) -> T:
        """Run a call that ends with its caller."""
        try:
            self._check()
        except Unavailable:
            call.close()
            raise
        try:
            with self._deadlines.within(deadline_ms / 1000):
                return await call
        except TimeoutError:
            raise Unavailable("deadline_exceeded", "the store did not answer in time") from None


class _Bounded(Protocol):
    async def __call__(self, call: Coroutine[Any, Any, T], deadline_ms: int) -> T: ...


class _LocalParked:
    """`Parked`, served within the time that any receive has."""

    __slots__ = ("_bounded", "_parked")

    def __init__(self, parked: Parked, bounded: _Bounded) -> None:
        self._parked = parked
        self._bounded = bounded

    @property
    def woken(self) -> bool:
        return self._parked.woken

    @property
    def full(self) -> bool:
        return self._parked.full

    async def receive(self) -> ReceiveResult:
        return await self._bounded(self._parked.receive(), self._parked.request.wait_ms + CALL_MS)

    async def shown(self) -> None:
        if self._parked.shown_at:
            await self._bounded(self._parked.shown(), CALL_MS)

    def leave(self) -> None:
        self._parked.leave()
