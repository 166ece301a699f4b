"""The `Settler` takes a consumer's acks, nacks and extends to the service: many in one call, one call in flight.

What somebody waits for goes at once, or with what gathers while the last call is under way; what nobody waits for
(automatic acks) gathers for a few milliseconds. Acks of many rows of one lease are one item: its receipt and
ranges of rows. A call is tried again when it fails: settling twice is answered `already`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from millpond.client.connection import Connection, path_of
from millpond.client.errors import Closed, UnknownProblem
from millpond.core import limits
from millpond.core.errors import MillpondError

log = logging.getLogger("millpond.client")
Item = str | dict[str, object]


class _Result(msgspec.Struct):
    status: str


class _Results(msgspec.Struct):
    results: list[_Result]


class _Call:
    """What the next calls carry. `waiters`: who waits for the status of which item."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}  # one by one, by receipt
        self.runs: dict[str, list[range]] = {}  # many at once
        self.count = 0  # of both
        self.items: list[tuple[str, Item, asyncio.Future[str] | None]] = []

    @property
    def empty(self) -> bool:
        return not self.count and not self.items


class Settler:
    """Of one group. Its task starts with the first settle and ends with `close()`."""

    def __init__(self, connection: Connection, topic: str, group: str) -> None:
        self._connection = connection
        self._path = path_of("topics", topic, "groups", group, "messages", "ack")
        self._next = _Call()
        self._under_way = _Call()
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    # -- what consumers ask -----------------------------------------------------------------------------------

    def ack_rows(self, receipt: str, rows: Sequence[int]) -> None:
        """Ack these rows of a receipt, ascending; nobody waits."""
        call = self._next
        if isinstance(rows, range):
            call.runs.setdefault(receipt, []).append(rows)
        else:
            call.rows.setdefault(receipt, []).extend(rows)
        call.count += len(rows)
        self._start()
        if call.count >= limits.CLIENT_SETTLE_ROWS:
            self._urgent.set()

    async def ack_receipt(self, receipt: str, rows: Sequence[int]) -> str:
        """Ack these rows of a receipt; the status of the last of its items (mostly it is the only one)."""
        return await self._all("acks", [{"receipt": receipt, "rows": text} for text in ranges(rows)])

    async def ack_one(self, lease_id: str) -> str:
        return await self._one("acks", lease_id)

    async def nack_one(self, lease_id: str, delay_ms: int) -> str:
        return await self._one("nacks", {"lease_id": lease_id, "delay_ms": delay_ms})

    async def extend_one(self, lease_id: str, lease_ms: int) -> str:
        return await self._one("extends", {"lease_id": lease_id, "lease_ms": lease_ms})

    async def nack_rows(self, receipt: str, rows: Sequence[int], delay_ms: int) -> str:
        return await self._all(
            "nacks", [{"receipt": receipt, "rows": text, "delay_ms": delay_ms} for text in ranges(rows)]
        )

    async def extend_rows(self, receipt: str, rows: Sequence[int], lease_ms: int) -> str:
        return await self._all(
            "extends", [{"receipt": receipt, "rows": text, "lease_ms": lease_ms} for text in ranges(rows)]
        )

    async def close(self) -> None:
        """Send what is left, then end."""
        self._closing = True
        self._wake.set()
        self._urgent.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _one(self, kind: str, item: Item) -> str:
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._next.items.append((kind, item, waiter))
        self._start()
        self._urgent.set()
        return await waiter

    async def _all(self, kind: str, items: Sequence[Item]) -> str:
        """Settle all; the status of the last one, which is answered after the others. Nothing is `already`."""
        if not items:
            return "already"
        self._next.items += [(kind, item, None) for item in items[:-1]]
        return await self._one(kind, items[-1])

    # -- its task ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._closing:
            raise Closed("the consumer is closed: its leases were released")
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="millpond settler")
            self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        while not (self._closing and self._next.empty):
            await self._wake.wait()
            self._wake.clear()
            if self._next.empty:
                continue
            await self._gather()
            self._under_way, self._next = self._next, _Call()
            await self._send(self._under_way)

    async def _gather(self) -> None:
        """Let automatic acks gather, unless somebody waits."""
        try:
            async with asyncio.timeout(limits.CLIENT_SETTLE_MS / 1000):
                await self._urgent.wait()
        except TimeoutError:
            pass
        if not self._closing:
            self._urgent.clear()

    async def _send(self, call: _Call) -> None:
        items = call.items
        for receipt, rows in call.rows.items():
            rows.sort()
            items += [("acks", {"receipt": receipt, "rows": text}, None) for text in ranges(rows)]
        for receipt, runs in call.runs.items():
            items += [("acks", {"receipt": receipt, "rows": text}, None) for text in joined(runs)]
        for first in range(0, len(items), limits.SETTLE_ITEMS):
            some = items[first : first + limits.SETTLE_ITEMS]
            try:
                statuses = await self._post(some)
            except MillpondError as error:
                log.warning("%d settles of leases failed: %s", len(some), error)
                for _, _, waiter in some:
                    if waiter is not None and not waiter.done():
                        waiter.set_exception(error)
                continue
            for (_, _, waiter), status in zip(some, statuses, strict=True):
                if waiter is not None and not waiter.done():
                    waiter.set_result(status)

    async def _post(self, items: Sequence[tuple[str, Item, object]]) -> list[str]:
        """The status of each item. The answer's results stand in the order acks, nacks, extends."""
        body = {
            kind: [item for of, item, _ in items if of == kind]
            for kind in ("acks", "nacks", "extends")
            if any(of == kind for of, _, _ in items)
        }
        answer = await self._connection.json("POST", self._path, body, shape=_Results, repeatable=True)
        if len(answer.results) != len(items):
            raise UnknownProblem(f"{len(items)} leases were settled and {len(answer.results)} answered")
        order = [at for kind in body for at, (of, _, _) in enumerate(items) if of == kind]
        statuses = [""] * len(items)
        for at, result in zip(order, answer.results, strict=True):
            statuses[at] = result.status
        return statuses

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody may wait for ever, should the task have died."""
        self._task = None
        if task.cancelled() or task.exception() is not None:
            log.error("the settler died", exc_info=None if task.cancelled() else task.exception())
            for _, _, waiter in (*self._under_way.items, *self._next.items):
                if waiter is not None and not waiter.done():
                    waiter.set_exception(Closed("the consumer's settler died"))


def ranges(rows: Sequence[int]) -> list[str]:
    """Ascending distinct rows as texts like `0-2,7`, each of at most RECEIPT_RANGES ranges."""
    if not rows:
        return []
    if rows[-1] - rows[0] == len(rows) - 1:  # one run
        return [_text(rows[0], rows[-1])]
    numbers = np.asarray(rows, np.int64)
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    firsts = numbers[np.concatenate(([0], breaks + 1))].tolist()
    lasts = numbers[np.concatenate((breaks, [len(numbers) - 1]))].tolist()
    return _cut([_text(first, last) for first, last in zip(firsts, lasts, strict=True)])


def joined(runs: list[range]) -> list[str]:
    """As `ranges`, for rows that are known as runs."""
    runs.sort(key=lambda run: run.start)
    merged: list[range] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = range(merged[-1].start, run.stop)
        elif run:
            merged.append(run)
    return _cut([_text(run[0], run[-1]) for run in merged])


def _text(first: int, last: int) -> str:
    return f"{first}-{last}" if first != last else str(first)


def _cut(parts: list[str]) -> list[str]:
    most = limits.RECEIPT_RANGES
    return [",".join(parts[at : at + most]) for at in range(0, len(parts), most)]
