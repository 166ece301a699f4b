"""Answers without a task: the same to a client as any other, in order, and never lost."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import cast

import pytest
from aiohttp import web
from aiohttp.web_protocol import MAX_MSG_QUEUE_SIZE

from millpond.core.errors import BadRequest, MillpondError, Unavailable
from millpond.core.http import connection as connection_module
from millpond.core.http.call import Call, Principal
from millpond.core.http.connection import Bounds
from millpond.core.http.prompt import Encoded, Prompt, PromptCall
from millpond.core.http.routing import Route
from millpond.core.http.server import HttpServer

from .conftest import OpenGate, Raw, Serve, until


class Desk:
    """A route whose prompt answers wait until they are let go; the usual way says so in its answer."""

    def __init__(self, *, waits: bool = False) -> None:
        self.waits = waits
        self.lost = 0
        self.begun = 0  # the usual way
        self.waiting: list[asyncio.Future[object]] = []

    def prompt(self, call: PromptCall[None]) -> Prompt | None:
        if call.body == b"usual":
            return None
        if call.body == b"refused":
            raise BadRequest("invalid_request", "no such thing")
        if call.body == b"broken":
            raise ZeroDivisionError
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        return Prompt(future, self._encode, "text/plain", self._leave if self.waits else None, self._lose)

    def _leave(self) -> None:
        for future in self.waiting:
            future.cancel()

    def _lose(self) -> None:
        self.lost += 1

    def _encode(self, result: object) -> Encoded:
        if isinstance(result, MillpondError):
            raise result
        if isinstance(result, list):
            return result
        assert isinstance(result, bytes), "a bug"
        return b"prompt " + result

    async def usual(self, call: Call[None]) -> web.Response:
        self.begun += 1
        body = await call.body(1_000_000)
        if body == b"refused":
            raise BadRequest("invalid_request", "no such thing")
        return web.Response(body=b"usual " + bytes(body))

    @property
    def route(self) -> Route:
        return Route(method="POST", path="/desk", handler=self.usual, prompt=self.prompt, scope="produce")


def post(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"POST /desk HTTP/{version}\r\nHost: h\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _asked(serve: Serve, desk: Desk, *bodies: bytes) -> tuple[HttpServer, Raw]:
    """A connection that has sent a first usual request, and then these in one piece."""
    server = await serve([desk.route])
    raw = await Raw.open(server)
    await raw.send(post(b"usual"))
    assert (await raw.answer())[2] == b"usual usual"
    await raw.send(b"".join(map(post, bodies)))
    return server, raw


async def test_a_prompt_answer(serve: Serve) -> None:
    """Status, length and body as of any answer, and it is counted."""
    desk = Desk()
    server, raw = await _asked(serve, desk, b"1")
    await until(lambda: len(desk.waiting) == 1)
    desk.waiting[0].set_result(b"one")
    status, headers, body = await raw.answer()
    assert (status, headers["content-type"], body) == (200, "text/plain", b"prompt one")
    assert server.requests[200] == 2
    await raw.close()


async def test_answers_come_in_order(serve: Serve) -> None:
    """What a client sends before it has its answer, prompt or not, waits for that answer."""
    desk = Desk()
    _, raw = await _asked(serve, desk, b"1")
    await until(lambda: len(desk.waiting) == 1)
    await raw.send(post(b"usual") + post(b"2"))
    await raw.send(post(b"3"))
    await asyncio.sleep(0.05)
    assert len(desk.waiting) == 1
    desk.waiting[0].set_result(b"one")
    assert [(await raw.answer())[2] for _ in range(2)] == [b"prompt one", b"usual usual"]
    for expected in (b"2", b"3"):  # pipelined ones take the usual way
        assert (await raw.answer())[2] == b"usual " + expected
    await raw.close()


async def test_what_it_cannot_do_goes_the_usual_way(serve: Serve) -> None:
    """None and an error both leave the request, with its body, to the usual handler."""
    _, raw = await _asked(serve, Desk(), b"usual")
    assert (await raw.answer())[2] == b"usual usual"
    await raw.send(post(b"refused"))
    status, _, body = await raw.answer()
    assert (status, json.loads(body)["code"]) == (400, "invalid_request")
    await raw.send(post(b"broken"))
    assert (await raw.answer())[2] == b"usual broken"
    await raw.close()


async def test_a_large_head_is_431_as_ever(serve: Serve) -> None:
    """All header lines together have their bound, also of a request that could be answered promptly."""
    desk = Desk()
    raw = await Raw.open(await serve([desk.route], Bounds(header_bytes=4_096)))
    await raw.send(post(b"usual"))
    await raw.answer()
    await raw.send(post(b"1", *(f"X-{number}: {'v' * 1_000}" for number in range(6))))
    assert (await raw.answer())[0] == 431
    assert desk.waiting == []
    await raw.close()


@pytest.mark.parametrize("request_bytes", [post(b"1", "Connection: close"), post(b"1", version="1.0")])
async def test_a_connection_that_ends_goes_the_usual_way(serve: Serve, request_bytes: bytes) -> None:
    """The prompt way knows kept-alive HTTP/1.1 only."""
    raw = await Raw.open(await serve([Desk().route]))
    await raw.send(request_bytes)
    assert (await raw.rest()).endswith(b"usual 1")
    await raw.close()


async def test_an_error_of_the_work_is_a_problem(serve: Serve) -> None:
    """An error that the work ends with, expected or a bug, is a problem answer, and the connection goes on."""
    desk = Desk()
    _, raw = await _asked(serve, desk)
    for result, status, code in ((Unavailable("flush_behind", "later"), 503, "flush_behind"), (7, 500, "internal")):
        desk.waiting.clear()
        await raw.send(post(b"1"))
        await until(lambda: bool(desk.waiting))
        desk.waiting[0].set_result(result)
        got, headers, body = await raw.answer()
        assert (got, json.loads(body)["code"], "connection" in headers) == (status, code, False)
    await raw.close()


async def test_an_error_is_not_left_to_the_collector(serve: Serve) -> None:
    """With the answer sent, the work and its body are gone."""
    desk = Desk()
    _, raw = await _asked(serve, desk, b"1")
    await until(lambda: bool(desk.waiting))
    gc.disable()
    try:
        desk.waiting[0].set_result(Unavailable("flush_behind", "later"))
        assert (await raw.answer())[0] == 503
        work = weakref.ref(desk.waiting.pop())
        assert work() is None
    finally:
        gc.enable()
    await raw.close()


async def test_work_that_is_cancelled_is_answered(serve: Serve) -> None:
    """A future that is cancelled (a part stops) tells the client that, rather than nothing."""
    desk = Desk()
    _, raw = await _asked(serve, desk, b"1")
    await until(lambda: bool(desk.waiting))
    desk.waiting[0].cancel()
    status, _, body = await raw.answer()
    assert (status, json.loads(body)["code"]) == (503, "shutting_down")
    await raw.close()


async def test_a_client_that_left_is_no_error(serve: Serve) -> None:
    """Its answer is made and goes nowhere; the server serves on."""
    desk = Desk()
    server, raw = await _asked(serve, desk, b"1")
    await until(lambda: bool(desk.waiting))
    await raw.close()
    await until(lambda: server.connections == 0)
    desk.waiting[0].set_result(b"one")
    await until(lambda: server.requests[200] == 2)


async def test_a_server_that_stops_answers_first(serve: Serve) -> None:
    """Stopping waits for prompt answers under way, and then closes their connections."""
    desk = Desk()
    server, raw = await _asked(serve, desk, b"1")
    await until(lambda: bool(desk.waiting))
    stopping = asyncio.create_task(server.stop(5))
    await until(lambda: server.draining)
    desk.waiting[0].set_result(b"one")
    _, headers, body = await raw.answer()
    assert (body, headers["connection"]) == (b"prompt one", "close")
    await stopping
    assert await raw.rest() == b""
    await raw.close()


async def test_an_idle_connection_of_prompt_answers_is_closed(serve: Serve) -> None:
    """The idle time counts for connections that never had a usual request, too."""
    desk = Desk()
    raw = await Raw.open(await serve([desk.route], Bounds(idle_seconds=0.2)))
    await asyncio.sleep(0)
    await raw.send(post(b"1"))
    await until(lambda: bool(desk.waiting))
    desk.waiting[0].set_result(b"one")
    assert (await raw.answer())[2] == b"prompt one"
    assert await raw.rest() == b""
    await raw.close()


@pytest.mark.parametrize("step", [0.1 / 64, 75 / 64, 3600.0])
def test_an_end_of_a_step_is_its_own(step: float) -> None:
    """An idle time that is moved to the end of its step each time it is looked at does end."""
    for number in range(1, 20_000):
        time = 12_345.678 + number * 0.731
        end = connection_module.end_of_step(time, step)
        assert -1e-5 * step <= end - time <= step
        assert connection_module.end_of_step(end, step) == end


async def test_idle_connections_share_their_timers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are idle from about the same moment on end in one turn of the loop, and none has a timer before."""
    ends: list[float] = []
    real = connection_module.Connection._idle_from_now

    def noted(self: connection_module.Connection) -> None:
        assert self._keepalive_handle is None
        real(self)
        timer = cast(asyncio.TimerHandle, self._keepalive_handle)  # uvloop's own is no subclass
        ends.append(round(timer.when(), 1))  # uvloop works it out anew, to a millisecond

    monkeypatch.setattr(connection_module.Connection, "_idle_from_now", noted)
    desk, idle = Desk(), 64 * 3600
    server = await serve([desk.route], Bounds(idle_seconds=idle))
    for number in range(4):
        raw = await Raw.open(server)
        await raw.send(post(b"%d" % number))
        await until(lambda: bool(desk.waiting))
        desk.waiting.pop().set_result(b"one")
        await raw.answer()
        await raw.close()
    now = asyncio.get_running_loop().time()
    assert len(ends) == 4 and len(set(ends)) == 1
    assert idle - 5 <= ends[0] - now <= idle * (1 + 1 / 64)


