"""Turns at a bounded number of slots, fair between tenants: `FairGate`.

A tenant that asks for a thousand cold reads waits behind its own, not in front of another tenant's one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from millpond.core.errors import TooManyRequests


class FairGate:
    """`slots` holders at once; waiting tenants take turns; at most `waiting_most` wait of one tenant."""

    def __init__(self, slots: int, waiting_most: int) -> None:
        self._free = slots
        self._waiting_most = waiting_most
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def idle(self) -> bool:
        """Whether a slot is free right now."""
        return self._free > 0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot. Raises TooManyRequests(cold_read_limit) when too many of this tenant wait already."""
        if self._free > 0:
            self._free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= self._waiting_most:
            raise TooManyRequests("cold_read_limit", f"{len(queue)} cold reads are waiting already: try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give a slot that has become free to the next tenant's first waiter, else keep it free."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            turn = _first_waiting(queue)
            if queue:
                self._waiting[tenant] = queue
            if turn is not None:
                turn.set_result(None)
                return
        self._free += 1


def _first_waiting(queue: deque[asyncio.Future[None]]) -> asyncio.Future[None] | None:
    """The first that still waits, taken out of `queue` together with those before it that gave up."""
    while queue:
        turn = queue.popleft()
        if not turn.done():
            return turn
    return None
