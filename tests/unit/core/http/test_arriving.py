"""Large requests whose head came before: their body arrives without aiohttp's knowledge, and is answered promptly."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from hashlib import sha256

import pytest
from aiohttp import web

from millpond.core.http import connection as connection_module
from millpond.core.http import straight as straight_module
from millpond.core.http.call import BodyPace, Call
from millpond.core.http.connection import Bounds
from millpond.core.http.prompt import Prompt, PromptCall
from millpond.core.http.routing import Route
from millpond.core.http.server import HttpServer
from millpond.core.http.straight import NEXT_HEAD_BYTES, STRAIGHT_BYTES, STRAIGHT_BYTES_MOST, StraightBody

from .conftest import Raw, Serve, until

LARGE = 4 * STRAIGHT_BYTES


class Digest:
    """Answers how it was asked, and the digest of the body: promptly, or the usual way a body that begins with `u`; the
    latter once it is `open`."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()

    def prompt(self, call: PromptCall[None]) -> Prompt | None:
        if bytes(call.body[:1]) == b"u":
            return None
        if bytes(call.body[:1]) == b"!":
            raise ValueError("not this one")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        future.set_result(b"prompt " + _digest(call.body))
        return Prompt(future, bytes, "text/plain")

    async def usual(self, call: Call[None]) -> web.Response:
        body = await call.body(STRAIGHT_BYTES_MOST + 1)
        await self.open.wait()
        return web.Response(body=b"usual " + _digest(body))

    @property
    def route(self) -> Route:
        return Route(method="POST", path="/digest/{of}", handler=self.usual, prompt=self.prompt, large=True)


def _digest(body: bytes | memoryview) -> bytes:
    return sha256(body).hexdigest().encode()


def _post(body: bytes, *headers: str, to: str = "a") -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"POST /digest/{to} HTTP/1.1\r\nHost: h\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _random(size: int) -> bytes:
    return b"r" + os.urandom(size - 1)


async def _how(raw: Raw, body: bytes) -> str:
    """Of the next answer, which is to be that to `body`."""
    status, _, answer = await raw.answer()
    how, digest = answer.split()
    assert (status, digest) == (200, _digest(body))
    return how.decode()


async def _asked(raw: Raw, body: bytes, *headers: str, to: str = "a") -> str:
    await raw.send(_post(body, *headers, to=to))
    return await _how(raw, body)


async def _first(serve: Serve, bounds: Bounds | None = None) -> tuple[HttpServer, Raw]:
    """A connection that has had an answer to a large request."""
    server = await serve([Digest().route], bounds)
    raw = await Raw.open(server)
    assert await _asked(raw, _random(LARGE)) == "usual"
    return server, raw


