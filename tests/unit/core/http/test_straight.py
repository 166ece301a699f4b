"""Large request bodies: the same as small ones to whoever sends or handles them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from typing import Any

import pytest
from aiohttp import web

from millpond.core.http import connection as connection_module
from millpond.core.http import straight as straight_module
from millpond.core.http.call import BodyPace, Call
from millpond.core.http.connection import Bounds
from millpond.core.http.routing import Route
from millpond.core.http.straight import NEXT_HEAD_BYTES, STRAIGHT_BYTES, Straight, StraightBody

from .conftest import Raw, Serve, until

LIMIT = 16 * STRAIGHT_BYTES


async def _digest(call: Call[None]) -> web.Response:
    body = await call.body(LIMIT)
    return web.json_response({"kind": type(body).__name__, "digest": hashlib.sha256(body).hexdigest()})


ROUTES = [Route(method="POST", path="/digest", handler=_digest)]


def _post(body: bytes) -> bytes:
    return b"POST /digest HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def _ask(raw: Raw, body: bytes) -> str:
    """The kind of object the handler got; its content must be `body`."""
    status, _, answer = await raw.answer()
    found = json.loads(answer)
    assert (status, found["digest"]) == (200, hashlib.sha256(body).hexdigest())
    return str(found["kind"])


@pytest.mark.parametrize("size", [STRAIGHT_BYTES - 1, STRAIGHT_BYTES, STRAIGHT_BYTES + 1, LIMIT])
async def test_every_byte_arrives(serve: Serve, size: int) -> None:
    """Bodies below and above the bound, one after another on one connection, each followed by a small one."""
    raw = await Raw.open(await serve(ROUTES))
    for body in (os.urandom(size), b"small", os.urandom(size)):
        await raw.send(_post(body))
        await _ask(raw, body)
    await raw.close()
    assert StraightBody.declared == 0


async def test_a_body_that_comes_in_pieces_goes_straight(serve: Serve) -> None:
    """What is still to come when the handler asks for it is received past aiohttp: the handler gets a view."""
    raw = await Raw.open(await serve(ROUTES))
    whole = _post(body := os.urandom(LIMIT))
    for start in range(0, len(whole), 300_000):
        await raw.send(whole[start : start + 300_000])
        await asyncio.sleep(0)
    assert await _ask(raw, body) == "memoryview"
    await raw.close()


async def test_the_next_request_may_already_be_there(serve: Serve) -> None:
    """Pipelined behind a large body, a request is neither lost nor taken for a part of the body."""
    raw = await Raw.open(await serve(ROUTES))
    bodies = [os.urandom(LIMIT), b"second", os.urandom(LIMIT), b"fourth"]
    sending = asyncio.create_task(raw.send(b"".join(map(_post, bodies))))
    for body in bodies:
        await _ask(raw, body)
    await sending
    await raw.close()


async def test_what_follows_is_still_held_to_http(serve: Serve) -> None:
    """The parser that takes over after a large body refuses what is not HTTP."""
    raw = await Raw.open(await serve(ROUTES))
    await raw.send(_post(body := os.urandom(LIMIT)))
    await _ask(raw, body)
    await raw.send(b"NOT HTTP\r\n\r\n")
    assert (await raw.answer())[0] == 400
    await raw.close()


async def test_little_of_the_next_body_comes_by_the_usual_way(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a client has sent a large body, of the next one no more is copied than came with the head's first bytes."""
    begun: list[int] = []

    class Watched(StraightBody):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            begun.append(self.done)

    monkeypatch.setattr(connection_module, "StraightBody", Watched)
    raw = await Raw.open(await serve(ROUTES))
    for _ in range(3):
        await raw.send(_post(body := os.urandom(LIMIT)))
        await _ask(raw, body)
    await raw.close()
    assert len(begun) == 3
    assert all(0 < done < NEXT_HEAD_BYTES for done in begun[1:]), begun


async def test_who_sends_small_ones_is_read_as_before(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first bytes after a large body the connection has its place back."""
    places: list[type] = []
    real = connection_module.Connection.data_received

    def data_received(self: connection_module.Connection, data: bytes) -> None:
        assert self.transport is not None
        places.append(type(self.transport.get_protocol()))
        real(self, data)

    monkeypatch.setattr(connection_module.Connection, "data_received", data_received)
    raw = await Raw.open(await serve(ROUTES))
    await raw.send(_post(body := os.urandom(LIMIT)))
    await _ask(raw, body)
    places.clear()
    for _ in range(3):
        await raw.send(_post(b"small"))
        await _ask(raw, b"small")
    assert places == [Straight, connection_module.Connection, connection_module.Connection]
    await raw.close()


async def test_a_client_that_leaves_between_requests_is_let_go(serve: Serve) -> None:
    """Behind a large body the connection still notices that its client goes, and that it idles."""
    server = await serve(ROUTES, Bounds(idle_seconds=0.1))
    for leaves in (True, False):
        raw = await Raw.open(server)
        await raw.send(_post(body := os.urandom(LIMIT)))
        await _ask(raw, body)
        if leaves:
            await raw.close()
        await until(lambda: server.connections == 0)
        await raw.close()


async def test_a_slow_large_body_ends_with_408(serve: Serve) -> None:
    """A large body that stops half-way is given up after its time; the answer says how far it came."""
    raw = await Raw.open(await serve(ROUTES, Bounds(pace=BodyPace(0.1, 1e9))))
    await raw.send(_post(bytes(LIMIT))[: LIMIT // 2])
    status, headers, body = await raw.answer()
    assert (status, json.loads(body)["code"], headers["connection"]) == (408, "request_timeout", "close")
    await raw.close()
    await until(lambda: StraightBody.declared == 0)


async def test_bytes_received_move_the_deadline(serve: Serve) -> None:
    """A large body that keeps its pace is taken, however long it is under way in all."""
    raw = await Raw.open(await serve(ROUTES, Bounds(pace=BodyPace(0.05, LIMIT))))
    whole = _post(body := os.urandom(LIMIT))
    await raw.send(whole[: 3 * LIMIT // 4])
    asyncio.get_running_loop().call_later(0.3, raw.writer.write, whole[3 * LIMIT // 4 :])
    await _ask(raw, body)
    await raw.close()


async def test_a_client_that_leaves_in_the_middle_frees_its_memory(serve: Serve) -> None:
    """Its share of what may be received at once is given back, and the others go on."""
    server = await serve(ROUTES)
    raw = await Raw.open(server)
    await raw.send(_post(bytes(LIMIT))[: LIMIT // 2])
    await until(lambda: StraightBody.declared == LIMIT)
    await raw.close()
    await until(lambda: StraightBody.declared == 0 and server.connections == 0)
    other = await Raw.open(server)
    await other.send(_post(body := os.urandom(LIMIT)))
    await _ask(other, body)
    await other.close()


async def test_beyond_the_bound_bodies_take_the_usual_way(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no memory left to promise, a large body is gathered as it comes, and is the same."""
    monkeypatch.setattr(straight_module, "STRAIGHT_BYTES_AT_ONCE", LIMIT - 1)
    raw = await Raw.open(await serve(ROUTES))
    await raw.send(_post(body := os.urandom(LIMIT)))
    assert await _ask(raw, body) == "bytes"
    await raw.close()
