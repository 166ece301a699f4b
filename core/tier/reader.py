"""Reads tier objects row group by row group: `TierReader`, the cold half of every read.

    footer (1 GET, cached) -> row group (1 GET, cached, the next one prefetched on sequential reading) -> rows

A seek costs at most two GETs. Loads of one thing are shared by all who want it, take fair turns between tenants
(the path names the tenant), and decode in a pool of threads. What is not exactly as it was written, or is gone,
is Internal(tier_corrupt) that names the object and the range, with `path` and `missing` beside it: never other
bytes, never fewer rows. Which object holds an offset is the manifest's business, not this module's.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.clock import Clock
from millpond.core.errors import Internal, NotFound, Unavailable
from millpond.core.limits import COLD_READS_WAITING
from millpond.core.priority import go_after_others
from millpond.core.schema import TIER_SCHEMA
from millpond.core.threads import Threads
from millpond.core.tier.cache import ByteCache
from millpond.core.tier.gate import FairGate
from millpond.core.tier.layout import Footer, decode_group, parse_footer
from millpond.core.tier.objects import ObjectStore
from millpond.core.tier.rows import row_bytes

_PARSED_FOOTER_FACTOR = 8  # what a parsed footer takes in memory for each of its bytes, roughly
_SEQUENCES = 4_096  # sequential readers remembered; the longest idle one goes first
_KEY_COLUMN = TIER_SCHEMA.get_field_index("key")  # also Parquet's leaf number: the columns before it are flat


class ObjectRef(msgspec.Struct, frozen=True):
    """An object as the manifest knows it; `path` is its key."""

    path: str
    bytes: int
    footer_bytes: int


class ReadCounters(msgspec.Struct):
    """For /metrics: what cold reading has cost so far."""

    gets: int = 0
    get_bytes: int = 0
    hits: int = 0
    prefetches: int = 0
    load_seconds: float = 0.0


class _Opened(NamedTuple):
    """A parsed footer: ours, Parquet's, and the row groups of each queue in order of offsets (their indices)."""

    footer: Footer
    parquet: Any
    of_queue: dict[int, list[int]]


class _Rows(NamedTuple):
    """A row group. `ends`: raw bytes of the rows up to and with each, i64[rows]: added up once, in the thread that
    decodes, and not by each reader on the event loop."""

    table: pa.Table
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, table: pa.Table) -> _Rows:
        return cls(table, np.cumsum(row_bytes(table)))

    def fitting(self, first: int, most: int, budget: int, least: int) -> tuple[int, int]:
        """How many rows from `first` on take at most `budget` bytes raw, at least `least` and at most `most`; and their
        bytes."""
        before = int(self.ends[first - 1]) if first else 0
        found = int(np.searchsorted(self.ends, before + budget, "right")) - first
        count = min(most, max(least, found))
        return count, (int(self.ends[first + count - 1]) - before if count else 0)