async def _half(raw: Raw, body: bytes) -> bytes:
    """Sends half of a request, and returns the rest once the service has begun with it."""
    data = _post(body)
    await raw.send(data[: len(data) // 2])
    await until(lambda: StraightBody.declared == len(body))
    return data[len(data) // 2 :]


async def test_large_bodies_behind_a_known_head_are_answered_promptly(serve: Serve) -> None:
    """Of any size, and of another target; small ones in between, too, and other heads once they are known."""
    server, raw = await _first(serve)
    for size in (STRAIGHT_BYTES, LARGE, 5, STRAIGHT_BYTES_MOST, LARGE + 1):
        assert await _asked(raw, _random(size)) == "prompt"
    assert await _asked(raw, _random(LARGE), to="b") == "prompt"
    assert [await _asked(raw, _random(LARGE), "X-Name: n") for _ in range(2)] == ["usual", "prompt"]
    assert (server.requests[200], StraightBody.declared) == (9, 0)
    await raw.close()


@pytest.mark.parametrize("begin", [b"u", b"!"])
async def test_what_cannot_be_answered_so_goes_the_usual_way(serve: Serve, begin: bytes) -> None:
    """With the whole body, also when the prompt handler fails; and what follows is answered as ever."""
    _, raw = await _first(serve)
    bodies = [_random(LARGE), begin + _random(LARGE), _random(LARGE), _random(LARGE), b"small"]
    assert [await _asked(raw, body) for body in bodies] == ["prompt", "usual", "usual", "prompt", "prompt"]
    await raw.close()


@pytest.mark.parametrize(
    ("size", "headers"),
    [
        (STRAIGHT_BYTES - 1, ()),
        (STRAIGHT_BYTES_MOST + 1, ()),
        (LARGE, ("Expect: 100-continue",)),
        (LARGE, ("Connection: close",)),
    ],
)
async def test_what_is_never_received_so(serve: Serve, size: int, headers: tuple[str, ...]) -> None:
    """Other sizes, and who wants something else of the connection."""
    server = await serve([Digest().route])
    for _ in range(2):
        raw = await Raw.open(server)
        for _ in range(1 if "Connection: close" in headers else 3):
            body = _random(size)
            await raw.send(_post(body, *headers))
            if "Expect: 100-continue" in headers:
                assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert await _how(raw, body) == "usual"
        await raw.close()


async def test_a_route_that_takes_no_large_ones_promptly(serve: Serve) -> None:
    """Its small requests are, its large ones are not, whatever was known before."""
    raw = await Raw.open(await serve([replace(Digest().route, large=False)]))
    bodies = [b"small", b"small", _random(LARGE), _random(LARGE), b"small"]
    assert [await _asked(raw, body) for body in bodies] == ["prompt", "prompt", "usual", "usual", "prompt"]
    await raw.close()


async def test_beyond_the_bound_of_memory_it_is_not(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all clients declare together is bounded for these, too."""
    _, raw = await _first(serve)
    monkeypatch.setattr(straight_module, "STRAIGHT_BYTES_AT_ONCE", LARGE - 1)
    assert await _asked(raw, _random(LARGE)) == "usual"
    await raw.close()


async def test_none_overtakes_one_that_is_handled(serve: Serve) -> None:
    """A large request behind one that has no answer yet waits for its turn, whatever is known of its head."""
    digest = Digest()
    digest.open.clear()
    raw = await Raw.open(await serve([digest.route]))
    bodies = [_random(LARGE), _random(LARGE)]
    sending = asyncio.create_task(raw.send(b"".join(map(_post, bodies))))
    await until(lambda: StraightBody.declared > 0)
    await until(lambda: StraightBody.declared == 0)
    for _ in range(100):
        await asyncio.sleep(0)
    digest.open.set()
    assert [await _how(raw, body) for body in bodies] == ["usual", "usual"]
    await sending
    await raw.close()


async def test_a_body_that_stops_ends_with_408(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that any body has, counting all that came of it, and the connection closes."""
    monkeypatch.setattr(connection_module, "PROMPT_SECONDS", 0.01)
    server, raw = await _first(serve, Bounds(pace=BodyPace(0.1, 1e9), stall_seconds=0.1))
    body = _random(LARGE)
    rest = await _half(raw, body)
    status, headers, problem = await raw.answer()
    assert (status, headers["connection"]) == (408, "close")
    assert f"{len(body) - len(rest)} bytes so far" in problem.decode()
    await raw.close()
    await until(lambda: StraightBody.declared == 0 and server.connections == 0)


async def test_a_body_that_takes_long_goes_the_usual_way(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered as ever, as long as it keeps its pace."""
    monkeypatch.setattr(connection_module, "PROMPT_SECONDS", 0.01)
    told = asyncio.Event()
    real = connection_module.Connection.tell

    def tell(self: connection_module.Connection) -> None:
        real(self)
        told.set()

    monkeypatch.setattr(connection_module.Connection, "tell", tell)
    _, raw = await _first(serve, Bounds(stall_seconds=0.1))
    rest = await _half(raw, body := _random(LARGE))
    await told.wait()
    await raw.send(rest)
    assert await _how(raw, body) == "usual"
    assert [await _asked(raw, _random(LARGE)) for _ in range(2)] == ["usual", "prompt"]
    await raw.close()


async def test_a_body_is_too_slow_by_when_it_began() -> None:
    """One whose time was over before it is waited for."""
    body = StraightBody(10, b"")
    body.since = asyncio.get_running_loop().time() - 60
    with pytest.raises(TimeoutError):
        await body.received(30, 1e9)
    body.ended()


async def test_a_client_that_leaves_in_the_middle_frees_its_memory(serve: Serve) -> None:
    """Nothing is answered, and nothing stays."""
    server, raw = await _first(serve)
    await _half(raw, _random(LARGE))
    await raw.close()
    await until(lambda: StraightBody.declared == 0 and server.connections == 0)
    assert server.requests.total() == 1


async def test_a_server_that_stops_waits_for_the_body(serve: Serve) -> None:
    """It is taken and answered as any request that is under way, and then the connection is closed."""
    server, raw = await _first(serve)
    rest = await _half(raw, body := _random(LARGE))
    stopping = asyncio.create_task(server.stop(5))
    await until(lambda: server.draining)
    await raw.send(rest)
    assert await _how(raw, body) == "usual"
    assert await raw.rest() == b""
    await stopping
    await raw.close()


async def test_an_idle_time_that_ends_meanwhile_closes_nothing(serve: Serve) -> None:
    """The connection's idle time begins with the answer."""
    server, raw = await _first(serve, Bounds(idle_seconds=0.1))
    rest = await _half(raw, body := _random(LARGE))
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(0.3, over.set_result, None)
    await over
    await raw.send(rest)
    assert await _how(raw, body) == "prompt"
    await until(lambda: server.connections == 0)
    await raw.close()


@pytest.mark.parametrize("seed", range(8))
async def test_answers_come_in_order_however_it_is_cut(serve: Serve, seed: int) -> None:
    """Small and large requests, equal and other heads, in any pieces, one after another or together."""
    choose = random.Random(seed)  # noqa: S311  # so that a failure can be repeated
    raw = await Raw.open(await serve([replace(Digest().route, varies="X-Name")]))
    for _ in range(12):
        bodies = [
            _random(choose.choice([1, 3_000, NEXT_HEAD_BYTES, STRAIGHT_BYTES, LARGE]))
            for _ in range(choose.randint(1, 3))
        ]
        data = b"".join(
            _post(body, *choose.choice([(), ("X-Name: n",), (f"X-Name: {seed}",)]), to=choose.choice("aab"))
            for body in bodies
        )
        cuts = sorted(choose.randrange(len(data)) for _ in range(choose.randint(0, 4)))
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            await raw.send(data[begin:end])
            for _ in range(4):
                await asyncio.sleep(0)
        for body in bodies:
            await _how(raw, body)
    await raw.close()
