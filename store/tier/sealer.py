"""Carries confirmed messages from the log into the tier: `Sealer`, owned by the store engine.

    policy.due -> Work.begin -> Work.finish -> commit.Committer (Work.put) -> SealSource.tiered

One run is read and encoded while the one before is finished, uploaded, verified and committed. Objects of a topic are
committed in order. The work itself is done elsewhere (`work.Work`), beside appends and after them.
Where to go on is asked of the manifest in every pass: a crash at any point repeats work, never offsets. While the tier
or the metadata is away, produce goes on and the log keeps everything.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from millpond.core.clock import Clock, Random
from millpond.core.config import TierConfig
from millpond.core.errors import MillpondError, NotFound, Unavailable
from millpond.core.limits import SEAL_PAUSE_SECONDS_MOST, SEAL_POSTPONE_BYTES, SEAL_TICK_SECONDS
from millpond.core.tier.layout import object_name
from millpond.core.tier.objects import ObjectStore
from millpond.metadata.client import MetadataClient, TierObject, TopicInfo
from millpond.store.client import QueueRef
from millpond.store.tier import postponement
from millpond.store.tier.commit import Committer
from millpond.store.tier.in_turn import InTurn
from millpond.store.tier.policy import due
from millpond.store.tier.run import Wanted
from millpond.store.tier.source import SealSource
from millpond.store.tier.work import Begun, Job, Made, Work

log = logging.getLogger(__name__)

TOPICS_IN_A_TURN = 200  # looked at in one turn of the store's loop: about 1 ms
__all__ = ["SealSource", "Sealer"]


class SealCounters(msgspec.Struct):
    """For /metrics: raw bytes went in, bytes came out; seconds are of encoding and of hash, upload and commit,
    which go on side by side."""

    seal_objects_total: float = 0
    seal_rows_total: float = 0
    seal_raw_bytes_total: float = 0
    seal_bytes_total: float = 0
    seal_seconds_total: float = 0
    seal_failures_total: float = 0
    seal_lost_rows_total: float = 0  # damaged in the log before they were sealed


class Sealer:
    def __init__(
        self,
        source: SealSource,
        metadata: MetadataClient,
        objects: ObjectStore,
        work: Work,
        config: TierConfig,
        clock: Clock,
        random: Random,
        postpone_bytes: int = SEAL_POSTPONE_BYTES,
    ) -> None:
        """`postpone_bytes`: what may be appended while full runs wait for a quieter moment (`postponement`)."""
        self._source = source
        self._objects = objects
        self._work = work
        self._metadata = metadata
        self._config = config
        self._clock = clock
        self._random = random
        self._committer = Committer(metadata, random)
        self._postponement = postponement.Postponement(postpone_bytes)
        self._one = asyncio.Lock()
        self._last_queue: dict[
            int, int
        ] = {}  # topic id -> queue that the last run ended with: the next one begins after
        self._counted = SealCounters()
        self.last_error = ""  # empty when the last round went well

    async def loop(self) -> None:
        """Rounds until cancelled: the owner spawns this. Ends by itself only when another primary has taken over."""
        failures = sealed = 0
        await self._woken(sealed)  # not beside the start of all the other parts: to look at 10,000 queues takes 0.2 s
        while True:
            try:
                if failures:
                    await self._objects.check()
                sealed = await self.seal_once(self._clock.wall_ms())
                if not sealed:
                    await self._work.rest()
                failures, self.last_error = 0, ""
            except MillpondError as error:
                if error.code == "epoch_superseded":
                    raise
                failures += 1
                self._counted.seal_failures_total += 1
                self.last_error = error.detail
                log.warning("sealing pauses: %s", error.detail)
                pause = min(SEAL_PAUSE_SECONDS_MOST, 2.0 ** min(failures, 10))
                await asyncio.sleep(self._random.uniform(pause / 2, pause))
                continue
            await self._woken(sealed)

    async def seal_once(self, now_ms: int) -> int:
        """One round: every run that is due. How many objects were committed.

        A topic that cannot be sealed does not hold up the others; the first such error is raised at the end.
        An unavailable tier or metadata, and a newer primary, end the round at once.
        """
        topics = dict.fromkeys(self._source.topic_ids())
        self._last_queue = {topic: queue for topic, queue in self._last_queue.items() if topic in topics}
        objects, first_error = 0, None
        for number, topic_id in enumerate(topics):
            if not number % TOPICS_IN_A_TURN:
                await asyncio.sleep(0)
            if not self._due(topic_id, now_ms):
                continue
            try:
                async with self._one:
                    objects += (await self._seal(topic_id, now_ms))[0]
            except NotFound:
                log.info("topic %d is gone: its messages are not sealed", topic_id)
            except MillpondError as error:
                if isinstance(error, Unavailable) or error.code == "epoch_superseded":
                    raise
                log.error("topic %d cannot be sealed: %s", topic_id, error.detail)
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return objects

    async def seal_topic(self, topic_id: int) -> dict[int, int]:
        """Seal everything that is confirmed now; queue id -> tiered_to. Raises Unavailable(tier_unavailable)."""
        async with self._one:
            return (await self._seal(topic_id, None))[1]

    def counters(self) -> dict[str, float]:
        return msgspec.structs.asdict(self._counted)

    async def close(self) -> None:
        """End the work; the owner has cancelled `loop` before."""
        await self._work.close()

    async def _woken(self, sealed: int) -> None:
        """Until there may be something to do. Whoever has sealed nothing just now, or a while ago, sees first how fast
        bytes come; and many wakes are one look at all topics."""
        try:
            async with asyncio.timeout(SEAL_TICK_SECONDS):
                await self._source.wake.wait()
        except TimeoutError:
            return
        now = self._clock.monotonic()
        if not sealed or self._postponement.stale(now):
            self._postponement.begin(now, self._source.appended_bytes)
            await asyncio.sleep(postponement.LOOK_SECONDS)
        self._source.wake.clear()

    async def _seal(self, topic_id: int, now_ms: int | None) -> tuple[int, dict[int, int]]:
        """Runs of one topic while they are due (`now_ms` None: while there is anything); objects and tiered_to.

        What is confirmed at the start is the most it takes: a busy topic does not keep the others waiting.
        """
        await self._committer.resolve(self._source.store_group, self._source.epoch)
        topic = await self._metadata.topic_by_id(topic_id)
        queues = sorted(self._source.queue_refs(topic_id), key=lambda each: each.queue)
        ends = {each.queue_id: self._source.confirmed_end(each.queue_id) for each in queues}
        kept = {each.queue_id: self._source.start_offset(each.queue_id) for each in queues}
        tiered = await self._tiered(queues)
        objects = 0
        async with InTurn() as commits:
            while now_ms is None or await self._is_due(topic_id, now_ms, commits):
                wanted = self._wanted(topic_id, queues, tiered, kept, ends)
                oldest_ts = self._source.unsealed(topic_id)[1]
                started, epoch = self._clock.monotonic(), self._source.epoch
                begun = await self._work.begin(Job(topic_id, epoch, wanted, oldest_ts, self._config.seal_bytes))
                if begun is None:
                    break
                self._counted.seal_seconds_total += self._clock.monotonic() - started
                try:
                    await commits.put(self._commit(topic, epoch, begun, sum(tiered.values())))
                except BaseException:
                    await self._work.drop(begun.number)
                    raise
                self._took_turns(topic_id, begun)
                tiered = tiered | begun.ends
                objects += 1
        return objects, tiered

    async def _is_due(self, topic_id: int, now_ms: int, commits: InTurn) -> bool:
        """Whether another run is. Beside one that is not committed yet only a full one."""
        if commits.busy:
            if self._source.unsealed(topic_id)[0] >= 2 * self._config.seal_bytes:
                return self._due(topic_id, now_ms)
            await commits.finish()
        return self._due(topic_id, now_ms)

    def _due(self, topic_id: int, now_ms: int) -> bool:
        reason = due(*self._source.unsealed(topic_id), now_ms, self._config)
        if reason == "full":
            return not self._postponement.waits(self._clock.monotonic(), self._source.appended_bytes)
        return reason is not None

    async def _tiered(self, queues: list[QueueRef]) -> dict[int, int]:
        """Where each queue goes on, by the manifest; the engine is told, in case a commit's answer was lost."""
        tiered = {each.queue_id: 0 for each in queues} | await self._metadata.tiered_to([q.queue_id for q in queues])
        for queue_id, end in tiered.items():
            self._source.tiered(queue_id, end)
        return tiered

    def _wanted(
        self, topic_id: int, queues: list[QueueRef], tiered: dict[int, int], kept: dict[int, int], ends: dict[int, int]
    ) -> Wanted:
        """The turn is that of the queues behind the one that the last run ended with, so that no queue waits for ever;
        the others have what those leave."""
        last = self._last_queue.get(topic_id, -1)
        leading = sum(queue.queue <= last for queue in queues)
        if leading == len(queues):
            leading = 0
        turn = sum(self._source.unsealed_of(queue.queue_id) for queue in queues[leading:])
        return Wanted(queues, tiered, kept, ends, leading, max(0, self._config.seal_bytes - turn))

    def _took_turns(self, topic_id: int, begun: Begun) -> None:
        taken, last = [piece.queue.queue for piece in begun.pieces], self._last_queue.get(topic_id, -1)
        self._last_queue[topic_id] = max([queue for queue in taken if queue > last] or taken)

    async def _commit(self, topic: TopicInfo, epoch: int, begun: Begun, sequence: int) -> None:
        """Finish, upload, verify and commit."""
        started = self._clock.monotonic()
        try:
            made = await self._work.finish(begun.number)
            path = object_name(topic.tenant, topic.tier_name, made.first_ts, sequence, epoch, self._random.bytes(8))
            await self._put(topic, epoch, made, path)
        finally:
            await self._work.drop(begun.number)
        for queue_id, end in begun.ends.items():
            self._source.tiered(queue_id, end)
        self._tell(topic, path, made)
        self._counted.seal_seconds_total += self._clock.monotonic() - started

    async def _put(self, topic: TopicInfo, epoch: int, made: Made, path: str) -> None:
        obj = TierObject(
            object_id=self._random.bytes(16).hex(),
            topic_id=topic.topic_id,
            path=path,
            bytes=made.bytes,
            sha256=made.sha256,
            footer_bytes=made.footer_bytes,
            ranges=made.ranges,
        )
        await self._committer.commit(self._source.store_group, epoch, obj, lambda: self._work.put(made, path))

    def _tell(self, topic: TopicInfo, path: str, made: Made) -> None:
        for lost in made.lost:
            self._counted.seal_lost_rows_total += lost.end - lost.first
            log.error(
                "topic %s, queue %d: messages %d to %d are not in the tier, sealing goes on behind them: %s",
                topic.name, lost.queue.queue, lost.first, lost.end - 1, lost.reason,
            )  # fmt: skip
        self._counted.seal_objects_total += 1
        self._counted.seal_rows_total += sum(each.rows for each in made.ranges)
        self._counted.seal_raw_bytes_total += made.raw_bytes
        self._counted.seal_bytes_total += made.bytes
        log.info("sealed %s: %d bytes of %d raw", path, made.bytes, made.raw_bytes)
