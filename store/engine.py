"""One store: its parts put together, brought up from the disk and taken down again.

    disk -> identity -> checkpoint -> recovery -> epoch -> writer, delivery, sealer, housekeeping

Owns every part and every background task of a store; a task that dies stops the store (`failed`), loudly:
its state in memory can no longer be trusted to be what is on the disk. Serves nothing by itself: `store.local`
is the interface over it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np

from millpond.core.clock import Clock, Random
from millpond.core.config import StoreConfig, TierConfig
from millpond.core.errors import MillpondError
from millpond.core.frame import seed_of
from millpond.core.limits import RECENT_BYTES, RECENT_UNASKED_BYTES, SEAL_POSTPONE_BYTES, SEGMENT_BYTES_LEAST
from millpond.core.tasks import Tasks
from millpond.core.tier.objects import ObjectStore
from millpond.metadata.client import MetadataClient
from millpond.store.ahead import FramesAhead
from millpond.store.append import Appends
from millpond.store.checkpoint import VERSION, Checkpoints, Head
from millpond.store.client import StoreStatus
from millpond.store.commitlog import FOLDER as LOG_FOLDER
from millpond.store.commitlog import CommitLog
from millpond.store.delivery import Delivery
from millpond.store.delivery_log import EngineLog
from millpond.store.disk import Disk
from millpond.store.fold.fold import Fold
from millpond.store.fold.operations import NewerFormat
from millpond.store.fold.queues import QueueState
from millpond.store.fold.snapshot import Snapshot, together
from millpond.store.housekeeping import Housekeeping
from millpond.store.identity import DirectoryRefused, load_or_create
from millpond.store.reader import FrameReader
from millpond.store.reads import Reads
from millpond.store.recent import Newest
from millpond.store.restore import Restored, restore
from millpond.store.retention import Retention
from millpond.store.seal_source import EngineSealSource
from millpond.store.store_time import StoreTime
from millpond.store.tail import Tail
from millpond.store.tier.apart import WorkApart
from millpond.store.tier.channel import Place
from millpond.store.tier.making import LocalWork
from millpond.store.tier.sealer import Sealer
from millpond.store.tier.work import Work
from millpond.store.writer import Writer

_log = logging.getLogger("millpond.store")
T = TypeVar("T")


class Engine:
    """A running store. `await Engine.open(...)`, then `close()`."""

    def __init__(
        self,
        config: StoreConfig,
        tier: TierConfig,
        disk: Disk,
        metadata: MetadataClient,
        objects: ObjectStore,
        clock: Clock,
        random: Random,
        seal_apart: bool,
    ) -> None:
        self.config = config
        self._tier = tier
        self._disk = disk
        self._metadata = metadata
        self._objects = objects
        self._clock = clock
        self._random = random
        self._seal_apart = seal_apart
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._tasks = Tasks(self._on_death)
        self._calls: set[asyncio.Task[Any]] = set()
        self.quarantined: list[tuple[int, int]] = []
        self.lost: list[tuple[int, int, int]] = []
        self.ready = False
        self.serving = False

    # -- up ------------------------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        config: StoreConfig,
        tier: TierConfig,
        disk: Disk,
        metadata: MetadataClient,
        objects: ObjectStore,
        clock: Clock,
        random: Random,
        seal_apart: bool = False,
    ) -> Engine:
        """Recover what is on the disk and start. `seal_apart`: sealing has a process of its own (which reads
        `config.data` itself, whatever `disk` is). Raises DirectoryRefused, Conflict(epoch_superseded), OSError."""
        engine = cls(config, tier, disk, metadata, objects, clock, random, seal_apart)
        try:
            await engine._start()
        except BaseException:
            await engine._tasks.close()
            disk.close()
            raise
        return engine

    async def _start(self) -> None:
        restored = await asyncio.get_running_loop().run_in_executor(None, self._restore)
        info = await self._metadata.register_store(self.config.group, self._node, self.config.advertise)
        if info.epoch <= restored.epoch:
            raise DirectoryRefused(
                f"metadata gives epoch {info.epoch}, but the log has seen {restored.epoch}: the metadata database is "
                "older than this store; restore the newer database"
            )
        self._assemble(restored)
        self.log.epoch = info.epoch
        self._epochs = [*restored.epochs, (info.epoch, self.log.tail)]
        self.tail.epoch_start()
        self._spawn_loops()
        await self.writer.flushed(self.log.tail)
        await self._learn_tiered()
        for spoilt in restored.complaints:
            _log.error("recovery: %s", spoilt)
        if restored.changed:
            await self.housekeeping.checkpoint()
        self.ready = self.serving = True

    def _restore(self) -> Restored:
        """Everything that reads the disk before the store may append. Blocks."""
        try:
            self._disk.lock()
        except BlockingIOError:
            raise DirectoryRefused("another process is using this data directory: stop it first") from None
        if self.config.segment_bytes < SEGMENT_BYTES_LEAST:
            raise DirectoryRefused(f"segment_bytes must be at least {SEGMENT_BYTES_LEAST}")
        identity = load_or_create(self._disk, self.config.group, self.config.segment_bytes, self._random)
        self._node = identity.node
        self._disk.make_folder(LOG_FOLDER)
        self.log = CommitLog(self._disk, identity.segment_bytes, seed_of(bytes.fromhex(identity.log_id)))
        self.checkpoints = Checkpoints(self._disk)
        try:
            return restore(self._disk, self.log, self.checkpoints)
        except NewerFormat as error:
            raise DirectoryRefused(f"{error}: start a newer release") from error

    def _assemble(self, restored: Restored) -> None:
        config = self.config
        self.fold: Fold = restored.fold
        self.directory = restored.directory
        self.quarantined = restored.quarantined
        self.lost = restored.lost
        self.time = StoreTime(self._clock, restored.last_ts)
        recent = Newest(RECENT_BYTES, RECENT_UNASKED_BYTES)
        self.tail = Tail(self.log, self.directory, self.fold, self.time, recent, self._rolled, self._dropped)
        self.writer = Writer(
            self.log, self._gather, self._flushing, self._confirmed, self.tail.messages_end, self.time.now_ms
        )
        self.reader = FrameReader(self.log, recent, self._quarantine, self.writer.awaiting)
        self.ahead = FramesAhead(self.fold.queues, self.directory, self.reader, self.writer.awaiting)
        self.reads = Reads(self.fold.queues, self.directory, self.reader, self.ahead, self.lost, self.writer.hurry)
        self.delivery_log = EngineLog(self.tail, self.writer, self.directory, self.reader, self.ahead, self.reads)
        self.delivery = Delivery(self.delivery_log, self.fold.cursors, self.time.now_ms, self.writer.hurry)
        self.seal_source = EngineSealSource(
            config.group, self.tail, self.reader, self.reads.missing, self._tier.seal_bytes, config.local_bytes
        )
        self.sealer = Sealer(
            self.seal_source,
            self._metadata,
            self._objects,
            self._seal_work(),
            self._tier,
            self._clock,
            self._random,
            min(SEAL_POSTPONE_BYTES, config.local_bytes // 8),
        )
        self.retention = Retention(
            self.tail,
            self.writer,
            self.reader,
            self.reads,
            self.checkpoints,
            self.delivery,
            self._metadata,
            self.sealer.seal_topic,
            config.local_bytes,
        )
        self.housekeeping = Housekeeping(
            self.tail,
            self.writer,
            self.checkpoints,
            self._snapshot,
            self.retention.recyclable,
            (config.checkpoint_bytes, config.checkpoint_frames),
        )
        self.appends = Appends(self.tail, self.writer, self.housekeeping, self.seal_source.note, self._awaited)

    def _seal_work(self) -> Work:
        if not self._seal_apart:
            return LocalWork(self.seal_source, self._objects)
        place = Place(self.config.data, self.log.segment_bytes, self.log.seed)
        tier = msgspec.structs.replace(self._tier, url=self._objects.url)
        return WorkApart(self.seal_source, place, tier, self._clock)

    def _spawn_loops(self) -> None:
        spawn = self._tasks.spawn
        spawn(self.writer.write_loop(), "store writer")
        spawn(self.writer.flush_loop(), "store flusher")
        spawn(self.housekeeping.segment_loop(), "store segments")
        spawn(self.housekeeping.zero_loop(), "store zeros")
        spawn(self.housekeeping.index_loop(), "store indexes")
        spawn(self.housekeeping.checkpoint_loop(), "store checkpoints")
        spawn(self.retention.loop(self.housekeeping), "store retention")
        spawn(self.sealer.loop(), "store sealer")
        self.writer.wake()
        self.housekeeping.rolled()

    async def _learn_tiered(self) -> None:
        """What of each queue is in the tier and on this disk: worked out anew at every start."""
        tiered = await self._metadata.tiered_to([queue.ref.queue_id for queue in self.fold.queues])
        beyond = [queue for queue in self.fold.queues if tiered.get(queue.ref.queue_id, 0) > queue.next_offset]
        if beyond:
            await self._drop_deleted(beyond, tiered)
        queues = list(self.fold.queues)
        for queue in queues:
            queue.tiered_to = tiered.get(queue.ref.queue_id, 0)
        local, unsealed = self.directory.survey(
            np.array([queue.ref.queue_id for queue in queues], np.int64),
            np.array([queue.tiered_to for queue in queues], np.int64),
        )
        for queue, local_offset, unsealed_bytes in zip(queues, local.tolist(), unsealed.tolist(), strict=True):
            queue.local_offset, queue.unsealed_bytes = local_offset, unsealed_bytes

    async def _drop_deleted(self, beyond: list[QueueState], tiered: dict[int, int]) -> None:
        """Of these queues the tier has more than the log. A message that came after its topic was deleted may have
        opened one anew."""
        settings = await self._metadata.topic_settings(sorted({queue.ref.topic_id for queue in beyond}))
        for queue in beyond:
            topic_id, queue_id = queue.ref.topic_id, queue.ref.queue_id
            if topic_id in settings and settings[topic_id] is None:
                self.tail.drop_topic(topic_id)
                continue
            raise DirectoryRefused(
                f"the tier holds messages of queue {queue_id} up to {tiered[queue_id]}, the log ends at "
                f"{queue.next_offset}: this is an older copy of the data directory; restore the newest one"
            )

    # -- called by the parts -------------------------------------------------------------------------------

    def _gather(self) -> bool:
        """Put this turn's state changes at the tail, before a write. False: some wait for room."""
        done = self.tail.gather_state()
        if not done:
            self.housekeeping.demand_segment()
        self.housekeeping.appended()
        return done

    def _flushing(self) -> bool:
        return any([self.delivery.on_flushing(queue.ref.queue_id) for queue in self.tail.begin_flush()])

    def _confirmed(self) -> None:
        for queue in self.tail.publish():
            self.reads.notify(queue.ref.queue_id)
            self.delivery.on_confirmed(queue.ref.queue_id)

    def _awaited(self, queue_id: int) -> bool:
        return self.reads.awaits(queue_id) or self.delivery.awaits(queue_id)

    def _rolled(self) -> None:
        self.housekeeping.rolled()

    def _dropped(self, topic_id: int) -> None:
        self.delivery.drop_topic(topic_id)
        self.seal_source.drop_topic(topic_id)

    def _quarantine(self, position: int, end: int) -> None:
        if (position, end) not in self.quarantined:
            self.quarantined.append((position, end))
            _log.error("log damaged: positions %d to %d are quarantined", position, end)

    def _snapshot(self) -> tuple[Head, Snapshot]:
        self._gather()
        head = Head(
            VERSION,
            self.log.tail,
            self.log.confirmed,
            self.log.epoch,
            self.time.now_ms(),
            self.directory.open.base,
            self._epochs,
            self.quarantined,
            self.lost,
        )
        return head, together((self.fold.snapshot(), self.directory.open.snapshot()))

    def _on_death(self, name: str, error: BaseException) -> None:
        self.ready = self.serving = False
        if not self.failed.done():
            self.failed.set_result(error)
        _log.critical("the store stops: %s died: %s", name, error)

    def spawn_call(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run an accepted call to its end, whoever still waits for it; `close` waits for it too."""
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._call_ended)
        return task

    def _call_ended(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, MillpondError):
            _log.error("a call failed", exc_info=error)

    # -- down ----------------------------------------------------------------------------------------------

    def status(self) -> StoreStatus:
        log = self.log
        counters = {
            "messages_appended_total": float(self.appends.messages),
            "bytes_appended_total": float(self.appends.bytes),
            "frames_appended_total": float(self.tail.frames),
            "flushes_total": float(self.writer.flushes),
            "flush_seconds_total": self.writer.flush_seconds,
            "checkpoints_total": float(self.housekeeping.checkpoints_taken),
            "segments_recycled_total": float(self.housekeeping.segments_recycled),
            "segments": float(len(log.segments)),
            "unflushed_bytes": float(log.tail - log.flushed),
            **self.sealer.counters(),
        }
        return StoreStatus(
            self.config.group,
            log.epoch,
            log.tail,
            log.confirmed,
            log.first_position,
            self.housekeeping.checkpoint_position,
            len(self.fold.queues),
            self.ready,
            self.housekeeping.disk_full,
            self.quarantined,
            counters,
        )

    async def close(self) -> None:
        """Drain, mark, checkpoint, stop. Idempotent; after a death only what is open is closed."""
        self.serving = False
        self.ready = False
        self.delivery.close()
        await self.ahead.close()
        if not self.failed.done():
            await self._say_goodbye()
        await self._tasks.close()
        await self.sealer.close()
        self.writer.stop()
        self.housekeeping.stop()
        self.reader.close()
        self.directory.stop()
        self.log.close()
        self._disk.close()

    async def _say_goodbye(self) -> None:
        try:
            async with asyncio.timeout(10):
                if self._calls:
                    await asyncio.wait(self._calls)
                await self.housekeeping.checkpoint()
                self.writer.mark()
                await self.writer.flushed(self.log.tail)
        except (TimeoutError, OSError) as error:
            _log.warning("closed without a last checkpoint: %s", error)
