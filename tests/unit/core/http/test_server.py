from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from millpond.core.clock import SystemRandom
from millpond.core.errors import StartupError
from millpond.core.http.call import BodyPace, Call, answer
from millpond.core.http.connection import Bounds
from millpond.core.http.routing import Route, Router
from millpond.core.http.server import HttpServer, is_loopback, split_listen

from .conftest import OpenGate, Raw, Serve, until

Connect = Callable[[HttpServer], Awaitable[Raw]]
LIMIT = 1_000


async def echo(call: Call[Any]) -> web.StreamResponse:
    return answer({"bytes": len(await call.body(LIMIT))})


async def broken(call: Call[Any]) -> web.StreamResponse:
    raise KeyError("the inside of the server")


ROUTES = [
    Route(method="POST", path="/echo", handler=echo),
    Route(method="GET", path="/broken", handler=broken),
]


def post(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body


async def test_answers_over_one_connection(serve: Serve, connect: Connect) -> None:
    """Requests that come together are answered in order on the same connection."""
    raw = await connect(await serve(ROUTES))
    await raw.send(post(b"a") + post(b"bb"))
    assert json.loads((await raw.answer())[2]) == {"bytes": 1}
    assert json.loads((await raw.answer())[2]) == {"bytes": 2}


async def test_a_bug_is_500_without_internals(serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """The answer says `internal` and the request id; the trace is in the log under that id."""
    raw = await connect(await serve(ROUTES))
    with caplog.at_level(logging.ERROR):
        await raw.send(b"GET /broken HTTP/1.1\r\nHost: h\r\n\r\n")
        status, headers, body = await raw.answer()
    problem = json.loads(body)
    assert (status, problem["code"], headers["content-type"]) == (500, "internal", "application/problem+json")
    assert b"inside" not in body
    assert problem["request_id"] in caplog.text
    assert "the inside of the server" in caplog.text


async def test_a_declared_overrun_is_refused_before_it_is_read(serve: Serve, connect: Connect) -> None:
    """413 comes while the body has not been sent at all."""
    raw = await connect(await serve(ROUTES))
    await raw.send(f"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: {LIMIT + 1}\r\n\r\n".encode())
    status, _, body = await raw.answer()
    assert (status, json.loads(body)["code"]) == (413, "body_too_large")


async def test_a_chunked_overrun_is_refused_while_it_is_read(serve: Serve, connect: Connect) -> None:
    """A body without a declared length is cut off as soon as it passes the limit."""
    raw = await connect(await serve(ROUTES))
    await raw.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    await raw.send(b"200\r\n" + b"x" * 512 + b"\r\n" + b"200\r\n" + b"x" * 512 + b"\r\n")
    status, _, body = await raw.answer()
    assert (status, json.loads(body)["code"]) == (413, "body_too_large")


async def test_a_chunked_body_that_came_whole_is_measured(serve: Serve, connect: Connect) -> None:
    """The limit also holds when all chunks arrive together with the head."""
    raw = await connect(await serve(ROUTES))
    chunks = b"".join(b"200\r\n" + b"x" * 512 + b"\r\n" for _ in range(3)) + b"0\r\n\r\n"
    await raw.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert (await raw.answer())[0] == 413


async def test_broken_chunks_are_a_bad_request(serve: Serve, connect: Connect) -> None:
    """A chunk size that is no number is 400, not a failure of ours."""
    raw = await connect(await serve(ROUTES))
    await raw.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    await raw.send(b"zz\r\nxx\r\n")
    assert b" 400 Bad Request" in (await raw.rest())[:30]


async def test_compressed_bodies_are_refused(serve: Serve, connect: Connect) -> None:
    """Nothing is inflated, so there is no bomb: 415."""
    raw = await connect(await serve(ROUTES))
    await raw.send(post(gzip.compress(b"0" * 100_000), "Content-Encoding: gzip"))
    assert (await raw.answer())[0] == 415


async def test_a_slow_head_ends_with_408(serve: Serve, connect: Connect) -> None:
    """A head that does not end within its time is told so and closed."""
    raw = await connect(await serve(ROUTES, Bounds(header_seconds=0.1)))
    await raw.send(b"POST /echo HTTP/1.1\r\nHost")
    assert b"request_timeout" in await raw.rest()


async def test_a_silent_connection_is_closed(serve: Serve, connect: Connect) -> None:
    """Whoever connects and sends nothing is closed without a word."""
    raw = await connect(await serve(ROUTES, Bounds(header_seconds=0.1)))
    assert await raw.rest() == b""


async def test_an_idle_connection_is_closed(serve: Serve, connect: Connect) -> None:
    """A kept-alive connection ends after its idle time, not after its head time."""
    raw = await connect(await serve(ROUTES, Bounds(header_seconds=30, idle_seconds=0.1)))
    await raw.send(post(b""))
    assert (await raw.answer())[0] == 200
    assert await raw.rest() == b""


async def test_a_slow_second_head_ends(serve: Serve, connect: Connect) -> None:
    """The head's time counts from its first byte, on a connection that was used before, too."""
    raw = await connect(await serve(ROUTES, Bounds(header_seconds=0.1)))
    await raw.send(post(b""))
    await raw.answer()
    await raw.send(b"POST /ec")
    assert b"request_timeout" in await raw.rest()


async def test_a_slow_body_ends_with_408(serve: Serve, connect: Connect) -> None:
    """A body that dribbles is given up after its time, and the connection with it."""
    raw = await connect(await serve(ROUTES, Bounds(pace=BodyPace(0.1, 1_000))))
    await raw.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nxx")
    status, headers, body = await raw.answer()
    assert (status, json.loads(body)["code"], headers["connection"]) == (408, "request_timeout", "close")


async def test_a_body_that_keeps_its_pace_is_taken(serve: Serve, connect: Connect) -> None:
    """Bytes received move the deadline: 100 bytes buy a second where 100 bytes a second are enough."""
    raw = await connect(await serve(ROUTES, Bounds(pace=BodyPace(0.05, 100))))
    await raw.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 101\r\n\r\n" + b"x" * 100)
    asyncio.get_running_loop().call_later(0.2, raw.writer.write, b"x")
    assert (await raw.answer())[0] == 200


@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_large_head_is_431(serve: Serve, connect: Connect, pieces: int) -> None:
    """All header lines together have a bound, whether they come in one piece or in several."""
    raw = await connect(await serve(ROUTES, Bounds(header_bytes=4_096)))
    head = b"POST /echo HTTP/1.1\r\nHost: h\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"v" * 1_000) for i in range(6))
    if pieces == 1:
        await raw.send(head + b"\r\n")
    else:
        await raw.send(head)
    assert (await raw.rest()).startswith(b"HTTP/1.1 431 ") if pieces == 2 else (await raw.answer())[0] == 431


async def test_a_large_body_beside_a_small_head_is_fine(serve: Serve, connect: Connect) -> None:
    """The head's bound counts the head alone."""
    raw = await connect(await serve(ROUTES, Bounds(header_bytes=512)))
    await raw.send(post(b"x" * LIMIT))
    assert (await raw.answer())[0] == 200


async def test_one_long_line_is_431(serve: Serve, connect: Connect) -> None:
    """A single header line may take half of the head at most."""
    raw = await connect(await serve(ROUTES, Bounds(header_bytes=4_096)))
    await raw.send(b"GET / HTTP/1.1\r\nX: " + b"v" * 3_000 + b"\r\n\r\n")
    assert (await raw.answer())[0] == 431


async def test_what_is_not_http_is_a_problem(serve: Serve, connect: Connect) -> None:
    """Garbage gets 400 and problem+json, and the connection is closed."""
    raw = await connect(await serve(ROUTES))
    await raw.send(b"\x16\x03\x01 hello\r\n\r\n")
    text = await raw.rest()
    assert b" 400 Bad Request" in text[:30]
    assert b"application/problem+json" in text


async def test_connections_beyond_the_cap_are_told_and_closed(serve: Serve, connect: Connect) -> None:
    """503 too_many_connections with Retry-After; those inside the cap go on; a freed place is usable."""
    server = await serve(ROUTES, Bounds(connections=1))
    first = await connect(server)
    await first.send(post(b""))
    assert (await first.answer())[0] == 200
    second = await connect(server)
    await second.send(post(b""))
    text = await second.rest()
    assert b"too_many_connections" in text
    assert b"Retry-After: 1" in text
    await first.send(post(b""))
    assert (await first.answer())[0] == 200
    await first.close()
    await until(lambda: not server.connections)
    third = await connect(server)
    await third.send(post(b""))
    assert (await third.answer())[0] == 200


async def test_expect_continue_is_answered(serve: Serve, connect: Connect) -> None:
    """curl asks before it sends a large body: it is told to go on, or why not."""
    raw = await connect(await serve(ROUTES))
    await raw.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert (await raw.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    await raw.send(b"xy")
    assert json.loads((await raw.answer())[2]) == {"bytes": 2}


class Waiter:
    """A handler that waits until it is told, and says how it ended."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.requests: list[web.BaseRequest] = []
        self.go = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __call__(self, call: Call[Any]) -> web.StreamResponse:
        self.requests.append(call.request)
        self.began.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended.set_result("cancelled")
            raise
        self.ended.set_result("done")
        return answer({"done": True})

    def route(self, waits: bool) -> Route:
        return Route(method="GET", path="/wait", handler=self, waits=waits)


WAIT = b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n"


async def test_a_long_poll_ends_with_its_client(serve: Serve, connect: Connect) -> None:
    """When the client goes away the handler of a waiting route is cancelled."""
    waiter = Waiter()
    raw = await connect(await serve([waiter.route(waits=True)]))
    await raw.send(WAIT)
    await waiter.began.wait()
    await raw.close()
    assert await asyncio.wait_for(waiter.ended, 5) == "cancelled"


async def test_other_calls_outlive_their_client(serve: Serve, connect: Connect) -> None:
    """A produce whose client goes away is carried to its end."""
    waiter = Waiter()
    raw = await connect(await serve([waiter.route(waits=False)]))
    await raw.send(WAIT)
    await waiter.began.wait()
    await raw.close()
    await until(lambda: waiter.requests[0].transport is None)
    waiter.go.set()
    assert await asyncio.wait_for(waiter.ended, 5) == "done"


async def test_stopping_ends_long_polls_with_503(serve: Serve, connect: Connect) -> None:
    """A long poll is told shutting_down at once, so that its client asks another process."""
    waiter = Waiter()
    server = await serve([waiter.route(waits=True)])
    raw = await connect(server)
    await raw.send(WAIT)
    await waiter.began.wait()
    _, (status, headers, body) = await asyncio.gather(server.stop(5), raw.answer())
    assert (status, json.loads(body)["code"], headers["connection"]) == (503, "shutting_down", "close")


async def test_stopping_lets_others_finish(serve: Serve, connect: Connect) -> None:
    """A request under way is answered while the listener takes no new ones."""
    waiter = Waiter()
    server = await serve([waiter.route(waits=False)])
    raw = await connect(server)
    await raw.send(WAIT)
    await waiter.began.wait()
    stopping = asyncio.ensure_future(server.stop(5))
    await asyncio.sleep(0)
    with pytest.raises(OSError):
        await Raw.open(server)
    waiter.go.set()
    assert (await raw.answer())[0] == 200
    await stopping


async def test_a_client_that_goes_while_sending_is_no_error(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a body and a closed connection: nothing is done, nothing is logged as a failure."""
    server = await serve(ROUTES)
    raw = await connect(server)
    await raw.send(b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nxx")
    await until(lambda: bool(server.connections))
    await raw.close()
    await until(lambda: not server.connections)
    assert "ERROR" not in caplog.text


async def test_head_has_no_body(serve: Serve) -> None:
    """HEAD is GET without the body."""

    async def hello(call: Call[Any]) -> web.StreamResponse:
        return answer({"a": 1})

    server = await serve([Route(method="GET", path="/", handler=hello)])
    async with aiohttp.ClientSession() as session, session.head(server.address + "/") as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_a_taken_port_says_what_to_do(serve: Serve) -> None:
    """Two listeners on one port: a StartupError with the remedy."""
    server = await serve(ROUTES)
    other = HttpServer(Router(ROUTES), OpenGate(), None, SystemRandom())
    with pytest.raises(StartupError, match="another process listens there"):
        await other.start(server.address.removeprefix("http://"))
    await other.stop(0)


@pytest.mark.parametrize("listen", ["", "8080", "host", "h:70000", "h:-1", "h:x"])
def test_a_bad_address_is_a_startup_error(listen: str) -> None:
    """What is not host:port is told so before anything is opened."""
    with pytest.raises(StartupError):
        split_listen(listen)


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), (":1", False), ("0.0.0.0:1", False),
     ("10.0.0.1:1", False), ("example.org:1", False)],
)  # fmt: skip
def test_loopback_is_told_from_elsewhere(listen: str, expected: bool) -> None:
    """Only addresses that no other machine can reach count as loopback."""
    assert is_loopback(listen) is expected
