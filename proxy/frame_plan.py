"""One frame to be appended: who waits for which of its rows, and what each is told in the end.

    prepare   build the columns; rows that repeat a dedup id of the same frame stay out (the first one goes)
    append    the rows that still have to go, as the store takes them
    take      the store's answer: placed, or refused, or duplicates named - then the others go once more
    answer    each waiting request gets its part

A row ends in one of four ways: it stands at an offset, it is a duplicate of one that does, it repeats an id with
another body (`dedup_mismatch`), or it failed with the store's error.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from millpond.core.errors import Internal, MillpondError, Unavailable, Unprocessable, from_info
from millpond.core.frame import ProducerPart
from millpond.core.hashing import DEDUP_DTYPE, dedup_checks
from millpond.core.limits import DUPLICATE_ROUNDS
from millpond.proxy.encode import Rows, concat
from millpond.proxy.incoming import Single, batch_of
from millpond.store.client import AppendOutcome, Duplicate, Durability, QueueAppend, QueueRef

Offsets = npt.NDArray[np.int64]


class PlacedSingle(msgspec.Struct, frozen=True):
    """Where one message stands. `offset` -1: a duplicate whose place is no longer known."""

    offset: int
    store_ts: int
    duplicate: bool


@dataclass(slots=True)
class Placed:
    """Where each row of a batch stands: offsets and store timestamps i64[n] (-1: nowhere, see `errors`; or a
    duplicate whose place is no longer known), duplicate bool[n], errors by row."""

    offsets: Offsets
    store_ts: Offsets
    duplicate: npt.NDArray[np.bool_]
    errors: dict[int, MillpondError] = field(default_factory=dict)


class PlacedRun(NamedTuple):
    """The usual case: all `rows` are new, and stand at `first_offset` and on."""

    first_offset: int
    store_ts: int
    rows: int

    @property
    def errors(self) -> dict[int, MillpondError]:
        return {}


@dataclass(slots=True)
class WaitingSingle:
    future: asyncio.Future[PlacedSingle | MillpondError]
    size: int
    single: Single
    key_hash: int
    tag_hash: int
    dedup_hash: bytes | None

    def fail(self, error: MillpondError) -> None:
        if not self.future.done():
            self.future.set_result(_as_value(error))


@dataclass(slots=True)
class WaitingBatch:
    future: asyncio.Future[Placed | PlacedRun]
    size: int
    rows: Rows
    part: ProducerPart | None
    atomic: bool

    def fail(self, error: MillpondError) -> None:
        if not self.future.done():
            count = len(self.rows)
            nowhere = np.full(count, -1, np.int64)
            errors = dict.fromkeys(range(count), _as_value(error))
            self.future.set_result(Placed(nowhere, nowhere, np.zeros(count, bool), errors))


class FramePlan:
    """`singles` come first in the frame, then `batches`. A part or an atomic batch is alone in its plan."""

    def __init__(self, singles: list[WaitingSingle], batches: list[WaitingBatch]) -> None:
        self.singles = singles
        self.batches = batches
        self.size, self.rows_count = 0, len(singles)
        for single in singles:
            self.size += single.size
        for batch in batches:
            self.size += batch.size
            self.rows_count += len(batch.rows)
        self.part = batches[0].part if batches else None
        self._atomic = bool(batches) and batches[0].atomic
        assert (self.part is None and not self._atomic) or self.rows_count == len(batches[0].rows), "alone in its frame"
        self._live: Offsets | None = None  # rows that still have to go; None: all
        self._repeats: list[tuple[int, int]] = []  # (row, the row of this frame whose dedup id it repeats)
        self._rounds = 0
        self.open = True
        self._first, self._ts = -1, 0  # the usual answer: all rows placed at once
        self._placed: Placed | None = None  # any other answer

    def prepare(self) -> None:
        """Build the rows."""
        parts = [waiting.rows for waiting in self.batches]
        if self.singles:
            parts.insert(0, rows_of(self.singles))
        self._rows = concat(parts)
        if self._rows.dedup_hash is not None:
            self._leave_out_repeats(self._rows.dedup_hash)

    def append(self, queue: QueueRef, durability: Durability, window_ms: int) -> QueueAppend:
        rows = self._rows if self._live is None else self._rows.take(self._live)
        return rows.append(queue, durability, window_ms, self.part)

    def take(self, outcome: AppendOutcome) -> None:
        self._rounds += 1
        if outcome.error is not None:
            self.fail(from_info(outcome.error))
        elif outcome.duplicates:
            self._take_duplicates(outcome.duplicates)
        elif self._live is None:
            self._first, self._ts, self.open = outcome.first_offset, outcome.store_ts, False
        else:
            placed = self._table()
            placed.offsets[self._live] = np.arange(outcome.first_offset, outcome.first_offset + len(self._live))
            placed.store_ts[self._live] = outcome.store_ts
            self.open = False

    def fail(self, error: MillpondError) -> None:
        """Every row without an answer gets `error`; nothing when all have one."""
        if not self.open:
            return
        live = range(self.rows_count) if self._live is None else self._live.tolist()
        self._table().errors.update(dict.fromkeys(live, _as_value(error)))
        self.open = False

    def answer(self) -> None:
        """Tell everyone who still waits. Those who left are passed over."""
        if self._placed is None:
            self._answer_usual()
            return
        placed = self._placed
        self._settle_repeats(placed)
        for row, single in enumerate(self.singles):
            if not single.future.done():
                error = placed.errors.get(row)
                at = int(placed.offsets[row]), int(placed.store_ts[row]), bool(placed.duplicate[row])
                single.future.set_result(PlacedSingle(*at) if error is None else error)
        start = len(self.singles)
        for batch in self.batches:
            end = start + len(batch.rows)
            if not batch.future.done():
                errors = {row - start: error for row, error in placed.errors.items() if start <= row < end}
                at_rows = slice(start, end)
                batch.future.set_result(
                    Placed(placed.offsets[at_rows], placed.store_ts[at_rows], placed.duplicate[at_rows], errors)
                )
            start = end

    def _answer_usual(self) -> None:
        offset, ts = self._first, self._ts
        for single in self.singles:
            if not single.future.done():
                single.future.set_result(PlacedSingle(offset, ts, False))
            offset += 1
        for batch in self.batches:
            count = len(batch.rows)
            if not batch.future.done():
                batch.future.set_result(PlacedRun(offset, ts, count))
            offset += count

    def _table(self) -> Placed:
        if self._placed is None:
            count = self.rows_count
            nowhere = np.full(count, -1, np.int64)
            self._placed = Placed(nowhere, nowhere.copy(), np.zeros(count, bool))
        return self._placed

    def _take_duplicates(self, duplicates: list[Duplicate]) -> None:
        placed = self._table()
        live = np.arange(self.rows_count) if self._live is None else self._live
        rows = live[np.fromiter((one.row for one in duplicates), np.int64, len(duplicates))]
        placed.offsets[rows] = [one.offset for one in duplicates]
        placed.store_ts[rows] = [one.store_ts for one in duplicates]
        placed.duplicate[rows] = True
        mismatched = rows[np.fromiter((one.mismatch for one in duplicates), bool, len(duplicates))].tolist()
        placed.errors.update({row: mismatch() for row in mismatched})
        self._live = live[~np.isin(live, rows)]
        if not len(self._live):
            self.open = False
        elif self.part is not None:
            self.fail(Internal("internal", "the store names only some rows of a part as duplicates"))
        elif self._atomic and mismatched:
            self.fail(mismatch())
        elif self._rounds >= DUPLICATE_ROUNDS:
            self.fail(Unavailable("store_unavailable", "the same dedup ids arrive from elsewhere; nothing was written"))

    def _leave_out_repeats(self, hashes: npt.NDArray[np.void]) -> None:
        _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        if len(firsts) == len(hashes):
            return
        first_of = firsts[inverse]
        repeated = np.flatnonzero(first_of != np.arange(len(hashes)))
        self._repeats = list(zip(repeated.tolist(), first_of[repeated].tolist(), strict=True))
        self._live = np.sort(firsts)
        self._table()

    def _settle_repeats(self, placed: Placed) -> None:
        checks = self._rows.dedup_check if self._repeats else None
        for row, first in self._repeats:
            assert checks is not None
            if first in placed.errors and not placed.duplicate[first]:
                placed.errors[row] = placed.errors[first]
            elif checks[row] != checks[first]:
                placed.errors[row] = mismatch()
            elif first in placed.errors:
                placed.errors[row] = placed.errors[first]
            else:
                placed.offsets[row], placed.store_ts[row] = placed.offsets[first], placed.store_ts[first]
                placed.duplicate[row] = True


def _as_value(error: MillpondError) -> MillpondError:
    """`error` without the frames that it passed: they hold the messages, and who waits for it, which holds the error. A
    circle of these is collected late, and refusals of what came too fast were 300 MiB of it."""
    return error.with_traceback(None)


def mismatch() -> Unprocessable:
    return Unprocessable("dedup_mismatch", "dedup_id: it was used for another body within the topic's window")


def rows_of(waiting: list[WaitingSingle]) -> Rows:
    """Single messages as columns; their hashes came with them."""
    bodies, keys, tags, properties, born_ts, _, _ = zip(*[one.single for one in waiting], strict=True)
    batch, columns = batch_of(bodies, keys, tags, properties, born_ts)
    rows = Rows(
        batch,
        columns,
        np.array([one.tag_hash for one in waiting], np.uint32),
        np.array([one.key_hash for one in waiting], np.uint32),
    )
    hashes = [one.dedup_hash for one in waiting if one.dedup_hash is not None]
    if hashes:
        assert len(hashes) == len(waiting), "messages with and without dedup ids never share a frame"
        rows.dedup_hash = np.frombuffer(b"".join(hashes), DEDUP_DTYPE)
        rows.dedup_check = dedup_checks(batch.column("body"))
    return rows
