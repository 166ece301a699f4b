"""A listener on a free port, and a client that speaks raw bytes to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop

from millpond.core.clock import SystemRandom
from millpond.core.http.connection import Bounds
from millpond.core.http.routing import Route, Router
from millpond.core.http.server import HttpServer


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """All tests here run on both: the service runs on uvloop, and each has its own transports."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@dataclass(frozen=True)
class Somebody:
    tenant_id: int = 1
    tenant: str = "default"
    key_id: str = "k"
    scopes: list[str] = field(default_factory=list)


class OpenGate:
    def known(self, request: Any, scope: Any) -> Somebody:
        return Somebody()

    async def admit(self, request: Any, scope: Any) -> Somebody:
        raise AssertionError("known always knows")


class Raw:
    """One connection, read and written as bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, server: HttpServer) -> Raw:
        url = urlsplit(server.address)
        return cls(*await asyncio.open_connection(url.hostname, url.port))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """(status, headers in lower case, body) of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return int(first.split()[1]), headers, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def rest(self) -> bytes:
        """Everything until the server closes; a reset counts as a close."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


async def until(holds: Callable[[], bool]) -> None:
    """Turn the loop until the server's side has caught up; bounded by the test's own timeout."""
    while not holds():  # noqa: ASYNC110 - the server has no event for this, and needs none
        await asyncio.sleep(0)


Serve = Callable[..., Awaitable[HttpServer]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[HttpServer] = []

    async def start(routes: list[Route], bounds: Bounds | None = None, gate: Any = None) -> HttpServer:
        server = HttpServer(Router(routes), gate or OpenGate(), None, SystemRandom(), bounds)
        await server.start("127.0.0.1:0")
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop(0.1)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[HttpServer], Awaitable[Raw]]]:
    opened: list[Raw] = []

    async def start(server: HttpServer) -> Raw:
        raw = await Raw.open(server)
        opened.append(raw)
        return raw

    yield start
    for raw in opened:
        await raw.close()
