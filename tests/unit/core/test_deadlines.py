"""Deadlines that share a timer: each ends its own block, at its time, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millpond.core.deadlines import Deadlines

SOON = 0.01
FAR = 60.0


async def test_a_block_ends_at_its_deadline() -> None:
    """With TimeoutError, not before; its task is not left cancelled."""
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    begin = loop.time()
    with pytest.raises(TimeoutError), deadlines.within(SOON):
        await loop.create_future()
    assert loop.time() - begin >= SOON - 0.002
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


async def test_the_earliest_ends_first() -> None:
    """Also when it begins last, and the timer stands at a later one."""
    deadlines, ended = Deadlines(), []

    async def ends(seconds: float) -> None:
        with pytest.raises(TimeoutError), deadlines.within(seconds):
            await asyncio.get_running_loop().create_future()
        ended.append(seconds)

    await asyncio.gather(*(ends(seconds) for seconds in (6 * SOON, 3 * SOON, SOON)))
    assert ended == [SOON, 3 * SOON, 6 * SOON]


async def test_what_has_ended_is_left_alone() -> None:
    """A deadline that comes when its block is over cancels nothing that its task does next."""
    deadlines = Deadlines()
    with deadlines.within(SOON):
        pass
    with pytest.raises(TimeoutError), deadlines.within(3 * SOON):
        await asyncio.get_running_loop().create_future()


async def test_a_cancelled_block_is_cancelled() -> None:
    """From outside it ends as cancelled, also when its deadline comes in the same turn of the loop."""
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    one: Any = None

    async def waits() -> None:
        nonlocal one
        with deadlines.within(FAR) as one:
            await loop.create_future()

    for both in (False, True):
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        if both:
            one.expire()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_inner_deadline_leaves_the_outer_block() -> None:
    """Each of two is its own."""
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    with deadlines.within(FAR):
        with pytest.raises(TimeoutError), deadlines.within(SOON):
            await loop.create_future()
        await asyncio.sleep(0)


async def test_another_error_is_told_as_it_is() -> None:
    """One that a block raises of itself once its deadline has passed."""
    deadlines = Deadlines()
    with pytest.raises(KeyError), deadlines.within(SOON):
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise KeyError("its own")


async def test_calls_share_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand calls of the same time, one after another and side by side, set one timer."""
    loop, set_timers = asyncio.get_running_loop(), 0
    usual = loop.call_at

    def call_at(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        nonlocal set_timers
        set_timers += 1
        return usual(*args, **kwargs)

    monkeypatch.setattr(loop, "call_at", call_at)
    deadlines = Deadlines()

    async def call() -> None:
        with deadlines.within(FAR):
            await asyncio.sleep(0)

    for _ in range(100):
        await asyncio.gather(*(call() for _ in range(10)))
    assert set_timers == 1