class TierReader:
    """Reads objects of `objects`, keeping `cache_bytes` of footers and rows, `concurrency` loads at once."""

    def __init__(self, objects: ObjectStore, cache_bytes: int, concurrency: int, clock: Clock) -> None:
        self._objects = objects
        self._clock = clock
        self._cache: ByteCache[Any] = ByteCache(cache_bytes)
        self._gate = FairGate(concurrency, COLD_READS_WAITING)
        self._threads = Threads(concurrency, "tier-read", go_after_others)
        self._loading: dict[Hashable, asyncio.Task[Any]] = {}
        self._next: OrderedDict[tuple[str, int], int] = OrderedDict()
        self.counters = ReadCounters()

    async def rows(self, ref: ObjectRef, queue: int, first: int, end: int, max_rows: int, max_bytes: int) -> pa.Table:
        """Rows of `queue` from offset `first` on, dense, below `end`, as TIER_SCHEMA.

        At least one row, then as many as fit `max_rows` and `max_bytes` (raw). Raises Internal(tier_corrupt), also
        when the object does not hold these offsets; TooManyRequests(cold_read_limit); Unavailable(tier_unavailable).
        """
        assert first < end, "an empty range has no rows"
        assert max_rows > 0, "at least one row is asked for"
        opened = await self._open(ref)
        at, stop, budget = first, min(end, first + max_rows), max_bytes
        tables: list[pa.Table] = []
        while at < stop:
            index = _group_at(ref, opened, queue, at)
            group = opened.footer.groups[index]
            rows = await self._group(ref, opened, index)
            wanted = min(stop, group.end) - at
            count, size = rows.fitting(at - group.first, wanted, budget, least=0 if tables else 1)
            tables.append(rows.table.slice(at - group.first, count))
            at += count
            budget -= size
            self._look_ahead(ref, opened, index, first, at)
            if count < wanted or budget <= 0:
                break
        self._remember((ref.path, queue), at)
        return pa.concat_tables(tables)

    async def first_at(self, ref: ObjectRef, queue: int, ts: int, clock: Literal["store", "born"]) -> int | None:
        """The first offset of `queue` in the object whose `clock` is >= `ts` (ms); None when there is none."""
        opened = await self._open(ref)
        for index in opened.of_queue.get(queue, []):
            group = opened.footer.groups[index]
            last = group.max_store_ts if clock == "store" else group.max_born_ts
            if last is not None and last >= ts:
                table = (await self._group(ref, opened, index)).table
                times = table.column(f"{clock}_ts").cast(pa.int64())
                found = pc.index(pc.fill_null(pc.greater_equal(times, ts), False), True).as_py()
                assert found >= 0, "the footer's greatest timestamp is one of a row"
                return group.first + int(found)
        return None

    async def find_key(self, ref: ObjectRef, queues: list[int], key: bytes) -> pa.Table:
        """All rows of these queues whose key is `key`, by (queue, offset). Row groups are ruled out by statistics."""
        opened = await self._open(ref)
        found = []
        for queue in sorted(set(queues)):
            for index in opened.of_queue.get(queue, []):
                if _may_hold(opened.parquet, index, key):
                    table = (await self._group(ref, opened, index)).table
                    found.append(table.filter(pc.equal(table.column("key"), key)))
        return pa.concat_tables(found) if found else TIER_SCHEMA.empty_table()

    async def close(self) -> None:
        """Stop all loads; who waits for one gets Unavailable(shutting_down)."""
        for task in list(self._loading.values()):
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        self._threads.close(wait=False)

    # -- loading

    async def _open(self, ref: ObjectRef) -> _Opened:
        opened: _Opened = await self._shared((ref.path,), lambda: self._load_footer(ref))
        return opened

    async def _group(self, ref: ObjectRef, opened: _Opened, index: int) -> _Rows:
        rows: _Rows = await self._shared((ref.path, index), lambda: self._load_group(ref, opened, index))
        return rows

    async def _shared(self, key: Hashable, load: Callable[[], Awaitable[Any]]) -> Any:
        """From the cache, else by `load`; several who want the same share one load, which outlives each of them."""
        if (kept := self._cache.get(key)) is not None:
            self.counters.hits += 1
            return kept
        task = self._loading.get(key) or self._begin(key, load)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable("shutting_down", "cold reads have been stopped") from None
            raise

    def _begin(self, key: Hashable, load: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
        async def run() -> Any:
            return await load()

        def done(task: asyncio.Task[Any]) -> None:
            del self._loading[key]
            if not task.cancelled():
                task.exception()  # looked at: nobody may be waiting for a prefetch

        task = asyncio.create_task(run(), name=f"tier load {key}")
        self._loading[key] = task
        task.add_done_callback(done)
        return task

    async def _load_footer(self, ref: ObjectRef) -> _Opened:
        at = ref.bytes - ref.footer_bytes

        def parse(data: bytes | pa.Buffer) -> _Opened:
            if at < 0 or len(data) != ref.footer_bytes:
                raise ValueError("the object is shorter than it was")
            footer, parquet = parse_footer(bytes(data))
            of_queue: dict[int, list[int]] = {}
            for index, group in enumerate(footer.groups):
                of_queue.setdefault(group.queue, []).append(index)
            return _Opened(footer, parquet, of_queue)

        opened: _Opened = await self._load(ref, "its footer", max(0, at), ref.bytes, parse)
        self._cache.put((ref.path,), opened, ref.footer_bytes * _PARSED_FOOTER_FACTOR)
        return opened

    async def _load_group(self, ref: ObjectRef, opened: _Opened, index: int) -> _Rows:
        group = opened.footer.groups[index]
        what = f"queue {group.queue}, offsets {group.first} to {group.end - 1}"
        rows: _Rows = await self._load(
            ref,
            what,
            group.at,
            group.at + group.bytes,
            lambda data: _Rows.of(decode_group(opened.parquet, opened.footer, index, data)),
        )
        self._cache.put((ref.path, index), rows, rows.table.nbytes + rows.ends.nbytes)
        return rows

    async def _load(
        self, ref: ObjectRef, what: str, at: int, end: int, decode: Callable[[bytes | pa.Buffer], Any]
    ) -> Any:
        """GET bytes [at, end) of the object and decode them in a thread, when its tenant's turn has come."""
        async with self._gate.turn(_tenant(ref.path)):
            started = self._clock.monotonic()
            try:
                data = await self._objects.get(ref.path, at, end)
                self.counters.gets += 1
                self.counters.get_bytes += len(data)
                return await self._threads.run(decode, data)
            except NotFound:
                raise _corrupt(ref, what, "the object is missing", missing=True) from None
            except ValueError as error:
                raise _corrupt(ref, f"{what} (bytes {at} to {end - 1})", str(error)) from error
            finally:
                self.counters.load_seconds += self._clock.monotonic() - started

    # -- looking ahead

    def _look_ahead(self, ref: ObjectRef, opened: _Opened, index: int, first: int, at: int) -> None:
        """Load the queue's next row group when this reader will want it: it has read on, or to the group's end."""
        group = opened.footer.groups[index]
        following = index + 1
        if following >= len(opened.footer.groups) or opened.footer.groups[following].queue != group.queue:
            return
        sequential = at == group.end or self._next.get((ref.path, group.queue)) == first
        key = (ref.path, following)
        if sequential and self._gate.idle and key not in self._cache and key not in self._loading:
            self.counters.prefetches += 1
            self._begin(key, lambda: self._load_group(ref, opened, following))

    def _remember(self, reader: tuple[str, int], next_offset: int) -> None:
        self._next[reader] = next_offset
        self._next.move_to_end(reader)
        if len(self._next) > _SEQUENCES:
            self._next.popitem(last=False)


def _group_at(ref: ObjectRef, opened: _Opened, queue: int, offset: int) -> int:
    """The index of the row group with this offset. An object's rows of a queue may begin behind where its range in the
    manifest does: what is missing was damaged before it was sealed, Internal(corrupt_range) with `next_offset`."""
    groups = opened.footer.groups
    indices = opened.of_queue.get(queue, [])
    found = bisect_right(indices, offset, key=lambda index: groups[index].first) - 1
    if found < 0 and indices:
        first = groups[indices[0]].first
        raise Internal(
            "corrupt_range",
            f"offsets {offset} to {first - 1} of queue {queue} were damaged in the log before they were sealed",
            offset=offset, next_offset=first,
        )  # fmt: skip
    if found < 0 or offset >= groups[indices[found]].end:
        raise _corrupt(ref, f"queue {queue}, offset {offset}", "the object does not hold this offset")
    return indices[found]


def _may_hold(parquet: Any, index: int, key: bytes) -> bool:
    """Whether the statistics of row group `index` leave room for `key`."""
    group = parquet.row_group(index)
    statistics = group.column(_KEY_COLUMN).statistics
    if statistics is None or not statistics.has_min_max:
        return statistics is None or statistics.null_count < group.num_rows
    return bool(statistics.min <= key <= statistics.max)


def _tenant(path: str) -> str:
    """The tenant that an object's path names; the path's first part else."""
    return next((part for part in path.split("/") if part.startswith("tenant=")), path.split("/", 1)[0])


def _corrupt(ref: ObjectRef, what: str, reason: str, missing: bool = False) -> Internal:
    return Internal("tier_corrupt", f"tier object {ref.path}, {what}: {reason}", path=ref.path, missing=missing)
