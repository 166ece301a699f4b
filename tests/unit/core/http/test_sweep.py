"""Who is looked at every now and then, and what becomes of who takes too long: after the connection was left alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from millpond.core.http.call import Call, answer
from millpond.core.http.connection import Bounds, Connection
from millpond.core.http.routing import Route
from millpond.core.http.server import HttpServer

from .conftest import Raw, Serve, until

Connect = Callable[[HttpServer], Awaitable[Raw]]
BOUNDS = Bounds(header_seconds=0.1, stall_seconds=0.1)
BYTES = 32 << 20  # more than the system takes for a client that reads nothing
SMALL, LARGE = (b"GET /%s HTTP/1.1\r\nHost: h\r\n\r\n" % name for name in (b"small", b"large"))


async def small(call: Call[Any]) -> web.StreamResponse:
    return answer({})


async def large(call: Call[Any]) -> web.StreamResponse:
    return web.Response(body=bytes(BYTES))


ROUTES = [Route(method="GET", path="/small", handler=small), Route(method="GET", path="/large", handler=large)]


class Looks:
    """How often each connection was looked at, by the client's port."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: Counter[int] = Counter()
        self._looked = asyncio.Event()
        real = Connection.sweep

        def sweep(connection: Connection, now: float) -> None:
            assert connection.transport is not None
            self.of[connection.transport.get_extra_info("peername")[1]] += 1
            self._looked.set()
            real(connection, now)

        monkeypatch.setattr(Connection, "sweep", sweep)

    async def next(self) -> None:
        self._looked.clear()
        await self._looked.wait()


def _port(raw: Raw) -> int:
    port: int = raw.writer.get_extra_info("sockname")[1]
    return port


async def _left_alone(server: HttpServer, connect: Connect, looks: Looks) -> tuple[Raw, int]:
    """A connection that has had an answer, and how often it was looked at until nobody did any more."""
    raw = await connect(server)
    await raw.send(SMALL)
    await raw.answer()
    await _three_looks_at_others(server, connect, looks)
    return raw, looks.of[_port(raw)]


async def _three_looks_at_others(server: HttpServer, connect: Connect, looks: Looks) -> None:
    for _ in range(3):
        other = await connect(server)
        while not looks.of[_port(other)]:
            await looks.next()


async def test_who_has_an_answer_is_left_alone(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection, of which there may be thousands, costs nothing while others are watched."""
    looks = Looks(monkeypatch)
    server = await serve(ROUTES, BOUNDS)
    raw, before = await _left_alone(server, connect, looks)
    await _three_looks_at_others(server, connect, looks)
    assert looks.of[_port(raw)] == before


async def test_a_slow_head_of_one_left_alone(serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first byte of another request on it is watched again."""
    raw, _ = await _left_alone(await serve(ROUTES, BOUNDS), connect, Looks(monkeypatch))
    await raw.send(b"GET /sm")
    assert b"request_timeout" in await raw.rest()


async def test_a_stalled_answer_of_one_left_alone(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose client takes nothing is watched again, and given up."""
    server = await serve(ROUTES, BOUNDS)
    raw, _ = await _left_alone(server, connect, Looks(monkeypatch))
    await raw.send(LARGE)
    await until(lambda: not server.connections)
    assert len(await raw.rest()) < BYTES
