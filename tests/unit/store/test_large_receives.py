"""Receives of thousands: whole frames, and what is remembered of them."""

from __future__ import annotations

import asyncio

import pytest
from support.deliveries import GROUP, Bench, Q, offsets

from millpond.store import attempts
from millpond.store.client import SeekRequest


async def test_a_large_receive_ends_with_a_frame(bench: Bench) -> None:
    """Not within one, when it has at least half of what was asked by then; and nothing of another queue is added."""
    bench.put(5_000)
    bench.put(5_000, Q[1])
    result = await bench.receive(1_950, Q[:2])
    assert [offsets(grant) for grant in result.grants] == [list(range(1_900))]
    assert [len(offsets(grant)) for grant in (await bench.receive(1_950, Q[:2])).grants] == [1_900]


async def test_a_large_receive_of_larger_frames_is_filled(bench: Bench) -> None:
    """A frame that is more than half of what was asked, or of the bytes, is cut: progress is never refused."""
    bench.log.frame_rows = 1_500
    bench.put(5_000)
    assert len(offsets(await bench.take(1_400))) == 1_400
    assert len(offsets(await bench.take(1_400))) == 1_400
    bench.log.row_size = 10_000.0
    assert len(offsets(await bench.take(1_400))) == (1 << 20) // 10_000


async def test_a_large_receive_of_frames_takes_what_fits_the_bytes(bench: Bench) -> None:
    """Whole frames within `max_bytes`."""
    bench.put(5_000)
    assert len(offsets(await bench.take(4_000, max_bytes=205_000))) == 2_000


async def test_a_large_receive_takes_all_there_is(bench: Bench) -> None:
    """The last frame is no reason to leave the other queues out."""
    bench.put(1_250)
    bench.put(250, Q[1])
    result = await bench.receive(4_000, Q[:2])
    assert [len(offsets(grant)) for grant in result.grants] == [1_250, 250]


async def test_a_seek_while_a_large_receive_decides(bench: Bench) -> None:
    """What was chosen before the seek is not leased after it."""
    bench.put(3_000)
    bench.log.gate = asyncio.Event()
    task = asyncio.ensure_future(bench.receive(2_000))
    await bench.log.reached.wait()
    await bench.delivery.seek(SeekRequest(GROUP, Q[:1], [2_990], "s", False))
    bench.log.gate.set()
    [grant] = (await task).grants or (await bench.receive(2_000)).grants
    assert offsets(grant) == list(range(2_990, 3_000))


async def test_runs_are_remembered_as_runs(bench: Bench) -> None:
    """Attempts of large receives hold no array each; scattered ones are bounded in bytes."""
    bench.put(30_000)
    first = await bench.take(20_000, attempt_id="a")
    assert bench.delivery.attempts.nbytes == 0
    again = await bench.take(20_000, attempt_id="a")
    assert (offsets(again), again.attempts) == (offsets(first), first.attempts)


async def test_remembered_rows_are_bounded_in_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest attempts go first."""
    monkeypatch.setattr(attempts, "ATTEMPT_BYTES", 100)
    for offset in range(60):
        bench.put(1, tag=offset % 2)
    found = [await bench.take(5, tag_hashes=[1], attempt_id=name) for name in "abcd"]
    assert bench.delivery.attempts.nbytes == 80
    assert offsets(await bench.take(5, tag_hashes=[1], attempt_id="d")) == offsets(found[3])
    assert offsets(await bench.take(5, tag_hashes=[1], attempt_id="a")) != offsets(found[0])
