"""An answer written in one piece says what aiohttp's own would say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pyarrow as pa
import pytest
from aiohttp import web

from millpond.core.http.whole import pieces, whole

BODY = b'{"results":[]}'
LARGE = bytes(range(256)) * 40_000  # more than a socket takes at once


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path == "/pieces":
            third = len(LARGE) // 3
            parts = [LARGE[:third], pa.py_buffer(LARGE).slice(third, third), memoryview(LARGE)[2 * third :]]
            return pieces(request, parts, "application/octet-stream")
        return whole(request, BODY)

    server = web.Server(handle)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    yield listener.sockets[0].getsockname()[1]
    listener.close()
    await server.shutdown()


async def talk(port: int, requests: bytes) -> bytes:
    """Everything that comes back until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(requests)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    return answer


def parsed(answer: bytes) -> tuple[bytes, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    pairs = (line.decode().partition(": ") for line in lines)
    return status, {name.lower(): value for name, _, value in pairs}, body


async def test_the_answer_is_whole_and_closes_when_asked(port: int) -> None:
    """Status, length, type and date are there; a client that wants to close is told so, and it is closed."""
    status, headers, body = parsed(await talk(port, b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert (status, body) == (b"HTTP/1.1 200 OK", BODY)
    assert headers["content-length"] == str(len(BODY))
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["date"].endswith("GMT")


async def test_a_connection_is_kept_between_answers(port: int) -> None:
    """Two requests sent at once get two answers, in order, on one connection."""
    one = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
    last = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    answers = await talk(port, one + last)
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.count(BODY) == 2
    assert answers.count(b"Connection: close") == 1


async def test_http_1_0_gets_its_own_version(port: int) -> None:
    """An older client is answered the usual way."""
    status, _, body = parsed(await talk(port, b"POST / HTTP/1.0\r\nHost: x\r\n\r\n"))
    assert (status, body) == (b"HTTP/1.0 200 OK", BODY)


async def test_head_has_no_body(port: int) -> None:
    """A HEAD request gets the head alone."""
    _, headers, body = parsed(await talk(port, b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert body == b""
    assert headers["connection"] == "close"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_pieces_arrive_as_one_body(port: int, version: bytes) -> None:
    """Bytes, Arrow buffers and views follow each other, under the sum of their lengths, in either version."""
    status, headers, body = parsed(
        await talk(port, b"GET /pieces HTTP/" + version + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
    )
    assert status == b"HTTP/" + version + b" 200 OK"
    assert headers["content-length"] == str(len(LARGE))
    assert headers["content-type"] == "application/octet-stream"
    assert body == LARGE


async def test_a_connection_is_kept_after_pieces(port: int) -> None:
    """The answer after one in pieces follows its last byte."""
    first = b"GET /pieces HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    answers = await talk(port, first + last)
    _, _, rest = answers.partition(LARGE)
    assert parsed(rest)[2] == BODY