async def test_idle_connections_of_usual_answers_share_them_too(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first look on that comes too early: aiohttp's own timer is of the moment of its answer."""
    made: list[connection_module.Connection] = []
    real = connection_module.Connection.connection_made

    def noted(self: connection_module.Connection, transport: asyncio.BaseTransport) -> None:
        real(self, transport)
        made.append(self)

    monkeypatch.setattr(connection_module.Connection, "connection_made", noted)
    server = await serve([Desk().route], Bounds(idle_seconds=64 * 3600))
    ends = set()
    for _ in range(3):
        raw = await Raw.open(server)
        await raw.send(post(b"usual"))
        assert (await raw.answer())[0] == 200
        await until(lambda: made[-1]._keepalive_handle is not None)
        made[-1]._process_keepalive()
        ends.add(cast(asyncio.TimerHandle, made[-1]._keepalive_handle).when())
        await raw.close()
    assert len(ends) == 1


async def test_much_that_waits_stops_the_reading(serve: Serve) -> None:
    """A client that goes on sending before its answer is not read without bound, and nothing of it is lost."""
    desk = Desk()
    _, raw = await _asked(serve, desk, b"1")
    await until(lambda: bool(desk.waiting))
    many = 3_000
    sending = asyncio.create_task(raw.send(post(b"usual" + bytes(5_000)) * many))
    await asyncio.sleep(0.2)
    assert not sending.done()
    desk.waiting[0].set_result(b"one")
    assert (await raw.answer())[2] == b"prompt one"
    for _ in range(many):
        assert (await raw.answer())[0] == 200
    await sending
    await raw.close()


@pytest.mark.parametrize("late", [0, 1, 2, MAX_MSG_QUEUE_SIZE + 1])
async def test_bodies_that_come_later_hold_up_nothing(serve: Serve, late: int) -> None:
    """Requests that were begun before their bodies had come leave as much room for those sent behind one another."""
    desk, many = Desk(), 3 * MAX_MSG_QUEUE_SIZE
    _, raw = await _asked(serve, desk)

    async def begin() -> None:
        before = desk.begun
        await raw.send(post(b"usual")[:-5])
        await until(lambda: desk.begun == before + 1)

    async def answered(times: int) -> None:
        async with asyncio.timeout(10):
            for _ in range(times):
                assert (await raw.answer())[2] == b"usual usual"

    for _ in range(late):
        await begin()
        await raw.send(b"usual")
        await answered(1)
    await raw.send(post(b"usual") * many)
    await answered(many)
    await begin()
    await raw.send(b"usual" + post(b"usual") * many)
    await answered(1 + many)
    await raw.close()


async def test_who_may_not_call_is_told_the_usual_way(serve: Serve) -> None:
    """A gate that has to ask, or refuses, is asked the usual way."""

    class Asks(OpenGate):
        def known(self, request: object, scope: object) -> Principal | None:  # type: ignore[override]
            return None

        async def admit(self, request: object, scope: object) -> Principal:
            return OpenGate().known(request, scope)

    desk = Desk()
    raw = await Raw.open(await serve([desk.route], gate=Asks()))
    for _ in range(2):
        await raw.send(post(b"1"))
        assert (await raw.answer())[2] == b"usual 1"
    await raw.close()


async def test_the_first_request_of_a_connection_is_prompt(serve: Serve) -> None:
    """Also when it is there before aiohttp's own task has begun to wait for one; and what follows is answered."""
    desk = Desk()
    server = await serve([desk.route])
    for _ in range(5):
        raw = await Raw.open(server)
        await raw.send(post(b"1"))
        await until(lambda: bool(desk.waiting))
        desk.waiting.pop().set_result(b"one")
        assert (await raw.answer())[2] == b"prompt one"
        await raw.send(post(b"usual"))
        assert (await raw.answer())[2] == b"usual usual"
        await raw.close()


async def test_buffers_are_sent_as_they_are(serve: Serve) -> None:
    """A body in several buffers arrives whole."""
    desk = Desk()
    _, raw = await _asked(serve, desk, b"1")
    await until(lambda: bool(desk.waiting))
    desk.waiting[0].set_result([b"a" * 100_000, b"", memoryview(b"b")])
    assert (await raw.answer())[2] == b"a" * 100_000 + b"b"
    await raw.close()


async def test_a_long_poll_ends_with_its_client(serve: Serve) -> None:
    """Its work is cancelled and it counts as no answer."""
    desk = Desk(waits=True)
    server, raw = await _asked(serve, desk, b"1")
    await until(lambda: bool(desk.waiting))
    await raw.close()
    await until(desk.waiting[0].cancelled)
    await until(lambda: server.connections == 0)
    assert (dict(server.requests), desk.lost) == ({200: 1}, 0)
    await server.stop(5)


async def test_an_answer_that_nobody_takes_is_lost(serve: Serve) -> None:
    """The result of a long poll that comes when the connection is closing is given back."""
    desk = Desk(waits=True)
    server, raw = await _asked(serve, desk, b"1")
    await until(lambda: bool(desk.waiting))
    desk.waiting[0].add_done_callback(lambda _: None)
    for connection in server._server._connections:  # type: ignore[union-attr]
        connection.transport.close()  # type: ignore[union-attr]
    desk.waiting[0].set_result(b"one")
    await until(lambda: desk.lost == 1)
    await raw.close()


async def test_a_server_that_stops_ends_long_polls(serve: Serve) -> None:
    """At once, with 503, and without waiting for its time to drain."""
    desk = Desk(waits=True)
    server, raw = await _asked(serve, desk, b"1")
    await until(lambda: bool(desk.waiting))
    async with asyncio.timeout(5):
        stopping = asyncio.create_task(server.stop(3_600))
        status, headers, body = await raw.answer()
        assert (status, json.loads(body)["code"], headers["connection"]) == (503, "shutting_down", "close")
        await raw.close()
        await stopping


async def test_the_idle_time_of_a_long_poll_begins_with_its_answer(serve: Serve) -> None:
    """The wait does not count, however long."""
    idle = 0.4
    desk = Desk(waits=True)
    raw = await Raw.open(await serve([desk.route], Bounds(idle_seconds=idle)))
    await raw.send(post(b"1"))
    await until(lambda: bool(desk.waiting))
    await asyncio.sleep(1.25 * idle)
    answered = asyncio.get_running_loop().time()
    desk.waiting.pop().set_result(b"one")
    assert (await raw.answer())[2] == b"prompt one"
    assert await raw.rest() == b""
    assert asyncio.get_running_loop().time() - answered > idle - 0.01  # uvloop counts milliseconds
    await raw.close()
