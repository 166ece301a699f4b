"""Calls of a connection: what is tried again, what is not, and which errors come out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from millpond.client.connection import Connection, path_of
from millpond.client.errors import Closed, GatewayProblem, UnknownProblem, Unreachable, from_problem
from millpond.core.errors import BadRequest, NotFound, OffsetExpired, Unavailable

from .conftest import FakeService, Steady, problem


async def test_problem_becomes_its_error(service: FakeService, connection: Connection) -> None:
    """A problem is raised as the error of its code, with what it carries beside the standard members."""
    service.faults.append(lambda _: problem(404, "topic_not_found", "no topic 'x'"))
    with pytest.raises(NotFound, match="no topic") as caught:
        await connection.get("/v1/topics/x")
    assert caught.value.extra["request_id"] == "r1"


def test_from_problem() -> None:
    """Fields and extras survive; what is no problem of ours is told apart, and 502 to 504 are worth another try."""
    body = {"code": "invalid_request", "detail": "d", "errors": [{"field": "a", "expected": "b", "got": "c"}]}
    error = from_problem(400, body)
    assert isinstance(error, BadRequest)
    assert (error.fields[0].field, error.fields[0].expected) == ("a", "b")
    error = from_problem(410, {"code": "offset_expired", "detail": "d", "start_offset": 7})
    assert isinstance(error, OffsetExpired)
    assert error.extra == {"start_offset": 7}
    assert type(from_problem(400, None)) is UnknownProblem
    assert not from_problem(500, {"code": "of_a_later_release"}).retryable
    assert isinstance(from_problem(502, None), GatewayProblem)
    assert from_problem(503, "text").retryable


async def test_get_is_repeated_and_post_is_not(service: FakeService, connection: Connection) -> None:
    """What is retryable is repeated where that cannot do a thing twice."""
    service.faults.append(lambda _: problem(503, "store_unavailable", "away"))
    await connection.get("/v1/topics/t/queues")
    service.faults.append(lambda _: problem(503, "store_unavailable", "away"))
    with pytest.raises(Unavailable):
        await connection.json("POST", "/v1/topics/t/groups/g/messages/ack", {})
    service.faults.append(lambda _: problem(503, "store_unavailable", "away"))
    await connection.json("POST", "/v1/topics/t/groups/g/messages/ack", {}, repeatable=True)
    assert [asked.method for asked in service.requests] == ["GET", "GET", "POST", "POST", "POST"]


@asynccontextmanager
async def speaking(*answers: bytes) -> AsyncIterator[Connection]:
    """A connection without retries to a listener that gives `answers` and leaves with the request after them."""
    tasks: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in answers:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Connection(url, retry_seconds=0) as connection:
        yield connection
    server.close()
    await asyncio.gather(*(task for task in tasks if task is not None))


async def test_kept_connection_that_ended() -> None:
    """That the service closed a kept connection is no error of a repeatable call, even without retries."""
    async with speaking(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as connection:
        for _ in range(3):
            assert await connection.get("/v1/topics") == {}
        with pytest.raises(Unreachable, match="closed"):
            await connection.call("POST", "/v1/topics/t/groups/g/messages/receive", b"{}")


async def test_not_http_is_unreachable() -> None:
    """Whatever answers there without speaking HTTP is not the service."""
    async with speaking(b"SSH-2.0-x\r\n\r\n") as connection:
        with pytest.raises(Unreachable, match="not HTTP"):
            await connection.get("/v1/topics")


async def test_too_many_requests_is_always_repeated(service: FakeService, connection: Connection) -> None:
    """429 says that nothing was done, so any call may be repeated."""
    service.faults.append(lambda _: problem(429, "too_many_requests", "slow down"))
    await connection.json("POST", "/v1/topics/t/groups/g/messages/ack", {})
    assert len(service.requests) == 2


async def test_refusals_are_not_repeated(service: FakeService, connection: Connection) -> None:
    """A refusal is final."""
    service.faults.append(lambda _: problem(400, "invalid_request", "no"))
    with pytest.raises(BadRequest):
        await connection.get("/v1/topics/t/queues")
    assert len(service.requests) == 1


async def test_retry_after_is_honoured(service: FakeService) -> None:
    """When the service asks for more patience than the caller has, the error comes out at once."""
    async with Connection(service.url, random=Steady(), retry_seconds=5) as connection:
        service.faults.append(lambda _: problem(503, "flush_behind", "wait", **{"Retry-After": "30"}))
        with pytest.raises(Unavailable) as caught:
            await connection.get("/v1/topics/t/queues")
    assert caught.value.extra["retry_after"] == 30
    assert len(service.requests) == 1


async def test_unreachable() -> None:
    """Nobody there is `Unreachable`, naming the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with Connection(f"http://127.0.0.1:{port}", retry_seconds=0) as connection:
        with pytest.raises(Unreachable, match=str(port)):
            await connection.get("/v1/topics")


async def test_no_answer_in_time(service: FakeService) -> None:
    """An answer that does not come is `Unreachable` after the timeout, not a wait for ever."""
    async with Connection(service.url, retry_seconds=0, timeout_seconds=0.05) as connection:
        with pytest.raises(Unreachable, match="in time"):
            await connection.call("POST", "/v1/topics/t/groups/g/messages/receive", b"{}")


async def test_not_json_is_unknown(service: FakeService, connection: Connection) -> None:
    """An answer that is not as the API has it is an error of its own, not a crash of the decoder."""
    service.faults.append(lambda _: web.Response(text="<html>"))
    with pytest.raises(UnknownProblem):
        await connection.get("/v1/topics/t/queues")


async def test_key_and_url_from_environment(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """MILLPOND_URL names the service where no argument does."""
    monkeypatch.setenv("MILLPOND_URL", service.url + "/")
    async with Connection() as connection:
        assert connection.url == service.url
        await connection.get("/v1/topics/t/queues")


async def test_closed(service: FakeService) -> None:
    """A closed connection says so."""
    connection = Connection(service.url)
    await connection.close()
    with pytest.raises(Closed):
        await connection.get("/v1/topics/t/queues")


def test_paths_are_encoded() -> None:
    """A name cannot leave its place in the path."""
    assert path_of("topics", "a/../b c", 3) == "/v1/topics/a%2F..%2Fb%20c/3"
