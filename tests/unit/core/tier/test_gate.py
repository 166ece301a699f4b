"""Turns between tenants."""

from __future__ import annotations

import asyncio

from millpond.core.tier.gate import FairGate


async def test_tenants_take_turns() -> None:
    """However many wait of each, and in whatever order they came, the slot goes round."""
    gate = FairGate(1, 100)
    order: list[str] = []

    async def use(tenant: str) -> None:
        async with gate.turn(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    async with gate.turn("first"):
        tasks = [asyncio.create_task(use(tenant)) for tenant in "aaaabbbc"]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert "".join(order) == "abcababa"
    assert gate.idle


async def test_giving_up_loses_no_slot() -> None:
    """A waiter that is cancelled, before its turn or in the very moment of it, leaves the slot to the next."""
    gate = FairGate(1, 100)
    done: list[int] = []

    async def use(number: int) -> None:
        async with gate.turn("a"):
            done.append(number)

    async with gate.turn("a"):
        tasks = [asyncio.create_task(use(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
    tasks[0].cancel()  # its turn has come, but it has not run yet
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [2, 3]
    assert sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes) == 2
    assert gate.idle
