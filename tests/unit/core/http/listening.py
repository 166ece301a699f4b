"""A server that says what a test tells it to, and our own connections to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from millpond.core.clock import Clock, SystemClock
from millpond.core.http.wire import NO_BODY, Bounds, Received, Wires

BOUNDS = Bounds(connections=8, connect_seconds=5, idle_seconds=60, answer_bytes=4 << 20)
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Counts what connects to it."""

    def __init__(self, serve: Serve, clock: Clock, bounds: Bounds) -> None:
        self.made = 0
        self.ended = asyncio.Event()  # set when `serve` is through with a connection
        self.tasks: list[asyncio.Task[None]] = []
        self._serve, self._clock, self._bounds = serve, clock, bounds
        self.wires: Wires
        self.server: asyncio.Server

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._one, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.wires = Wires(url, self._clock, self._bounds, "Bearer k")

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._serve(reader, writer)
        self.ended.set()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def get(self) -> Received:
        return await self.wires.ask("GET", "/a", {}, NO_BODY, 5)


@asynccontextmanager
async def listening(serve: Serve, clock: Clock | None = None, bounds: Bounds = BOUNDS) -> AsyncIterator[Listener]:
    """A listener that does `serve` for each connection, and wires to it."""
    listener = Listener(serve, clock or SystemClock(), bounds)
    await listener.start()
    try:
        yield listener
    finally:
        await listener.wires.close()
        listener.server.close()
        await asyncio.gather(*listener.tasks)


def saying(*answers: bytes, apart: bool = False) -> Serve:
    """Each request gets the next of `answers`, byte by byte when `apart`; then the connection ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            for at in range(len(answer)) if apart else [0]:
                writer.write(answer[at : at + 1] if apart else answer)
                await writer.drain()
                await asyncio.sleep(0)

    return serve


def repeating(answer: bytes) -> Serve:
    """Every request gets `answer`; the connection stays."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()

    return serve


async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads, and never answers."""
    await reader.read()
