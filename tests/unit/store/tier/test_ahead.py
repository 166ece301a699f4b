"""Reading ahead: what it gives is what reading gives, whoever asks for what."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from millpond.core.errors import Internal
from millpond.store.client import StoredFrame
from millpond.store.tier.ahead import STEPS_AHEAD, ReadAhead, Reading

STEP = 3  # frames of one message each


class Log:
    """Queues of a hundred messages. `asked`: offsets that were read from."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.damaged = -1
        self.turns = 1  # of the loop that a step takes
        self.reading: list[asyncio.Task[list[StoredFrame]]] = []

    async def begin(self, queue_id: int, offset: int, end: int, max_bytes: int) -> Reading:
        self.asked.append((queue_id, offset))
        reading = asyncio.create_task(self._frames(queue_id, offset, end, max_bytes))
        self.reading.append(reading)
        return Reading(reading, min(offset + max_bytes, end))

    async def _frames(self, queue_id: int, offset: int, end: int, max_bytes: int) -> list[StoredFrame]:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if offset <= self.damaged < offset + max_bytes:
            raise Internal("corrupt_range", "damaged")
        return [frame(queue_id, at) for at in range(offset, min(offset + max_bytes, end, 100))]


def frame(queue_id: int, offset: int) -> StoredFrame:
    nothing = pa.py_buffer(b"")
    return StoredFrame(
        queue_id, position=offset, first_offset=offset, count=1, columns=0, codec=0, store_ts=0, payload_size=1,
        sidecar=nothing, payload=nothing,
    )  # fmt: skip


def offsets(frames: list[StoredFrame]) -> list[int]:
    return [one.first_offset for one in frames]


async def settled() -> None:
    """Every task has done what it can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture(name="log")
def _log() -> Log:
    return Log()


async def test_what_follows_is_read_before_it_is_asked_for(log: Log) -> None:
    """A few steps of it; consecutive offsets, none twice, none behind the end."""
    ahead = ReadAhead(log.begin)
    found = offsets(await ahead.frames(1, 0, 20, STEP, ahead=STEP))
    await settled()
    assert log.asked == [(1, at * STEP) for at in range(1 + STEPS_AHEAD)]
    while len(found) < 20:
        found += offsets(await ahead.frames(1, len(found), 20, STEP, ahead=STEP))
    assert found == list(range(20))
    await ahead.forget()
    assert log.asked == [(1, at) for at in range(0, 20, STEP)]


async def test_nothing_is_read_ahead_unless_told(log: Log) -> None:
    ahead = ReadAhead(log.begin)
    await ahead.frames(1, 0, 100, STEP, ahead=0)
    await ahead.forget()
    assert log.asked == [(1, 0)]


async def test_a_part_is_taken(log: Log) -> None:
    """The caller took one frame of those it was given: the others are given again, without being read again."""
    ahead = ReadAhead(log.begin)
    assert offsets(await ahead.frames(1, 0, 100, STEP, ahead=STEP)) == [0, 1, 2]
    assert offsets(await ahead.frames(1, 1, 100, STEP, ahead=STEP)) == [1, 2]
    assert offsets(await ahead.frames(1, 3, 100, STEP, ahead=STEP)) == [3, 4, 5]
    await ahead.forget()
    assert len(log.asked) == len(set(log.asked))


async def test_a_step_begins_in_the_frame_that_the_one_before_ends_with(log: Log) -> None:
    """Where that is only known to hold a part of what it does: no message is given twice."""
    whole = log.begin

    async def begin(queue_id: int, offset: int, end: int, max_bytes: int) -> Reading:
        reading = await whole(queue_id, offset, end, max_bytes)
        return reading._replace(end=reading.end - 1)

    ahead = ReadAhead(begin)
    found: list[int] = []
    while len(found) < 20:
        found += offsets(await ahead.frames(1, len(found), 20, STEP, ahead=STEP))
    assert found == list(range(20))
    await ahead.forget()


async def test_nothing_is_read_once_it_is_forgotten(log: Log) -> None:
    """Also behind a caller that was cancelled while it waited."""
    log.turns = 10
    ahead = ReadAhead(log.begin)
    asking = asyncio.create_task(ahead.frames(1, 0, 100, STEP, ahead=STEP))
    await asyncio.sleep(0)
    assert not asking.done() and not log.reading[0].done()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    await ahead.forget()
    assert all(reading.done() for reading in log.reading)


@pytest.mark.parametrize(("queue", "offset", "end"), [(2, 6, 100), (1, 50, 100), (1, 0, 100), (1, 6, 90)])
async def test_somebody_goes_on_elsewhere(log: Log, queue: int, offset: int, end: int) -> None:
    """Another queue, another offset, another end: what was read ahead is not given."""
    ahead = ReadAhead(log.begin)
    await ahead.frames(1, 0, 100, STEP, ahead=STEP)
    await ahead.frames(1, 3, 100, STEP, ahead=STEP)
    found = await ahead.frames(queue, offset, end, STEP, ahead=STEP)
    assert [(one.queue_id, one.first_offset) for one in found] == [(queue, at) for at in range(offset, offset + STEP)]
    await ahead.forget()


async def test_an_error_is_met_by_who_asks_for_it(log: Log) -> None:
    """Not by who asks for what stands before it; and again, as often as it is asked for."""
    log.damaged = 4
    ahead = ReadAhead(log.begin)
    assert offsets(await ahead.frames(1, 0, 100, STEP, ahead=STEP)) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(Internal):
            await ahead.frames(1, 3, 100, STEP, ahead=STEP)
    assert offsets(await ahead.frames(1, 0, 100, STEP, ahead=STEP)) == [0, 1, 2]
    assert offsets(await ahead.frames(1, 5, 100, STEP, ahead=STEP)) == [5, 6, 7]
    await ahead.forget()
