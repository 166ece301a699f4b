"""The deduplication windows: which `dedup_id`s a topic has seen lately, and at which offset.

    topic -> bucket (10 s of frame time) -> sorted runs of columns
             high u64 (sort key)  low u64  offset i64  check u32  timestamp i64

`high` and `low` are the message's 16-byte hash, its first half mixed with the queue id, for an id counts within
one queue. A small append is a run of its own; runs of similar length are merged, so that n small appends cost
n log n and a bucket has few runs; a bucket that time has left is one run and never changes again. Probing is one
binary search for each run, for a whole batch at once. What falls out of the window goes bucket by bucket.

A window counts by frame timestamps: an entry answers as long as its own timestamp is inside the window that the
append names, so what a probe finds does not depend on when buckets are dropped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.errors import TooManyRequests
from millpond.core.limits import DEDUP_BUCKET_MS, DEDUP_ENTRIES, DEDUP_WINDOW_MS_MOST
from millpond.store.client import Duplicate, QueueRef
from millpond.store.fold.snapshot import Snapshot, Tables, table_of

Array = npt.NDArray[Any]

_COLUMNS = ("topic_id", "tenant_id", "window_ms")
_GOLDEN = 0x9E3779B97F4A7C15  # spreads small queue ids over 64 bits
_MASK = (1 << 64) - 1


class Run(NamedTuple):
    """Entries sorted by `high`; equal ones by time."""

    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.int64]
    check: npt.NDArray[np.uint32]
    ts: npt.NDArray[np.int64]


_TYPES = Run(np.uint64, np.uint64, np.int64, np.uint32, np.int64)  # type: ignore[arg-type]  # one type for each column


class _Bucket:
    """What one topic saw within ten seconds."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        self.runs: list[Run] = []  # each more than twice as long as the next

    def __len__(self) -> int:
        return sum(len(run.high) for run in self.runs)

    def add(self, run: Run) -> None:
        runs = self.runs
        runs.append(run)
        while len(runs) > 1 and len(runs[-2].high) <= 2 * len(runs[-1].high):
            newer, older = runs.pop(), runs.pop()
            runs.append(_merged([older, newer]))

    def close(self) -> None:
        if len(self.runs) > 1:
            self.runs = [_merged(self.runs)]


class _Topic:
    __slots__ = ("buckets", "tenant_id", "window_ms")

    def __init__(self, tenant_id: int) -> None:
        self.tenant_id = tenant_id
        self.buckets: dict[int, _Bucket] = {}  # by timestamp // DEDUP_BUCKET_MS, ascending
        self.window_ms = DEDUP_WINDOW_MS_MOST  # until an append says what it is


