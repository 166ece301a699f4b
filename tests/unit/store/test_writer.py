"""Who waits for the writer: told when their position is reached, each by itself."""

from __future__ import annotations

import asyncio

import pytest

from millpond.core.errors import Unavailable
from millpond.store.writer import Waiters


async def asking(waiters: Waiters, *positions: int) -> list[asyncio.Task[None]]:
    """A task for each, which waits by now."""
    tasks = [asyncio.create_task(waiters.wait(position)) for position in positions]
    await asyncio.sleep(0)
    return tasks


async def ended(tasks: list[asyncio.Task[None]]) -> list[bool]:
    for _ in range(3):  # turns of the loop
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_positions_are_reached_in_any_order_of_asking() -> None:
    """All at or below a position, no other; several may wait for one."""
    waiters = Waiters()
    asked = await asking(waiters, 30, 10, 20, 10)
    waiters.reach(9)
    assert await ended(asked) == [False] * 4
    waiters.reach(20)
    assert await ended(asked) == [False, True, True, True]
    assert waiters
    waiters.reach(100)
    await asyncio.gather(*asked)
    assert not waiters


async def test_one_who_leaves_takes_nothing_from_the_others() -> None:
    """A client's call may be cancelled while others wait for the same flush, or for another."""
    waiters = Waiters()
    asked = await asking(waiters, 5, 10, 10, 20)
    asked[2].cancel()
    assert await ended(asked) == [False, False, True, False]
    waiters.reach(10)
    assert await ended(asked) == [True, True, True, False]
    waiters.reach(20)
    await asyncio.gather(*asked[:2], asked[3])


async def test_who_leaves_leaves_nothing_behind() -> None:
    """While a disk hangs calls come and give up; what they cost must not add up."""
    waiters = Waiters()
    asked = await asking(waiters, 10, 10, 20)
    for one in asked:
        one.cancel()
    assert await ended(asked) == [True] * 3
    assert not waiters


@pytest.mark.parametrize("leaves_first", [False, True])
async def test_leaving_in_the_turn_in_which_it_is_reached(leaves_first: bool) -> None:
    """It is cancelled, and the others wait on."""
    waiters = Waiters()
    asked = await asking(waiters, 10, 20)
    if leaves_first:
        asked[0].cancel()
    waiters.reach(10)
    asked[0].cancel()
    assert await ended(asked) == [True, False]
    assert asked[0].cancelled()
    waiters.reach(20)
    await asked[1]
    assert not waiters


async def test_all_are_told_of_a_failure() -> None:
    """Nobody waits afterwards."""
    waiters = Waiters()
    asked = await asking(waiters, 10, 20)
    waiters.fail(Unavailable("unknown_outcome", "gone"))
    for one in asked:
        with pytest.raises(Unavailable):
            await one
    assert not waiters
