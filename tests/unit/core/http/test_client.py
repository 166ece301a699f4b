"""The client of internal calls against a peer of raw bytes: what is an answer, and which connection is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pyarrow as pa
import pytest

from millpond.core.http.client import CONNECTIONS_PER_PEER, Answer, HttpClient
from millpond.core.http.wire import CannotConnect
from millpond.core.limits import CLIENT_HEAD_BYTES

MOST = 4 << 20
Behave = Callable[["Peer", asyncio.StreamWriter, bytes], Awaitable[None]]


def answer_of(body: bytes, *fields: str, status: int = 200) -> bytes:
    lines = [f"HTTP/1.1 {status} Fine", "Content-Type: text/plain; charset=utf-8", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *fields, "", ""]).encode() + body


class Peer:
    """Reads requests and lets `behave` answer; counts connections and requests."""

    def __init__(self) -> None:
        self.behave: Behave = Peer.echo
        self.connections = self.requests = self.open = self.most_open = 0
        self.ended = asyncio.Event()
        self.server: asyncio.Server
        self.url = ""

    async def echo(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(answer_of(body))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.requests += 1
                await self.behave(self, writer, body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
        finally:
            self.open -= 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    one = Peer()
    one.server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{one.server.sockets[0].getsockname()[1]}/call"
    yield one
    one.server.close()


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    one = HttpClient()
    yield one
    await one.close()


async def post(client: HttpClient, peer: Peer, body: bytes = b"asked", most: int = MOST) -> Answer:
    return await client.post(peer.url, [body], {"Some": "header"}, 10.0, most)


async def test_one_connection_for_calls_in_turn(client: HttpClient, peer: Peer) -> None:
    """A connection is kept for the next call; segments arrive joined."""
    for number in range(3):
        segments = [b"a" * number, pa.py_buffer(b"buffer"), b""]
        answer = await client.post(peer.url, segments, {}, 10.0, MOST)
        assert answer == (200, "text/plain", b"a" * number + b"buffer")
    assert (peer.connections, peer.requests) == (1, 3)


async def test_answer_byte_by_byte(client: HttpClient, peer: Peer) -> None:
    """Head and body may come in any pieces."""

    async def drip(_peer: Peer, writer: asyncio.StreamWriter, body: bytes) -> None:
        for byte in answer_of(body):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    peer.behave = drip
    assert (await post(client, peer)).body == b"asked"
    peer.behave = Peer.echo
    assert (await post(client, peer, b"again")).body == b"again"
    assert peer.connections == 1


@pytest.mark.parametrize("size", [0, 1, CLIENT_HEAD_BYTES - 99, CLIENT_HEAD_BYTES, CLIENT_HEAD_BYTES + 1, 3 << 20])
async def test_sizes(client: HttpClient, peer: Peer, size: int) -> None:
    """Answers around the size of what is read at once, and much larger, arrive whole, and so does the next one."""
    body = bytes(range(256)) * (size // 256 + 1)
    for _ in range(2):
        assert bytes((await post(client, peer, body[:size])).body) == body[:size]
    assert peer.connections == 1


async def test_answers_do_not_share_memory(client: HttpClient, peer: Peer) -> None:
    """What one call answered is not written over by the next one, small or large."""
    for size in (10, 1 << 20):
        first = await post(client, peer, b"a" * size)
        await post(client, peer, b"b" * size)
        assert bytes(first.body) == b"a" * size


@pytest.mark.parametrize(
    "said",
    [
        b"hello\r\n\r\n",
        b"HTTP/1.1 200 Fine\r\n\r\n",
        b"HTTP/1.1 200 Fine\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 Fine\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 Fine\r\n" + b"X: y\r\n" * CLIENT_HEAD_BYTES,
    ],
)
async def test_what_is_no_answer(client: HttpClient, peer: Peer, said: bytes) -> None:
    """What is not HTTP as a part sends it is refused, and its connection used no more."""

    async def say(_peer: Peer, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(said)

    peer.behave = say
    with pytest.raises(ValueError, match="answer"):
        await post(client, peer)
    peer.behave = Peer.echo
    assert (await post(client, peer)).body == b"asked"
    assert peer.connections == 2


async def test_too_large_an_answer(client: HttpClient, peer: Peer) -> None:
    """An answer's declared size is bounded before any of it is taken."""
    with pytest.raises(ValueError, match="at most 4"):
        await post(client, peer, b"asked", most=4)
    await peer.ended.wait()


async def test_connection_that_ends_first(client: HttpClient, peer: Peer) -> None:
    """A request whose connection ends is never sent again: nobody knows whether it was done."""

    async def leave(_peer: Peer, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.write(answer_of(b"whole")[:-1])
        writer.close()

    peer.behave = leave
    with pytest.raises(ConnectionError):
        await post(client, peer)
    assert peer.requests == 1


async def test_kept_connection_that_ends_first(client: HttpClient, peer: Peer) -> None:
    """Nor is one sent again over another connection whose kept connection ends without a byte of an answer."""
    await post(client, peer)

    async def leave(_peer: Peer, writer: asyncio.StreamWriter, _body: bytes) -> None:
        writer.close()

    peer.behave = leave
    with pytest.raises(ConnectionError):
        await post(client, peer)
    assert (peer.connections, peer.requests) == (1, 2)


async def test_connection_that_ended_while_idle(client: HttpClient, peer: Peer) -> None:
    """The next call takes another one."""

    async def part(_peer: Peer, writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(answer_of(body, "Connection: close"))
        writer.close()

    peer.behave = part
    for _ in range(2):
        assert (await post(client, peer)).body == b"asked"
    assert peer.connections == 2


async def test_cancelled_call(client: HttpClient, peer: Peer) -> None:
    """Its connection ends with it, so that its answer cannot be taken for another call's."""
    asked = asyncio.Event()

    async def wait(_peer: Peer, writer: asyncio.StreamWriter, body: bytes) -> None:
        asked.set()

    peer.behave = wait
    call = asyncio.create_task(post(client, peer, b"first"))
    await asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await peer.ended.wait()
    peer.behave = Peer.echo
    assert (await post(client, peer, b"second")).body == b"second"


async def test_no_answer_in_time(client: HttpClient, peer: Peer) -> None:
    """The call's own time bounds all of it."""

    async def wait(_peer: Peer, writer: asyncio.StreamWriter, body: bytes) -> None:
        pass

    await post(client, peer)  # connected: 10 ms may be too short for that
    peer.behave = wait
    with pytest.raises(TimeoutError):
        await client.post(peer.url, [b"x"], {}, 0.01, MOST)
    await peer.ended.wait()


async def test_connections_are_bounded(client: HttpClient, peer: Peer) -> None:
    """More calls than connections wait for their turn."""
    calls = CONNECTIONS_PER_PEER + 20
    answers = await asyncio.gather(*(post(client, peer, b"%d" % number) for number in range(calls)))
    assert [answer.body for answer in answers] == [b"%d" % number for number in range(calls)]
    assert peer.most_open <= CONNECTIONS_PER_PEER


async def test_nobody_there(client: HttpClient, peer: Peer) -> None:
    """A refused connection is told from one that ended: nothing was sent."""
    peer.server.close()
    await peer.server.wait_closed()
    with pytest.raises(CannotConnect):
        await post(client, peer)


async def test_closed_client(client: HttpClient, peer: Peer) -> None:
    """A closed client sends nothing."""
    await client.close()
    with pytest.raises(CannotConnect):
        await post(client, peer)
    assert not peer.requests
