"""One call beside its caller."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from millpond.store.tier.in_turn import InTurn


async def test_a_call_begins_when_the_one_before_has_ended() -> None:
    """`put` waits for the call before; its own goes on beside the caller."""
    told: list[str] = []
    go = asyncio.Event()

    async def call(name: str) -> None:
        told.append(f"{name} begins")
        await go.wait()
        told.append(f"{name} ends")

    async with InTurn() as calls:
        await calls.put(call("a"))
        second = asyncio.create_task(calls.put(call("b")))
        for _ in range(3):
            await asyncio.sleep(0)
        assert told == ["a begins"]
        assert not second.done()
        go.set()
        await second
    assert told == ["a begins", "a ends", "b begins", "b ends"]


async def test_nothing_follows_a_call_that_failed() -> None:
    """Its error comes out of the next `put`, whose call never begins."""
    begun: list[str] = []

    async def fails() -> None:
        raise ValueError("no")

    async def follows() -> None:
        begun.append("follows")

    async def both() -> None:
        async with InTurn() as calls:
            await calls.put(fails())
            await calls.put(follows())

    with pytest.raises(ValueError, match="no"):
        await both()
    assert not begun


async def test_the_last_call_s_error_comes_out_of_the_block() -> None:
    """Nobody leaves before the last call has ended."""

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        async with InTurn() as calls:
            await calls.put(fails())


async def test_a_cancelled_block_cancels_its_call() -> None:
    """A store that closes waits for no upload."""
    ended: list[str] = []

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def block() -> None:
        async with InTurn() as calls:
            await calls.put(call())
            await asyncio.Event().wait()

    for waits in (False, True):
        task = asyncio.create_task(block() if not waits else _finishing(call))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended == ["cancelled"] * 2


async def _finishing(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async with InTurn() as calls:
        await calls.put(call())
        await calls.finish()


class _Large:
    """Stands for the memory of an object."""


async def test_a_failed_call_leaves_nothing_behind() -> None:
    """What a failed call held is free once its error is dealt with, without waiting for a collection of cycles."""
    gone: list[weakref.ref[_Large]] = []

    async def fails() -> None:
        large = _Large()
        gone.append(weakref.ref(large))
        raise ValueError("no")

    gc.disable()
    try:
        turn = InTurn()
        await turn.put(fails())
        with contextlib.suppress(ValueError):
            await turn.finish()
        await asyncio.sleep(0)  # the loop's own call, which brought the error, ends
        assert gone[0]() is None
    finally:
        gc.enable()
