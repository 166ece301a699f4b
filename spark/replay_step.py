"""One step of a replay: the work of one Spark task on one source queue, for a few seconds.

    read_range --> select (clock, tag, properties) --> route (key hash mod n) --> Sessions.publish

A step begins where the replay's row says (`at`), counts from there, and ends on a boundary where everything read has
been published. What an earlier, killed process published beyond its last report is read and counted again, but not
published again: the sessions know it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.clock import Clock, SystemClock
from millpond.core.errors import ErrorInfo, MillpondError
from millpond.core.hashing import hash_binary
from millpond.core.limits import BATCH_MESSAGES, READ_MESSAGES, REPLAY_PENDING_BYTES, REPLAY_SCANNED_ROWS
from millpond.spark.http import HttpClient
from millpond.spark.plan import ClockName, Stretch
from millpond.spark.publish import Sessions, message_rows
from millpond.spark.read_range import Lost, Range, read_range, select, tag_set


class Route(msgspec.Struct, frozen=True):
    """What is the same for all queues of a replay. `rate`: messages per second of one task; None: no limit.

    `skip_lost`: messages that retention deleted or a disk damaged are left out; else they are an error.
    """

    replay_id: str
    source: str
    source_topic_id: int | None
    target: str
    target_queues: int
    clock: ClockName
    from_ms: int | None
    to_ms: int | None
    tag: str | None
    properties: dict[str, str]
    rate: float | None
    skip_lost: bool = False


class Step(msgspec.Struct, frozen=True):
    """The next piece of work on one source queue: `stretches` from `at` on, for about `seconds`."""

    url: str
    key: str | None
    route: Route
    queue: int
    at: int
    end: int
    stretches: list[Stretch]
    seconds: float


class StepResult(msgspec.Struct, frozen=True):
    """`at`: next offset to read (`end`: all done); `read`, `published` and `lost`: messages of this step.

    `error`: why the step failed; then nothing else counts, and the next run begins where this one began.
    """

    queue: int
    at: int
    read: int
    published: int
    lost: int = 0
    error: ErrorInfo | None = None


def session_id(replay_id: str, queue: int) -> str:
    return f"replay.{replay_id}.{queue}"


def run_encoded(steps: Iterable[bytes]) -> Iterable[bytes]:
    """What Spark runs for a partition: steps in, results out, as JSON."""
    for encoded in steps:
        step = msgspec.json.decode(encoded, type=Step)
        try:
            result = run_step(step)
        except MillpondError as error:  # by code, so that it is the same error in the driver
            result = StepResult(step.queue, step.at, 0, 0, error=error.info())
        yield msgspec.json.encode(result)


def run_step(step: Step, clock: Clock | None = None) -> StepResult:
    clock = clock or SystemClock()
    began = clock.monotonic()
    with HttpClient(step.url, step.key, clock=clock) as client:
        sessions = Sessions(client, step.route.target, session_id(step.route.replay_id, step.queue))
        work = _Work(step, sessions)
        for batch in _batches(client, step, work.leave_out if step.route.skip_lost else None):
            work.take(batch)
            if work.full:
                work.publish()
                _keep_pace(step.route.rate, work.published, began, clock)
                if clock.monotonic() - began >= step.seconds:
                    return work.result(work.at)
        work.publish()
        return work.result(step.end)


class _Work:
    """Selected rows waiting for the next boundary."""

    def __init__(self, step: Step, sessions: Sessions) -> None:
        self._step = step
        self._route = step.route
        self._tags = tag_set(step.route.tag)
        self._sessions = sessions
        self._pending: list[pa.RecordBatch] = []
        self._bytes = self._rows = self._scanned = 0
        self.at = step.at
        self.read = self.published = self._lost = 0

    @property
    def full(self) -> bool:
        rows_most = min(BATCH_MESSAGES, _burst(self._route.rate))
        return self._bytes >= REPLAY_PENDING_BYTES or self._rows >= rows_most or self._scanned >= REPLAY_SCANNED_ROWS

    def take(self, batch: pa.RecordBatch) -> None:
        route = self._route
        wanted = select(
            batch, clock=route.clock, from_ms=route.from_ms, to_ms=route.to_ms, tags=self._tags,
            properties=route.properties,
        )  # fmt: skip
        self.read += batch.num_rows
        self._scanned += batch.num_rows
        self.at = batch.column("offset")[-1].as_py() + 1
        if wanted.num_rows:
            self._pending.append(wanted)
            self._bytes += wanted.nbytes
            self._rows += wanted.num_rows

    def leave_out(self, first: int, end: int) -> None:
        self._lost += end - first

    def publish(self) -> None:
        """Everything selected goes to its target queues; this is a boundary."""
        if self._pending:
            rows = pa.concat_batches(self._pending)
            for queue, part in routed(rows, self._route.target_queues):
                messages = message_rows(part, origins(part, self._route.source, self._route.replay_id))
                self._sessions.publish(queue, messages, part.column("offset"))
            self.published += rows.num_rows
        self._pending, self._bytes, self._rows, self._scanned = [], 0, 0, 0

    def result(self, at: int) -> StepResult:
        return StepResult(self._step.queue, at, self.read, self.published, self._lost)


def routed(rows: pa.RecordBatch, queues: int) -> list[tuple[int, pa.RecordBatch]]:
    """Rows of one source queue by target queue, each in source order: keyed by key hash, keyless by source queue."""
    keys = rows.column("key")
    keyless = int(rows.column("queue")[0].as_py()) % queues
    numbers = np.where(np.asarray(keys.is_null()), keyless, hash_binary(keys) % queues)
    return [(int(number), rows.filter(pa.array(numbers == number))) for number in np.unique(numbers)]


def origins(rows: pa.RecordBatch, topic: str, replay_id: str) -> pa.Array:
    """The column `origin`: JSON of where each message came from."""
    queue = rows.column("queue")[0].as_py()
    before = f'{{"topic":{msgspec.json.encode(topic).decode()},"queue":{queue},"offset":'
    after = f',"replay":{msgspec.json.encode(replay_id).decode()}}}'
    return pc.binary_join_element_wise(before, rows.column("offset").cast(pa.string()), after, "")


def _batches(client: HttpClient, step: Step, lost: Lost | None) -> Iterator[pa.RecordBatch]:
    route = step.route
    for stretch in step.stretches:
        first = max(stretch.first, step.at)
        if first < stretch.end:
            span = Range(route.source, step.queue, first, stretch.end, route.source_topic_id)
            yield from read_range(client, span, min(READ_MESSAGES, _burst(route.rate)), lost)


def _burst(rate: float | None) -> int:
    """How many messages may go at once: what the rate allows in a second."""
    return READ_MESSAGES if rate is None else max(1, int(rate))


def _keep_pace(rate: float | None, published: int, began: float, clock: Clock) -> None:
    """Wait until `published` messages are what `rate` allows by now."""
    if rate is not None:
        ahead = published / rate - (clock.monotonic() - began)
        if ahead > 0:
            threading.Event().wait(ahead)
