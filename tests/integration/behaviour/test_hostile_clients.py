"""Clients that are slow, many, or gone: each meets its bound, the others are served, nothing is half done."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import pytest
from integration.behaviour.world import Http, bodies, fresh, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
SOON_SECONDS = 15.0


class Wire:
    """Raw connections to a listener, closed at the end."""

    def __init__(self, url: str, ends: AsyncExitStack) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._where = host, int(port)
        self._ends = ends

    async def connect(self) -> Streams:
        reader, writer = await asyncio.open_connection(*self._where)
        self._ends.callback(writer.close)
        return reader, writer


@pytest.fixture
async def wire(http: Http) -> Wire:
    return Wire(http.url, AsyncExitStack())


@pytest.fixture
async def strict(strict_url: str, session: aiohttp.ClientSession) -> Http:
    return Http(strict_url, session)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All until the other side closes."""
    async with asyncio.timeout(SOON_SECONDS):
        return await reader.read()


async def answered(reader: asyncio.StreamReader) -> bytes:
    """One answer: head and body."""
    async with asyncio.timeout(SOON_SECONDS):
        lines = await reader.readuntil(b"\r\n\r\n")
        size = int(lines.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return lines + await reader.readexactly(size)


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


async def test_a_slow_head_is_told_and_closed(strict: Http) -> None:
    """A head that does not end within its second: 408, and the connection with it. Others are served."""
    async with AsyncExitStack() as ends:
        reader, writer = await Wire(strict.url, ends).connect()
        writer.write(b"GET /healthz HTTP/1.1\r\nHost:")
        assert (await strict.get("/healthz")).status == 200
        answer = await rest(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


async def test_a_slow_body_is_told_and_appends_nothing(strict: Http) -> None:
    """A declared body of which only some comes: 408, nothing half done."""
    name = fresh("slow")
    await strict.make(name)
    async with AsyncExitStack() as ends:
        reader, writer = await Wire(strict.url, ends).connect()
        path = f"/v1/topics/{name}/messages"
        writer.write(head("POST", path, "Content-Type: application/json", "Content-Length: 1000"))
        writer.write(b'{"messages":[{"body":"a"}')
        answer = await answered(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    assert await strict.ends(name) == [0]


async def test_too_many_connections(strict: Http) -> None:
    """Beyond the bound 503 with a reason and Retry-After; whoever was there goes on; a freed place is free."""
    async with AsyncExitStack() as ends:
        wire = Wire(strict.url, ends)
        kept = [await wire.connect() for _ in range(20)]
        reader, writer = kept[0]
        writer.write(head("GET", "/healthz"))
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), SOON_SECONDS)).startswith(b"HTTP/1.1 200 ")
        refused, asks = await wire.connect()
        asks.write(head("GET", "/healthz"))
        answer = await rest(refused)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"too_many_connections"' in answer
    assert b"retry-after:" in answer.lower()

    async def free() -> bool:
        try:
            return (await strict.get("/healthz")).status == 200
        except aiohttp.ClientError:
            return False

    await until(free)


async def test_a_client_that_goes_in_the_middle_of_a_body(http: Http, topic: str) -> None:
    """Half a request is no message, whichever way it was framed."""
    path = f"/v1/topics/{topic}/messages"
    async with AsyncExitStack() as ends:
        wire = Wire(http.url, ends)
        for framing, begun in (
            ("Content-Length: 1000", b'{"messages":[{"body":"a"}]}'),
            ("Transfer-Encoding: chunked", b'1b\r\n{"messages":[{"body":"a"}]}\r\n'),
        ):
            _, writer = await wire.connect()
            writer.write(head("POST", path, "Content-Type: application/json", framing) + begun)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    await http.sent(topic, "after")
    assert bodies(await http.messages(topic)) == ["after"]


async def test_a_client_that_does_not_wait_for_its_answer(http: Http, topic: str) -> None:
    """A whole request is carried out although nobody reads the answer: each body stands once or not at all."""
    sent = b'{"messages":[{"body":"%d"}]}'
    async with AsyncExitStack() as ends:
        wire = Wire(http.url, ends)
        for number in range(20):
            body = sent % number
            _, writer = await wire.connect()
            lines = ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            writer.write(head("POST", f"/v1/topics/{topic}/messages", *lines) + body)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def all_there() -> bool:
        return await http.ends(topic) == [20]

    await until(all_there)
    assert sorted(bodies(await http.messages(topic)), key=int) == [f"{n}" for n in range(20)]


async def test_clients_that_go_in_the_middle_of_a_long_poll(http: Http, topic: str) -> None:
    """Fifty who waited are gone: what comes next goes to who is there, as its first attempt."""
    path = f"/v1/topics/{topic}/groups/g/messages/receive"
    body = b'{"max_messages":10,"wait_ms":30000,"lease_ms":600000}'
    await http.leased(topic, "g")
    async with AsyncExitStack() as ends:
        wire = Wire(http.url, ends)
        for _ in range(50):
            _, writer = await wire.connect()
            lines = ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            writer.write(head("POST", path, *lines) + body)
            await writer.drain()
    stays = asyncio.ensure_future(http.leased(topic, "g", wait_ms=30_000))
    await http.sent(topic, "a")
    async with asyncio.timeout(SOON_SECONDS):
        [one] = await stays
    assert (one["body"], one["delivery_attempt"]) == ("a", 1)


async def test_garbage_is_answered(http: Http) -> None:
    """What is no HTTP is told so with a problem; two requests in one write are both answered."""
    async with AsyncExitStack() as ends:
        wire = Wire(http.url, ends)
        reader, writer = await wire.connect()
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
        answer = await rest(reader)
        assert b" 400 " in answer.splitlines()[0]
        assert b"application/problem+json" in answer
        reader, writer = await wire.connect()
        writer.write(head("GET", "/healthz") + head("GET", "/healthz", "Connection: close"))
        assert (await rest(reader)).count(b"HTTP/1.1 200 ") == 2


async def test_a_head_that_is_too_long(http: Http) -> None:
    """431, over the real process."""
    answer = await http.call("GET", "/healthz", headers={f"X-{n}": "x" * 1_000 for n in range(20)})
    answer.refused(431, "headers_too_large")
