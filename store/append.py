"""The append path: what a proxy sends becomes frames, or is refused whole.

    check lengths and sidecar -> queue -> producer session -> duplicates -> room -> tail -> durability

Everything between the first check and the tail is one step on the event loop, so two appends cannot both pass
the same check. An answer that says "duplicate" was derived from the fold, so it waits until that is confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from millpond.core.errors import BadRequest, Conflict, DiskFull, MillpondError, TooLarge, Unavailable
from millpond.core.frame import ProducerPart, Sidecar, pack_parts, unpack_sidecar
from millpond.core.limits import BATCH_MESSAGES, PENDING_APPEND_BYTES, UNFLUSHED_WAIT_MS
from millpond.core.schema import KNOWN_COLUMNS, PARTS
from millpond.store.client import AppendOutcome, AppendRequest, AppendResult, Duplicate, QueueAppend
from millpond.store.fold.producers import Checked, Verdict
from millpond.store.fold.queues import QueueState
from millpond.store.housekeeping import Housekeeping
from millpond.store.tail import Tail
from millpond.store.writer import Writer

_PARTS_BYTES = 256  # room for one part of the parts table: a name and five numbers


class _Settled(msgspec.Struct, frozen=True):
    """An outcome, and what must hold before it may be told: a position that is written, or flushed."""

    outcome: AppendOutcome
    position: int
    flush: bool


class Appends:
    """`StoreClient.append` of one store."""

    def __init__(
        self,
        tail: Tail,
        writer: Writer,
        housekeeping: Housekeeping,
        appended: Callable[[int, int], None],
        awaited: Callable[[int], bool],
    ) -> None:
        """`appended(topic id, bytes)` is told of every append; `awaited(queue id)`: whether a reader waits there."""
        self._tail = tail
        self._writer = writer
        self._housekeeping = housekeeping
        self._appended = appended
        self._awaited = awaited
        self._accepted_bytes = 0
        self.messages = 0
        self.bytes = 0

    async def append(self, request: AppendRequest) -> AppendResult:
        size = sum(len(append.payload) for append in request.appends)
        if self._accepted_bytes and self._accepted_bytes + size > PENDING_APPEND_BYTES:
            raise Unavailable("flush_behind", "too many bytes wait to be written")
        self._accepted_bytes += size
        until = asyncio.get_running_loop().time() + min(UNFLUSHED_WAIT_MS, request.deadline_ms) / 1000
        try:
            settled = [await self._one(append, until) for append in request.appends]
            await self._durable(settled)
        finally:
            self._accepted_bytes -= size
        return AppendResult([one.outcome for one in settled], self._tail.log.epoch)

    async def _durable(self, settled: list[_Settled]) -> None:
        flush = write = 0
        for one in settled:
            if one.flush:
                flush = max(flush, one.position)
            else:
                write = max(write, one.position)
        if write:
            await self._writer.written(write)
        if flush:
            await self._writer.flushed(flush, make_way=True)

    async def _one(self, append: QueueAppend, until: float) -> _Settled:
        try:
            sidecar = self._check(append)
            size = len(append.sidecar) + len(append.payload) + _PARTS_BYTES * len(append.parts)
            if not (self._writer.has_room and self._tail.has_room(size)):
                await self._wait_for_room(size, until)
            return self._place(append, sidecar)
        except MillpondError as error:
            return _Settled(AppendOutcome(error=error.info()), 0, False)

    def _check(self, append: QueueAppend) -> Sidecar:
        if not 1 <= append.count <= BATCH_MESSAGES:
            raise BadRequest.field("count", f"1 to {BATCH_MESSAGES} messages", append.count)
        if append.columns & ~KNOWN_COLUMNS:
            raise BadRequest.field("columns", "columns that this store knows", hex(append.columns))
        if not self._tail.fits(len(append.sidecar) + len(append.payload)):
            raise TooLarge("batch_too_large", "the batch does not fit a log segment of this store")
        try:
            return unpack_sidecar(append.sidecar, append.count, append.columns & ~PARTS)
        except ValueError as error:
            raise BadRequest("malformed_body", f"sidecar: {error}") from error

    async def _wait_for_room(self, size: int, until: float) -> None:
        """Until a frame of this size may be appended, which all appends of a request wait for together. Raises
        DiskFull, Unavailable(flush_behind)."""
        await self._writer.room(until)
        while not self._tail.has_room(size):
            if self._housekeeping.disk_full:
                raise DiskFull("disk_full", "the store's disk is full: messages are refused until there is room")
            try:
                async with asyncio.timeout_at(until):
                    await self._housekeeping.segment_ready()
            except TimeoutError:
                raise Unavailable("flush_behind", "the next log segment is not ready yet") from None

    def _place(self, append: QueueAppend, sidecar: Sidecar) -> _Settled:
        fold = self._tail.fold
        queue = fold.queues.get(append.queue.queue_id) or self._tail.open_queue(append.queue, 0)
        flush = append.durability == "flush"
        duplicates = self._duplicates(queue, append, sidecar)
        if duplicates:
            # what a retry is told must not be taken back: wait until all that is folded is on the disk
            return _Settled(AppendOutcome(duplicates=duplicates), self._tail.log.tail, True)
        sidecar_bytes = append.sidecar.to_pybytes()
        if append.parts:
            sidecar = sidecar._replace(parts=append.parts)
            sidecar_bytes += pack_parts(append.parts)
        placed = self._tail.messages(queue, append, sidecar, sidecar_bytes)
        self._writer.wake()
        if not flush and self._awaited(queue.ref.queue_id):
            self._writer.hurry()
        self.messages += append.count
        self.bytes += append.payload_size
        self._appended(queue.ref.topic_id, append.payload_size)
        first = queue.next_offset - append.count
        return _Settled(AppendOutcome(first, queue.last_ts), placed.end, flush)

    def _duplicates(self, queue: QueueState, append: QueueAppend, sidecar: Sidecar) -> list[Duplicate]:
        """Rows that repeat earlier messages. Raises Conflict for a part out of order, TooManyRequests."""
        fold = self._tail.fold
        duplicates: dict[int, Duplicate] = {}
        for part in append.parts:
            for duplicate in _repeated(fold.producers.check(queue.ref.queue_id, part), part):
                duplicates[duplicate.row] = duplicate
        if sidecar.dedup_hash is not None and append.dedup_window_ms > 0:
            assert sidecar.dedup_check is not None
            now_ms = self._tail.time.now_ms()
            found = fold.dedup.probe(queue.ref, sidecar.dedup_hash, sidecar.dedup_check, now_ms, append.dedup_window_ms)
            for duplicate in found:
                duplicates.setdefault(duplicate.row, duplicate)
        return [duplicates[row] for row in sorted(duplicates)]


def _repeated(checked: Checked, part: ProducerPart) -> list[Duplicate]:
    """A part's rows as duplicates, none when it comes next. Raises Conflict(out_of_order, unknown_producer).

    A part too old to know its offsets by is a duplicate at offset -1.
    """
    match checked.verdict:
        case Verdict.ACCEPT:
            return []
        case Verdict.DUPLICATE:
            offsets = checked.offsets or [-1] * part.rows
            return [
                Duplicate(part.row + row, offset, checked.store_ts) for row, offset in enumerate(offsets[: part.rows])
            ]
        case Verdict.OUT_OF_ORDER:
            raise Conflict(
                "out_of_order",
                f"producer {part.producer_id}: its last sequence here is {checked.stored_last}, "
                f"and this part names {part.previous} as its previous",
                last=checked.stored_last,
            )
        case Verdict.UNKNOWN_PRODUCER:
            raise Conflict(
                "unknown_producer",
                f"producer {part.producer_id} has no session here, or it has ended: open one with previous null",
            )
