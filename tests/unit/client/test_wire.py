"""HTTP as the SDK's own connections speak it: how answers come, and when a connection is used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pyarrow as pa
import pytest

from millpond.client.wire import BadAnswer, NotConnected, Received, Wires
from millpond.core import limits
from millpond.core.clock import SystemClock

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[Wires]:
    """Wires to a listener that does `serve` for each connection."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    wires = Wires(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", SystemClock(), "Bearer k")
    try:
        yield wires
    finally:
        await wires.close()
        server.close()


def saying(*answers: bytes, apart: bool = False) -> Serve:
    """Each request gets the next of `answers`, byte by byte when `apart`; then the connection ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            for at in range(len(answer)) if apart else [0]:
                writer.write(answer[at : at + 1] if apart else answer)
                await writer.drain()
                await asyncio.sleep(0)

    return serve


async def get(wires: Wires) -> Received:
    return await wires.ask("GET", "/a", {}, [], 5)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: 1\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nx-a:1\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (
            b"HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nT: 1\r\n\r\n",
            b"hello",
        ),
        (b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n", b""),
    ],
    ids=["length", "continue", "chunked", "to the end", "empty"],
)  # fmt: skip
async def test_every_way_a_body_comes(answer: bytes, body: bytes, apart: bool) -> None:
    """A body of known length, in chunks, or up to the end of the connection is the same body, however it is cut."""
    async with serving(saying(answer, apart=apart)) as wires:
        received = await get(wires)
    assert (received.status, received.body, received.headers["x-a"]) == (204 if not body else 200, body, "1")


async def test_large_body_is_received_into_its_own_buffer() -> None:
    """A body larger than the head's buffer comes as one pa.Buffer."""
    body = bytes(range(256)) * 4096
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with serving(saying(head + body, head + body)) as wires:
        for _ in range(2):
            received = await get(wires)
            assert isinstance(received.body, pa.Buffer)
            assert received.body.to_pybytes() == body


async def test_request_as_sent() -> None:
    """Head and buffers of the body arrive in order, with the length of all of them."""
    seen: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(7))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with serving(serve) as wires:
        await wires.ask("POST", "/a?b=c", {"X-K": "ü"}, [b"abc", memoryview(b"de"), pa.py_buffer(b"fg")], 5)
    head, _, body = (await seen).partition(b"\r\n\r\n")
    first, host, *others = head.decode().split("\r\n")
    assert first == "POST /a?b=c HTTP/1.1"
    assert host.startswith("Host: 127.0.0.1:")
    assert others == ["Authorization: Bearer k", "X-K: ü", "Content-Length: 7"]
    assert body == b"abcdefg"


async def test_connections_are_used_again() -> None:
    """Requests one after another share a connection; one that its service closed is not used again."""
    made = 0
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        await saying(answer, answer, answer.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))(reader, writer)

    async with serving(serve) as wires:
        for _ in range(3):
            await get(wires)
        assert made == 1
        await get(wires)
        assert made == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * limits.CLIENT_HEAD_BYTES,
    ],
)
async def test_what_is_not_http(answer: bytes) -> None:
    """An answer that makes no sense, or claims too much, is an error of the connection."""
    async with serving(saying(answer)) as wires:
        with pytest.raises(BadAnswer):
            await get(wires)


async def test_answer_cut_short() -> None:
    """A connection that ends within an answer is an error, never a shorter body."""
    async with serving(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nab")) as wires:
        with pytest.raises(ConnectionResetError):
            await get(wires)


async def test_refusal_before_the_body_was_taken() -> None:
    """An answer that comes while the body is still being sent is the answer; the connection is not used again."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await asyncio.Event().wait()

    async with serving(serve) as wires:
        received = await wires.ask("POST", "/", {}, [bytes(64 * 2**20)], 5)
        assert received.status == 413
        again = asyncio.create_task(wires.ask("POST", "/", {}, [b""], 5))
        assert (await again).status == 413


async def test_no_answer_and_cancelled_calls_end_their_connection() -> None:
    """After a timeout or a cancelled call, what may still come is nobody's: another connection is made."""
    asked = asyncio.Event()
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()

    async with serving(serve) as wires:
        with pytest.raises(TimeoutError):
            await wires.ask("GET", "/", {}, [], 0.01)
        call = asyncio.create_task(get(wires))
        asked.clear()
        await asked.wait()
        call.cancel()
        await asyncio.wait([call])
        asked.clear()
        call = asyncio.create_task(get(wires))
        await asked.wait()
        assert made == 3
        call.cancel()
        await asyncio.wait([call])


async def test_headers_cannot_be_smuggled() -> None:
    """A value with a line end is refused before anything is sent."""
    with pytest.raises(ValueError, match="line"):
        Wires("http://h", SystemClock(), "Bearer k\r\nX: y")
    async with serving(saying()) as wires:
        with pytest.raises(ValueError, match="line"):
            await wires.ask("GET", "/", {"X": "a\r\nB: c"}, [], 5)


async def test_nobody_there() -> None:
    """No connection is told apart: the request certainly did not arrive."""
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    wires = Wires(f"http://127.0.0.1:{port}", SystemClock())
    with pytest.raises(NotConnected):
        await get(wires)
    with pytest.raises(ValueError, match="address"):
        Wires("nowhere", SystemClock())
