"""A run: what becomes one tier object. `gather` reads it from the log, `encode_run` makes the bytes.

A run is consecutive offsets of some queues of one topic, all of one UTC date of `store_ts`. Whole record batches
are carried over; the memory in use is at most the run's raw bytes (64 MiB and one frame) beside its encoding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, takewhile
from typing import NamedTuple

import msgspec
import pyarrow as pa

from millpond.core.errors import Internal
from millpond.core.limits import SEAL_QUEUES, SEAL_READ_BYTES
from millpond.core.tier.layout import Encoded, encode
from millpond.core.tier.rows import row_bytes, rows_of
from millpond.metadata.client import ObjectRange
from millpond.store.client import QueueRef, StoredFrame
from millpond.store.tier.arenas import Arenas
from millpond.store.tier.source import SealSource
from millpond.store.tier.threads import SealThreads

DAY_MS = 86_400_000


class Piece(msgspec.Struct):
    """What a run takes of one queue: consecutive rows that end at `end`.

    Its range in the manifest begins at `first`, where the queue was tiered to. The rows begin there too, unless
    messages expired before they were sealed (what is missing is below the queue's start offset) or stood in a damaged
    range of the log (`lost`): then the range has fewer rows than offsets, and the missing ones are its first.
    """

    queue: QueueRef
    first: int
    tables: list[pa.Table]
    end: int
    lost: list[Lost] = []


class Lost(NamedTuple):
    """Offsets [first, end) of a queue that no longer can be read."""

    queue: QueueRef
    first: int
    end: int
    reason: str


class Run(msgspec.Struct):
    """`pieces` in the order they were read; `first_ts`: a store timestamp of the run's date; `bytes` are raw."""

    pieces: list[Piece]
    first_ts: int
    bytes: int

    @property
    def lost(self) -> list[Lost]:
        """What the pieces leave out."""
        return [one for piece in self.pieces for one in piece.lost]

    @property
    def ends(self) -> dict[int, int]:
        """queue id -> where its offsets in this run end."""
        return {piece.queue.queue_id: piece.end for piece in self.pieces}


class Wanted(msgspec.Struct, frozen=True):
    """What may be sealed: queues in the order of their turns; by queue id how far each is tiered, its first offset
    that has not expired, and its confirmed end."""

    queues: list[QueueRef]
    tiered: dict[int, int]
    kept: dict[int, int]
    ends: dict[int, int]


async def gather(
    source: SealSource, wanted: Wanted, oldest_ts: int, most_bytes: int, threads: SealThreads
) -> Run | None:
    """The next run, of the date of `oldest_ts`; when no queue begins on that date, of the earliest that one does.

    None when there is nothing. Raises Internal(corrupt_range) when the log does not give what it should.
    """
    run, other = await _gather(source, wanted, oldest_ts // DAY_MS, most_bytes, threads)
    if not run.pieces and other is not None:
        run, _ = await _gather(source, wanted, other, most_bytes, threads)
    return run if run.pieces else None


async def encode_run(
    run: Run, topic_id: int, epoch: int, threads: SealThreads, arenas: Arenas
) -> tuple[Encoded, list[ObjectRange]]:
    """The object's bytes, in memory of `arenas`, and its ranges for the manifest, by queue."""
    pieces = sorted(run.pieces, key=lambda piece: piece.queue.queue)
    queues = [(piece.queue.queue, pa.concat_tables(piece.tables)) for piece in pieces]
    encoded = await threads.run(lambda: encode(queues, topic_id, epoch, arenas.take))
    return encoded, [
        ObjectRange(
            piece.queue.queue_id, each.queue, piece.first, each.end, each.end - each.first,
            each.min_store_ts, each.max_store_ts, each.min_born_ts, each.max_born_ts,
        )
        for piece, each in zip(pieces, encoded.ranges, strict=True)
    ]  # fmt: skip


async def _gather(
    source: SealSource, wanted: Wanted, day: int, most_bytes: int, threads: SealThreads
) -> tuple[Run, int | None]:
    """A run of `day` (days since 1970), and the earliest other day that a queue begins with."""
    run, other = Run([], day * DAY_MS, 0), None
    for queue in wanted.queues:
        if run.bytes >= most_bytes or len(run.pieces) == SEAL_QUEUES:
            break
        tiered, end = wanted.tiered[queue.queue_id], wanted.ends[queue.queue_id]
        piece = Piece(queue, tiered, [], max(tiered, wanted.kept[queue.queue_id]))
        while piece.end < end and run.bytes < most_bytes:
            frames = await _read_around(source, piece, end, min(SEAL_READ_BYTES, most_bytes - run.bytes))
            if not frames:
                break
            taken = _of_day(frames, day)
            if not taken:
                if not piece.tables:
                    first_day = frames[0].store_ts // DAY_MS
                    other = first_day if other is None else min(other, first_day)
                break
            table, size = await threads.run(partial(_rows_from, queue.queue, taken, piece.end))
            piece.tables.append(table)
            piece.end += table.num_rows
            run.bytes += size
            if len(taken) < len(frames) and taken[-1].store_ts // DAY_MS != frames[len(taken)].store_ts // DAY_MS:
                break
        if piece.tables:
            run.pieces.append(piece)
    return run, other


async def _read_around(source: SealSource, piece: Piece, end: int, max_bytes: int) -> list[StoredFrame]:
    """`_read` from where `piece` ends, up to the next damaged frame; a piece that is still empty begins behind it.

    Nothing when nothing can be read, or when the piece must end here: the next one leaves the damage out.
    Damage behind which nothing is confirmed yet stays for later, so a range never ends with it.
    """
    while piece.end < end:
        try:
            return await _read(source, piece.queue, piece.end, end, max_bytes)
        except Internal as error:
            first, behind = error.extra.get("offset"), error.extra.get("next_offset")
            if not (isinstance(first, int) and isinstance(behind, int) and behind > max(first, piece.end)):
                raise
            if first <= piece.end:
                if piece.tables:
                    return []
                piece.lost.append(Lost(piece.queue, piece.end, behind, error.detail))
                piece.end = behind
            else:
                end = first  # up to the damage
    return []


async def _read(source: SealSource, queue: QueueRef, offset: int, end: int, max_bytes: int) -> list[StoredFrame]:
    """Frames from `offset` on, as many as take `max_bytes` once decompressed, at least one."""
    frames = await source.frames(queue.queue_id, offset, end, max_bytes)
    if not frames or not frames[0].first_offset <= offset < frames[0].first_offset + frames[0].count:
        raise Internal("corrupt_range", f"queue {queue.queue_id}: the log gives no frame for confirmed offset {offset}")
    sizes = accumulate(frame.payload_size for frame in frames)
    fit = sum(1 for _ in takewhile(lambda size: size <= max_bytes, sizes))
    return frames[: max(1, fit)]


def _of_day(frames: Sequence[StoredFrame], day: int) -> list[StoredFrame]:
    """The leading frames of that day: none when the first one is of another (`store_ts` never decreases)."""
    if frames[0].store_ts // DAY_MS != day:
        return []
    return list(frames[: bisect_left(frames, (day + 1) * DAY_MS, key=lambda frame: frame.store_ts)])


def _rows_from(queue: int, frames: list[StoredFrame], offset: int) -> tuple[pa.Table, int]:
    """The rows of `frames` from `offset` on, and their raw bytes. In the thread: frames may be compressed."""
    table = rows_of(queue, frames).slice(offset - frames[0].first_offset)
    return table, int(row_bytes(table).sum())