class Dedup:
    """All windows of a store."""

    def __init__(self) -> None:
        self._topics: dict[int, _Topic] = {}
        self._entries: dict[int, int] = {}  # tenant id -> entries held
        self._closed: dict[int, pa.Table] = {}  # bucket number -> its table, which never changes; made by snapshots
        self._bucket = 0  # the newest one

    def entries(self, tenant_id: int) -> int:
        return self._entries.get(tenant_id, 0)

    def probe(
        self,
        queue: QueueRef,
        hashes: npt.NDArray[np.void],
        checks: npt.NDArray[np.uint32],
        now: int,
        window_ms: int,
    ) -> list[Duplicate]:
        """Which rows of an append (hashes V16[n], checks u32[n]) repeat a message younger than `window_ms` at `now`.

        Raises TooManyRequests(dedup_window_full) when the tenant has no room for the others.
        """
        self._advance(now)
        topic = self._topics.get(queue.topic_id)
        duplicates: dict[int, Duplicate] = {}
        if topic is not None:
            topic.window_ms = window_ms
            high, low = _halves(queue.queue_id, hashes)
            for number in reversed(topic.buckets):
                if (number + 1) * DEDUP_BUCKET_MS <= now - window_ms:
                    break
                for run in topic.buckets[number].runs:
                    _probe_run(run, high, low, checks, now - window_ms, duplicates)
        if self.entries(queue.tenant_id) + len(hashes) - len(duplicates) > DEDUP_ENTRIES:
            raise TooManyRequests(
                "dedup_window_full",
                f"more than {DEDUP_ENTRIES} deduplication ids within the window of this tenant's topics",
                retry_after_ms=DEDUP_BUCKET_MS,
            )
        return [duplicates[row] for row in sorted(duplicates)]

    def record(
        self,
        queue: QueueRef,
        hashes: npt.NDArray[np.void],
        checks: npt.NDArray[np.uint32],
        first_offset: int,
        store_ts: int,
    ) -> None:
        """The frame of these rows stands at `first_offset`, stamped `store_ts`. Never refuses: it is in the log."""
        self._advance(store_ts)
        count = len(hashes)
        if not count:
            return
        topic = self._topics.get(queue.topic_id)
        if topic is None:
            topic = self._topics[queue.topic_id] = _Topic(queue.tenant_id)
        high, low = _halves(queue.queue_id, hashes)
        order = np.argsort(high, kind="stable")
        offsets = np.arange(first_offset, first_offset + count)
        run = Run(high[order], low[order], offsets[order], checks[order], np.full(count, store_ts))
        self._bucket_of(topic, store_ts // DEDUP_BUCKET_MS).add(run)
        self._entries[queue.tenant_id] = self.entries(queue.tenant_id) + count

    def _bucket_of(self, topic: _Topic, number: int) -> _Bucket:
        bucket = topic.buckets.get(number)
        if bucket is None:
            assert not topic.buckets or number > next(reversed(topic.buckets)), "frame time never goes back"
            bucket = topic.buckets[number] = _Bucket()
        return bucket

    def drop_topic(self, topic_id: int) -> None:
        topic = self._topics.pop(topic_id, None)
        if topic is not None:
            for bucket in topic.buckets.values():
                self._entries[topic.tenant_id] -= len(bucket)
            self._closed = {}

    # -- time -------------------------------------------------------------------------------------------------

    def _advance(self, now: int) -> None:
        """Once in ten seconds: close the buckets that time has left, drop those that no window reaches."""
        number = now // DEDUP_BUCKET_MS
        if number <= self._bucket:
            return
        previous, self._bucket = self._bucket, number
        for topic_id, topic in list(self._topics.items()):
            if previous in topic.buckets:
                topic.buckets[previous].close()
            self._expire(topic, now)
            if not topic.buckets:
                del self._topics[topic_id]
        self._entries = {tenant: count for tenant, count in self._entries.items() if count}

    def _expire(self, topic: _Topic, now: int) -> None:
        while topic.buckets:
            oldest = next(iter(topic.buckets))
            if (oldest + 1) * DEDUP_BUCKET_MS > now - topic.window_ms:
                return
            bucket = topic.buckets.pop(oldest)
            self._entries[topic.tenant_id] -= len(bucket)

    # -- snapshot ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """`dedup`: one row for each topic; `dedup.<number>`: the entries of a bucket, of all topics.

        The table of a closed bucket is built once and shared by all snapshots (it may hold entries that have
        since expired: they answer nothing).
        """
        topics = [(topic_id, topic.tenant_id, topic.window_ms) for topic_id, topic in self._topics.items()]
        numbers = sorted({number for topic in self._topics.values() for number in topic.buckets})
        closed, newest = self._closed, self._bucket
        held = {number: closed.get(number) or self._runs_of(number) for number in numbers}

        def tables() -> Tables:
            made = {number: _bucket_table(runs) if isinstance(runs, list) else runs for number, runs in held.items()}
            for gone in closed.keys() - made.keys():
                del closed[gone]
            closed.update({number: table for number, table in made.items() if number < newest})
            return {"dedup": table_of(topics, _COLUMNS), **{f"dedup.{number}": table for number, table in made.items()}}

        return tables

    def _runs_of(self, number: int) -> list[tuple[int, list[Run]]]:
        """What each topic saw in a bucket, as runs, which never change."""
        return [
            (topic_id, topic.buckets[number].runs.copy())
            for topic_id, topic in self._topics.items()
            if number in topic.buckets
        ]

    def load(self, tables: Tables) -> None:
        """Into an empty instance, what `snapshot` gave."""
        assert not self._topics
        for topic_id, tenant_id, window_ms in zip(*(c.to_pylist() for c in tables["dedup"].columns), strict=True):
            topic = self._topics[topic_id] = _Topic(tenant_id)
            topic.window_ms = window_ms
        numbers = sorted(int(name.removeprefix("dedup.")) for name in tables if name.startswith("dedup."))
        for number in numbers:
            self._load_bucket(number, tables[f"dedup.{number}"])
        self._bucket = numbers[-1] if numbers else 0

    def _load_bucket(self, number: int, table: pa.Table) -> None:
        ids, *columns = (column.to_numpy() for column in table.columns)
        bounds = np.flatnonzero(np.diff(ids)) + 1
        for start, end in zip([0, *bounds.tolist()], [*bounds.tolist(), len(ids)], strict=True):
            topic = self._topics.get(int(ids[start]))
            if topic is not None:
                topic.buckets[number] = bucket = _Bucket()
                bucket.runs = [Run(*(column[start:end] for column in columns))]
                self._entries[topic.tenant_id] = self.entries(topic.tenant_id) + end - start


def _bucket_table(held: list[tuple[int, list[Run]]]) -> pa.Table:
    runs = [runs[0] if len(runs) == 1 else _merged(runs) for _, runs in held]
    ids = np.repeat(np.array([topic_id for topic_id, _ in held]), [len(run.high) for run in runs])
    columns = [np.concatenate(column) for column in zip(*runs, strict=True)]
    return pa.table({"topic_id": ids, **dict(zip(Run._fields, columns, strict=True))})


def _halves(queue_id: int, hashes: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    pairs = np.ascontiguousarray(hashes).view("<u8").reshape(-1, 2)
    return pairs[:, 0] ^ np.uint64((queue_id * _GOLDEN) & _MASK), pairs[:, 1].copy()


def _merged(runs: list[Run]) -> Run:
    """One run; `runs` from old to new."""
    columns = [np.concatenate(column) for column in zip(*runs, strict=True)]
    order = np.argsort(columns[0], kind="stable")  # timsort or radix: merges what is sorted
    return Run(*(column[order] for column in columns))


def _probe_run(run: Run, high: Array, low: Array, checks: Array, since_ts: int, found: dict[int, Duplicate]) -> None:
    """Enter into `found` the rows that this run knows with a timestamp above `since_ts`, each once."""
    at = run.high.searchsorted(high)
    near = np.minimum(at, len(run.high) - 1)
    rows = np.flatnonzero(run.high[near] == high)
    for row in rows.tolist():  # repeats only: a retry, not the usual append
        if row in found:
            continue
        entry = int(at[row])
        while entry < len(run.high) and run.high[entry] == high[row]:
            if run.low[entry] == low[row] and run.ts[entry] > since_ts:
                mismatch = bool(run.check[entry] != checks[row])
                found[row] = Duplicate(row, int(run.offset[entry]), int(run.ts[entry]), mismatch)
                break
            entry += 1
