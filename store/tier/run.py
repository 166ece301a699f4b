"""A run: what becomes one tier object. `gather` reads it from the log, and hands on what it has read.

A run is consecutive offsets of some queues of one topic, all of one UTC date of `store_ts`, in the order of the queues.
Whole record batches are carried over, some MiB at a time: what was handed on is not kept here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple, Protocol

import msgspec

from millpond.core.errors import Internal
from millpond.core.limits import SEAL_QUEUES, SEAL_READ_BYTES
from millpond.store.client import QueueRef, StoredFrame
from millpond.store.tier.in_time import in_time

DAY_MS = 86_400_000


class FrameSource(Protocol):
    """Where the frames come from: `frames` of `source.SealSource`."""

    async def frames(self, queue_id: int, offset: int, end: int, max_bytes: int) -> list[StoredFrame]: ...


class Lost(NamedTuple):
    """Offsets [first, end) of a queue that no longer can be read."""

    queue: QueueRef
    first: int
    end: int
    reason: str


class Piece(msgspec.Struct):
    """What a run takes of one queue: consecutive rows that end at `end`, in this order.

    Its range in the manifest begins at `first`, where the queue was tiered to. The rows begin there too, unless
    messages expired before they were sealed (what is missing is below the queue's start offset) or stood in a damaged
    range of the log (`lost`): then the range has fewer rows than offsets, and the missing ones are its first.
    """

    queue: QueueRef
    first: int
    end: int
    taken: bool = False  # whether it has rows
    lost: list[Lost] = []


class Wanted(msgspec.Struct, frozen=True):
    """What may be sealed: queues in their order; by queue id how far each is tiered, its first offset that has not
    expired, and its confirmed end.

    The first `leading` queues had their turn before the others: they leave them room, `leading_bytes` is theirs.
    """

    queues: list[QueueRef]
    tiered: dict[int, int]
    kept: dict[int, int]
    ends: dict[int, int]
    leading: int
    leading_bytes: int


Take = Callable[[QueueRef, list[StoredFrame], int], Awaitable[None]]
"""Is handed some frames of a queue, and the offset their rows count from."""


async def gather(source: FrameSource, wanted: Wanted, oldest_ts: int, most_bytes: int, take: Take) -> list[Piece]:
    """The next run, of the date of `oldest_ts`; when no queue begins on that date, of the earliest that one does.

    No pieces when there is nothing. Raises Internal(corrupt_range) when the log does not give what it should.
    """
    pieces, other = await _gather(source, wanted, oldest_ts // DAY_MS, most_bytes, take)
    if not pieces and other is not None:
        pieces, _ = await _gather(source, wanted, other, most_bytes, take)
    return pieces


async def _gather(
    source: FrameSource, wanted: Wanted, day: int, most_bytes: int, take: Take
) -> tuple[list[Piece], int | None]:
    """A run of `day` (days since 1970), and the earliest other day that a queue begins with."""
    pieces: list[Piece] = []
    size, other = 0, None
    turn_taken = False  # whether one of those whose turn it is has rows in it: it has, whatever the others took
    for number, queue in enumerate(wanted.queues):
        leading = number < wanted.leading
        if len(pieces) == SEAL_QUEUES - leading:
            continue
        most = min(wanted.leading_bytes, most_bytes) if leading else most_bytes
        tiered, end = wanted.tiered[queue.queue_id], wanted.ends[queue.queue_id]
        piece = Piece(queue, tiered, max(tiered, wanted.kept[queue.queue_id]))
        while piece.end < end and (size < most or not (leading or turn_taken)):
            frames = await _read_around(source, piece, end, max(1, min(SEAL_READ_BYTES, most - size)))
            if not frames:
                break
            taken = _of_day(frames, day)
            if not taken:
                if not piece.taken:
                    first_day = frames[0].store_ts // DAY_MS
                    other = first_day if other is None else min(other, first_day)
                break
            await take(queue, taken, piece.end)
            piece.taken = True
            turn_taken = turn_taken or not leading
            piece.end = taken[-1].first_offset + taken[-1].count
            size += sum(frame.payload_size for frame in taken)
            if len(taken) < len(frames) and taken[-1].store_ts // DAY_MS != frames[len(taken)].store_ts // DAY_MS:
                break
        if piece.taken:
            pieces.append(piece)
    return pieces, other


async def _read_around(source: FrameSource, piece: Piece, end: int, max_bytes: int) -> list[StoredFrame]:
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
                if piece.taken:
                    return []
                piece.lost.append(Lost(piece.queue, piece.end, behind, error.detail))
                piece.end = behind
            else:
                end = first  # up to the damage
    return []


async def _read(source: FrameSource, queue: QueueRef, offset: int, end: int, max_bytes: int) -> list[StoredFrame]:
    """Frames from `offset` on, as many as take `max_bytes` once decompressed, at least one."""
    async with in_time("read the log"):
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
