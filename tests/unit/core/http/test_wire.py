"""HTTP as our own connections speak it: how a request goes and how answers come."""

from __future__ import annotations

import asyncio
from typing import cast

import pyarrow as pa
import pytest

from millpond.core.clock import SystemClock
from millpond.core.gathered import Buffer
from millpond.core.http.heard import head_of
from millpond.core.http.wire import NO_BODY, BadAnswer, Buffers, Wires
from millpond.core.limits import CLIENT_HEAD_BYTES

from .listening import BOUNDS, CHUNKED, EMPTY, HELLO, listening, repeating, saying, stay


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: 1\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200\r\nX-A: 1\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nx-a:1\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (
            b"HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nT: 1\r\n\r\n",
            b"hello",
        ),
        (b"HTTP/1.1 200 OK\r\nX-A: 1\r\nConnection: close\r\n\r\nhello", b"hello"),
        (b"HTTP/1.0 200 OK\r\nX-A: 1\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n", b""),
    ],
    ids=["length", "length 0", "continue", "chunked", "to the end", "of 1.0", "no content"],
)  # fmt: skip
async def test_every_way_a_body_comes(answer: bytes, body: bytes, apart: bool) -> None:
    """A body of known length, in chunks, or up to the end of the connection is the same body, however it is cut."""
    async with listening(saying(answer, apart=apart)) as listener:
        received = await listener.get()
    assert (received.status // 100, received.body, received.headers["x-a"]) == (2, body, "1")


async def test_short_head_after_a_long_one() -> None:
    """Where the last head ended says nothing of where the next one does."""
    long = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-A: %s\r\n\r\n" % (b"x" * 100)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await saying(long, apart=True)(reader, writer)
        await saying(EMPTY)(reader, writer)

    async with listening(serve) as listener:
        assert "x-a" in (await listener.get()).headers
        assert "x-a" not in (await listener.get()).headers


async def test_large_body_is_received_into_its_own_buffer() -> None:
    """A body larger than the head's buffer comes as one pa.Buffer."""
    body = bytes(range(256)) * 4096
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with listening(repeating(head + body)) as listener:
        for _ in range(2):
            received = await listener.get()
            assert isinstance(received.body, pa.Buffer)
            assert received.body.to_pybytes() == body


async def test_answer_to_head_has_no_body() -> None:
    """HEAD is answered with the length of a body that does not follow."""
    async with listening(repeating(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")) as listener:
        for _ in range(2):
            received = await listener.wires.ask("HEAD", "/", {}, NO_BODY, 5)
            assert (received.body, received.headers["content-length"]) == (b"", "5")
        assert listener.made == 1


async def test_request_as_sent() -> None:
    """Head and buffers of the body arrive in order, with the length of all of them."""
    seen: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(7))
        writer.write(EMPTY)

    async with listening(serve) as listener:
        body = [b"abc", memoryview(b"de"), pa.py_buffer(b"fg")]
        await listener.wires.ask("POST", "/a?b=c", {"X-K": "ü"}, Buffers(body), 5)
    head, _, sent = (await seen).partition(b"\r\n\r\n")
    first, host, *others = head.decode().split("\r\n")
    assert first == "POST /a?b=c HTTP/1.1"
    assert host.startswith("Host: 127.0.0.1:")
    assert others == ["Authorization: Bearer k", "X-K: ü", "Content-Length: 7"]
    assert sent == b"abcdefg"


@pytest.mark.parametrize(
    "runs",
    [([b"ab", b"cdefg", b""],), ([b"abcdefg"], [b""]), ([b"abcdefg", b""], [b"", pa.py_buffer(b"")], [])],
    ids=["in a run", "a run alone", "in several"],
)
async def test_an_empty_end_of_a_request(runs: tuple[list[Buffer], ...]) -> None:
    """All of it is handed over: an empty buffer behind the rest leaves nothing that waits for the socket for ever."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(await reader.readuntil(b"abcdefg"))
        writer.write(EMPTY)

    seen: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    body = Buffers(*runs)
    assert len(list(body)[-1])  # before Python 3.12 nothing else shows
    async with listening(serve) as listener:
        await listener.wires.ask("POST", "/", {}, body, 5)
        (wire,) = listener.wires._all
        transport = wire._transport
        assert transport is not None
        transport.close()  # closes once everything is handed over
        async with asyncio.timeout(5):
            await wire.closed
    assert b"Content-Length: 7\r\n" in await seen


# -- what is no answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        *[b"HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n" % line for line in (
            b"abc OK", b"20 OK", b"2000 OK", b"+20 OK", b"2_0 OK", b" 20 OK", b"020 OK", b"\xb2\xb2\xb2 OK", b"",
        )],
        b"HTTP/2 200\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 020 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 0\r\n\r\n",
        *[b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n" % length for length in (
            b"-1", b"+1", b"1_0", b"1 1", b"", b"\xb2", b"0x1", b"1, 1", b"4194305", b"9" * 12, b"9" * 5_000,
        )],
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length : 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded: b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\nContent-Length: 5\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnothing\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nof no length, and the connection stays",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * CLIENT_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + bytes((4 << 20) + 1),
    ],
    ids=lambda answer: repr(answer[:60]),
)  # fmt: skip
async def test_what_is_not_http(answer: bytes) -> None:
    """An answer that makes no sense, or claims too much, is told at once, and its connection ends."""
    async with listening(repeating(answer)) as listener:
        with pytest.raises(BadAnswer):
            await listener.get()
        await listener.ended.wait()


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\n",
        b"\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n0\r\n\r\n",
        b"1_0\r\n" + b"a" * 16 + b"\r\n0\r\n\r\n",
        b" 1\r\na\r\n0\r\n\r\n",
        b"1 \r\na\r\n0\r\n\r\n",
        b"1\t;x=y\r\na\r\n0\r\n\r\n",
        b"0x1\r\na\r\n0\r\n\r\n",
        b"-0\r\n\r\n",
        b"1\r\nab\r\n0\r\n\r\n",
        b"1\r\na..0\r\n\r\n",
        b"400001\r\n",
        b"400000\r\n" + bytes(4 << 20) + b"\r\n1\r\n",
        b"f" * 40 + b"\r\n",
        b"1;" + b"x" * 2 * CLIENT_HEAD_BYTES,
    ],
    ids=lambda chunks: repr(chunks[:20]),
)
async def test_chunks_that_are_none(chunks: bytes) -> None:
    """A chunk's size is hexadecimal digits and nothing else, the chunk is as long, and all of them are bounded."""
    async with listening(repeating(CHUNKED + chunks)) as listener:
        with pytest.raises(BadAnswer):
            await listener.get()
        await listener.ended.wait()


async def test_bound_of_one_call() -> None:
    """A call may agree to less than the pool does."""
    async with listening(repeating(HELLO)) as listener:
        assert (await listener.wires.ask("GET", "/", {}, NO_BODY, 5, answer_bytes=5)).body == b"hello"
        with pytest.raises(BadAnswer, match="at most 4"):
            await listener.wires.ask("GET", "/", {}, NO_BODY, 5, answer_bytes=4)


@pytest.mark.parametrize("answer", [HELLO[:-1], HELLO[:30], CHUNKED + b"5\r\nhello\r\n", CHUNKED + b"5\r\nhell"])
async def test_answer_cut_short(answer: bytes) -> None:
    """A connection that ends within an answer is an error, never a shorter body."""
    async with listening(saying(answer)) as listener:
        with pytest.raises(ConnectionResetError):
            await listener.get()


# -- which connection is used ---------------------------------------------------------------------------------


async def test_headers_cannot_be_smuggled() -> None:
    """A value with a line end is refused before anything is sent."""
    with pytest.raises(ValueError, match="line"):
        Wires("http://h", SystemClock(), BOUNDS, "Bearer k\r\nX: y")
    async with listening(stay) as listener:
        with pytest.raises(ValueError, match="line"):
            await listener.wires.ask("GET", "/", {"X": "a\r\nB: c"}, NO_BODY, 5)
        assert not listener.made


def test_headers_that_answers_share_cannot_be_changed() -> None:
    """A head that comes again is read once: what one reader would change, others would see."""
    first, again = head_of(b"HTTP/1.1 200 OK\r\nX-A: 1"), head_of(b"HTTP/1.1 200 OK\r\nX-A: 1")
    assert first is again
    with pytest.raises(TypeError):
        cast(dict[str, str], first.headers)["x-a"] = "2"


def test_long_heads_are_not_remembered() -> None:
    """What is remembered is bounded."""
    long = b"HTTP/1.1 200 OK\r\nX-A: " + b"1" * 512
    assert head_of(long) == head_of(long)
    assert head_of(long) is not head_of(long)
