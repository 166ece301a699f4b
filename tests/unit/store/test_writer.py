"""Who waits for the writer: told when their position is reached, each by itself."""

from __future__ import annotations

import asyncio

import pytest

from millpond.core.errors import Unavailable
from millpond.store.writer import Waiters


async def test_positions_are_reached_in_any_order_of_asking() -> None:
    """All at or below a position, no other; several may wait for one."""
    waiters = Waiters()
    asked = [waiters.wait(position) for position in (30, 10, 20, 10)]
    waiters.reach(9)
    assert [one.done() for one in asked] == [False] * 4
    waiters.reach(20)
    assert [one.done() for one in asked] == [False, True, True, True]
    assert waiters
    waiters.reach(100)
    assert asked[0].result() is None
    assert not waiters


async def test_one_who_leaves_takes_nothing_from_the_others() -> None:
    """A client's call may be cancelled while others wait for the same flush."""
    waiters = Waiters()
    leaving, staying = waiters.wait(10), waiters.wait(10)
    leaving.cancel()
    waiters.reach(10)
    assert (leaving.cancelled(), staying.result()) == (True, None)


async def test_all_are_told_of_a_failure() -> None:
    """Also beside one who has left; nobody waits afterwards."""
    waiters = Waiters()
    leaving, staying = waiters.wait(10), waiters.wait(20)
    leaving.cancel()
    waiters.fail(Unavailable("unknown_outcome", "gone"))
    with pytest.raises(Unavailable):
        await asyncio.wait_for(staying, 1)
    assert not waiters
