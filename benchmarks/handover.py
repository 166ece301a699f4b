"""One POST, one fdatasync, one answer to who waits: what no queue that speaks HTTP from Python can pass here.

A process of its own keeps what is posted (one write, one fdatasync by the kernel or in a thread, as the store does)
and gives it to a request that waits for it, all that has come since the last one. Nothing is parsed, checked,
indexed, leased or acked. The other side is the load of `latency`, by the SDK's own HTTP: one POST under way with all
that was due meanwhile, one request waiting.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import uvloop
from aiohttp import web

from benchmarks import limits
from millpond.client.connection import Connection
from millpond.client.load.batched import IDLE_SECONDS
from millpond.client.load.figures import Times
from millpond.client.load.pace import paced
from millpond.core.threads import Threads
from millpond.store.disk import SystemFile
from millpond.store.kernel_sync import Syncs

NAME = "a POST, an fdatasync, an answer"
PUT, TAKE = "/put", "/take"
FILE_BYTES = 64 * 1024 * 1024
PAGE_BYTES = 4096
POST_BYTES = 1024 * 1024  # what aiohttp reads of a body: a pause of the disk lets more gather


async def latency(folder: str, message_bytes: int, *, seconds: float, per_second: int) -> Times:
    """From when a message was due until it is in the taker's hand, at a steady rate."""
    with tempfile.TemporaryDirectory(dir=folder or None) as place:
        async with limits.answering("benchmarks.handover", place) as handler, Connection(handler.url) as connection:
            return await _Load(connection, message_bytes).run(int(seconds * per_second), per_second)


class _Load:
    def __init__(self, connection: Connection, message_bytes: int) -> None:
        self._connection = connection
        self._bytes = message_bytes
        self._most = POST_BYTES // message_bytes
        self._due: dict[bytes, float] = {}
        self._waiting: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None
        self._tasks = asyncio.TaskGroup()
        self._took: list[float] = []

    async def run(self, total: int, per_second: int) -> Times:
        """Raises TimeoutError when a message does not come, and what a request raises."""
        async with asyncio.timeout(total / per_second + IDLE_SECONDS), self._tasks:
            self._tasks.create_task(self._take(total))
            await paced(self._connection.clock, total, per_second, self._send)
        return Times.of(self._took)

    def _send(self, number: int, at: float) -> None:
        name = b"%08d" % number
        self._due[name] = at
        self._waiting.append(name.ljust(self._bytes, b"x"))
        if self._sending is None or self._sending.done():
            self._sending = self._tasks.create_task(self._post())

    async def _post(self) -> None:
        while self._waiting:
            gathered, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            await self._connection.call("POST", PUT, b"".join(gathered), retry_seconds=0)

    async def _take(self, total: int) -> None:
        while len(self._took) < total:
            answer = await self._connection.call("POST", TAKE, b"{}", retry_seconds=0)
            now = self._connection.clock.monotonic()
            for at in range(0, len(answer.body), self._bytes):
                self._took.append(now - self._due.pop(bytes(answer.body[at : at + 8])))


class Keeper:
    """Messages on their way through a file: kept once they are flushed, and taken by who waits, all there are."""

    def __init__(self, place: str) -> None:
        self._file = SystemFile(Path(place, "kept"), create=True)
        self._file.allocate(FILE_BYTES, written=True)
        self._at = 0
        self._syncs = Syncs(Threads(1, "keeper"))
        self._syncing = asyncio.Lock()
        self._written = self._durable = 0  # requests
        self._kept: list[bytes] = []
        self._taker: asyncio.Future[None] | None = None

    async def keep(self, body: bytes, messages: list[bytes]) -> None:
        """Returns when `body` is on the disk, and `messages` are there to be taken."""
        self._file.write(self._at, [body])
        self._at = (self._at + -(-len(body) // PAGE_BYTES) * PAGE_BYTES) % (FILE_BYTES // 2)
        self._written += 1
        await self._sync(self._written)
        self._kept += messages
        if self._taker is not None:
            self._taker.set_result(None)
            self._taker = None

    async def _sync(self, written: int) -> None:
        """One flush is for all that was written before it."""
        async with self._syncing:
            if self._durable < written:
                durable = self._written
                await self._syncs.sync(self._file)
                self._durable = durable

    async def take(self) -> list[bytes]:
        """At least one message. One caller at a time."""
        if not self._kept:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        kept, self._kept = self._kept, []
        return kept


async def _serve(place: str) -> None:
    keeper = Keeper(place)

    async def handle(request: web.BaseRequest) -> web.Response:
        body = await request.read()
        if request.path == TAKE:
            return web.Response(body=b"".join(await keeper.take()))
        await keeper.keep(body, [body])
        return web.Response(body=b"{}")

    await limits.answer(handle)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
