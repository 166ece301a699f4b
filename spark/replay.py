"""The process behind `millpond replay`: a Spark driver that publishes a range of one topic into another, once.

    PUT /v1/replays/{id} -> the plan's fixed ranges -> rounds of Spark jobs, a partition per source queue -> done

A round gives every unfinished source queue a few seconds (`replay_step`); between rounds the replay's row gets the
progress of all queues in one update, so its numbers always belong together. Kill it at any moment and run it again:
each message ends exactly once at the target, in source order per source queue.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from millpond.core.clock import Clock, SystemClock
from millpond.core.errors import MillpondError, OffsetExpired, from_info
from millpond.core.limits import DETAIL_CHARS, REPLAY_ROUND_SECONDS
from millpond.spark.http import HttpClient, path_of
from millpond.spark.plan import ClockName, Stretch, fetch_plan, stretches
from millpond.spark.publish import Sessions
from millpond.spark.replay_step import Route, Step, StepResult, run_encoded, session_id
from millpond.spark.session import is_running, require_pyspark, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("millpond.spark.replay")


class ReplayFilter(msgspec.Struct, frozen=True, omit_defaults=True):
    """`tag`: "a || b"; `properties`: all of these values. Both: both."""

    tag: str | None = None
    properties: dict[str, str] = {}


class ReplaySpec(msgspec.Struct, frozen=True, rename={"from_ms": "from", "to_ms": "to"}):
    """What is asked: `from_ms` <= clock value < `to_ms` of `topic` into `target`. `rate`: messages per second."""

    topic: str
    target: str
    from_ms: int | None = None
    to_ms: int | None = None
    clock: ClockName = "store"
    filter: ReplayFilter | None = None
    rate: int | None = None

    def default_id(self) -> str:
        """A digest of the arguments: the same command again is the same replay."""
        digest = hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=8)
        return digest.hexdigest()


class ReplayProgress(msgspec.Struct, frozen=True):
    """`read` of `total` messages have been looked at, `published` of them taken.

    `total` leaves out what the plan prunes by time, so it is what there is to look at.
    """

    replay_id: str
    read: int
    published: int
    total: int


class ReplayResult(msgspec.Struct, frozen=True):
    """`read`, `published`: of the whole replay, earlier runs included. `lost` (left out), `seconds`: of this run."""

    replay_id: str
    state: Literal["done"]
    read: int
    published: int
    lost: int
    seconds: float


class QueueRange(msgspec.Struct, frozen=True):
    """Source offsets [first, end) of one queue; `at`: next to read."""

    queue: int
    first: int
    end: int
    at: int | None = None


class ReplayRow(msgspec.Struct, frozen=True):
    """A replay as `GET /v1/replays/{id}` shows it, as far as needed here."""

    replay_id: str
    state: str
    source_topic_id: int
    target_queues: int
    queues: list[QueueRange]
    read: int = 0
    published: int = 0


Report = Callable[[ReplayProgress], None]


def run(
    url: str,
    key: str | None,
    replay_id: str | None,
    spec: ReplaySpec,
    progress: Report | None = None,
    *,
    spark: SparkSession | None = None,
    master: str = "local[*]",
    skip_lost: bool = False,
    clock: Clock | None = None,
) -> ReplayResult:
    """Create the replay (or take up the one there is) and bring it to its end.

    `replay_id` None: `spec.default_id()`. `progress` is called after every round. `skip_lost`: messages that retention
    deleted since the plan was made, or a disk damaged, are left out, which the row then says, instead of an error.
    Raises SparkMissing, JavaNotFound, NotFound, Conflict(replay_differs: another plan has this id), OffsetExpired,
    Unreachable, Internal (`corrupt_range`: damaged messages).
    """
    require_pyspark()
    clock = clock or SystemClock()
    began = clock.monotonic()
    with HttpClient(url, key, clock=clock) as client:
        replay = _Replay(client, replay_id or spec.default_id(), spec, skip_lost=skip_lost)
        if replay.state != "done":
            own = spark is None and not is_running()
            spark = spark or session("millpond replay", master=master)
            try:
                replay.run(spark, progress)
            except Exception as error:
                replay.fail(error)
                raise
            finally:
                if own:
                    spark.stop()
        seconds = clock.monotonic() - began
        return ReplayResult(replay.replay_id, "done", replay.read, replay.published, replay.lost, seconds)


class _Replay:
    """One replay under way: its row, and where each source queue stands."""

    def __init__(self, client: HttpClient, replay_id: str, spec: ReplaySpec, *, skip_lost: bool) -> None:
        self.replay_id = replay_id
        self.lost = 0
        self._skip_lost = skip_lost
        self._client = client
        self._spec = spec
        self._path = path_of("replays", replay_id)
        row = client.send("PUT", self._path, _asked(spec), ReplayRow)
        self.state, self.read, self.published = row.state, row.read, row.published
        self._ranges = {part.queue: part for part in row.queues}
        self._at = {part.queue: part.first if part.at is None else part.at for part in row.queues}
        self._source_topic_id, self._target_queues = row.source_topic_id, row.target_queues

    def run(self, spark: SparkSession, progress: Report | None) -> None:
        pieces = self._stretches()
        total = self.read + sum(piece.end - piece.first for some in pieces.values() for piece in some)
        seconds = REPLAY_ROUND_SECONDS / 5
        self._report("running")
        while unfinished := [q for q, part in self._ranges.items() if self._at[q] < part.end]:
            steps = [self._step(queue, pieces.get(queue, []), seconds, len(unfinished)) for queue in unfinished]
            for result in _round(spark, steps):
                self._at[result.queue] = result.at
                self.read += result.read
                self.published += result.published
                self.lost += result.lost
            self._report("running")
            if progress is not None:
                progress(ReplayProgress(self.replay_id, self.read, self.published, total))
            seconds = REPLAY_ROUND_SECONDS
        for queue in self._ranges:
            Sessions(self._client, self._spec.target, session_id(self.replay_id, queue)).close()
        self._report("done", f"{self.lost} messages were lost, and are left out" if self.lost else "")

    def fail(self, error: Exception) -> None:
        """Leave a word in the row, if the service can still be reached; the next run takes the replay up again."""
        try:
            self._report("failed", f"{type(error).__name__}: {error}")
        except MillpondError:
            _log.warning("replay %s: its row could not be told that it failed", self.replay_id)

    def _stretches(self) -> dict[int, list[Stretch]]:
        """Which offsets can hold asked messages: the plan prunes whole objects by time."""
        spec = self._spec
        plan = fetch_plan(self._client, spec.topic, spec.from_ms, spec.to_ms, spec.clock)
        for there in plan.queues:
            self._expire(there.queue, there.start_offset)
        bounds = {queue: (self._at[queue], part.end) for queue, part in self._ranges.items()}
        found: dict[int, list[Stretch]] = {}
        for stretch in stretches(plan, bounds, timed=spec.from_ms is not None or spec.to_ms is not None):
            found.setdefault(stretch.queue, []).append(stretch)
        return found

    def _expire(self, queue: int, start_offset: int) -> None:
        """Retention has deleted all below. Raises OffsetExpired, unless what is lost is left out."""
        if queue not in self._ranges:
            return
        at, begin = self._at[queue], min(self._ranges[queue].end, start_offset)
        if at >= begin:
            return
        if not self._skip_lost:
            raise OffsetExpired(
                "offset_expired",
                f"{self._spec.topic!r} queue {queue}: the replay stands at {at}, and retention has deleted all "
                f"below {start_offset}",
                start_offset=start_offset,
            )
        self.lost += begin - at
        self._at[queue] = begin

    def _step(self, queue: int, pieces: list[Stretch], seconds: float, tasks: int) -> Step:
        spec = self._spec
        wanted = spec.filter or ReplayFilter()
        route = Route(
            self.replay_id, spec.topic, self._source_topic_id, spec.target, self._target_queues, spec.clock,
            spec.from_ms, spec.to_ms, wanted.tag, wanted.properties, None if spec.rate is None else spec.rate / tasks,
            self._skip_lost,
        )  # fmt: skip
        at = self._at[queue]
        ahead = [piece for piece in pieces if piece.end > at]
        return Step(self._client.url, self._client.key, route, queue, at, self._ranges[queue].end, ahead, seconds)

    def _report(self, state: str, detail: str = "") -> None:
        body: dict[str, Any] = {
            "state": state,
            "progress": {str(queue): at for queue, at in self._at.items()},
            "read": self.read,
            "published": self.published,
            "detail": detail[:DETAIL_CHARS],
        }
        self._client.call("POST", self._path + "/progress", msgspec.json.encode(body))
        self.state = state


def _round(spark: SparkSession, steps: list[Step]) -> list[StepResult]:
    """One Spark job: a partition per step."""
    encoded = [msgspec.json.encode(step) for step in steps]
    results = spark.sparkContext.parallelize(encoded, len(encoded)).mapPartitions(run_encoded).collect()
    done = [msgspec.json.decode(result, type=StepResult) for result in results]
    for result in done:
        if result.error is not None:
            raise from_info(result.error)
    return done


def _asked(spec: ReplaySpec) -> dict[str, Any]:
    """The body of the PUT: what was asked, without what was left open."""
    asked: dict[str, Any] = msgspec.to_builtins(spec)
    return {name: value for name, value in asked.items() if value is not None}
