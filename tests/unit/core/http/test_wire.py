"""HTTP as our own connections speak it: how answers come, and when a connection is used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pyarrow as pa
import pytest

from millpond.core.clock import Clock, SystemClock
from millpond.core.http.wire import NO_BODY, BadAnswer, Bounds, Buffers, CannotConnect, Received, Wires
from millpond.core.limits import CLIENT_HEAD_BYTES

BOUNDS = Bounds(connections=8, connect_seconds=5, idle_seconds=60, answer_bytes=4 << 20)
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """Counts what connects to it."""

    def __init__(self, serve: Serve, clock: Clock, bounds: Bounds) -> None:
        self.made = 0
        self.ended = asyncio.Event()  # set when `serve` is through with a connection
        self.tasks: list[asyncio.Task[None]] = []
        self._serve, self._clock, self._bounds = serve, clock, bounds
        self.wires: Wires
        self.server: asyncio.Server

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._one, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.wires = Wires(url, self._clock, self._bounds, "Bearer k")

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._serve(reader, writer)
        self.ended.set()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def get(self) -> Received:
        return await self.wires.ask("GET", "/a", {}, NO_BODY, 5)


@asynccontextmanager
async def listening(serve: Serve, clock: Clock | None = None, bounds: Bounds = BOUNDS) -> AsyncIterator[Listener]:
    """A listener that does `serve` for each connection, and wires to it."""
    listener = Listener(serve, clock or SystemClock(), bounds)
    await listener.start()
    try:
        yield listener
    finally:
        await listener.wires.close()
        listener.server.close()
        await asyncio.gather(*listener.tasks)


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


def repeating(answer: bytes) -> Serve:
    """Every request gets `answer`; the connection stays."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()

    return serve


async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads, and never answers."""
    await reader.read()


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


async def test_connections_are_used_again() -> None:
    """Requests one after another share a connection; one that its service closes is not used again."""
    ending = EMPTY.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with listening(saying(EMPTY, EMPTY, ending)) as listener:
        for _ in range(3):
            await listener.get()
        assert listener.made == 1
        await listener.get()
        assert listener.made == 2


@pytest.mark.parametrize(
    "answer", [HELLO + b"HTTP/1.1 200 OK\r\n", EMPTY + b"x", CHUNKED + b"5\r\nhello\r\n0\r\n\r\n" + HELLO]
)
async def test_more_than_the_answer(answer: bytes) -> None:
    """Bytes behind an answer belong to nobody: the answer holds, its connection is not used again."""
    async with listening(repeating(answer)) as listener:
        for made in (1, 2):
            assert (await listener.get()).body in {b"hello", b""}
            assert listener.made == made


async def test_bytes_that_nobody_asked_for() -> None:
    """What comes over an idle connection ends it, and is not the answer to the next request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await saying(EMPTY)(reader, writer)
        await more.wait()
        writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        await reader.read()  # until the other side has noticed

    more = asyncio.Event()
    async with listening(serve) as listener:
        await listener.get()
        more.set()
        await listener.ended.wait()
        assert (await listener.get()).status == 200
        assert listener.made == 2


@pytest.mark.parametrize("status", [413, 408])
@pytest.mark.parametrize("closes", [False, True])
async def test_refusal_before_the_body_was_taken(status: int, closes: bool) -> None:
    """An answer that comes while the body is still being sent is the answer; its connection is not used again."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d Refused\r\nContent-Length: 2\r\n\r\nno" % status)
        await writer.drain()
        if not closes:
            await done.wait()

    done = asyncio.Event()
    body = bytes(64 << 20)
    async with listening(serve) as listener:
        for made in (1, 2):
            received = await listener.wires.ask("POST", "/", {}, Buffers([body]), 5)
            assert (received.status, received.body) == (status, b"no")
            assert listener.made == made
        done.set()


async def test_refusal_up_to_the_end() -> None:
    """The end of an answer without a length is its end, also while the request is still being sent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\n\r\nno")
        writer.write_eof()
        await done.wait()

    done = asyncio.Event()
    async with listening(serve) as listener:
        received = await listener.wires.ask("POST", "/", {}, Buffers([bytes(64 << 20)]), 5)
        assert (received.status, received.body) == (413, b"no")
        done.set()


async def test_kept_connection_that_ended() -> None:
    """A repeatable request whose kept connection ends unanswered goes over a new one; others are told."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await saying(EMPTY)(reader, writer)
        await reader.readuntil(b"\r\n\r\n")  # closed with the next request under way

    async with listening(serve) as listener:
        await listener.get()
        assert (await listener.wires.ask("GET", "/", {}, NO_BODY, 5, repeatable=True)).status == 200
        assert listener.made == 2
        with pytest.raises(ConnectionResetError):
            await listener.get()
        assert listener.made == 2


async def test_connection_that_ended_while_idle() -> None:
    """Once its end has come, nothing is sent over it: any request takes a new one."""
    async with listening(saying(EMPTY)) as listener:
        for made in (1, 2):
            await listener.wires.ask("POST", "/", {}, NO_BODY, 5)
            assert listener.made == made
            await asyncio.gather(*(wire.closed for wire in listener.wires._all))


async def test_new_connection_that_ends() -> None:
    """A request is repeated once at most: a new connection that ends is told."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async with listening(serve) as listener:
        with pytest.raises(ConnectionResetError):
            await listener.wires.ask("GET", "/", {}, NO_BODY, 5, repeatable=True)
        assert listener.made == 1


async def test_request_that_was_partly_answered_is_not_repeated() -> None:
    """Once a byte of the answer has come the request certainly came: sending it again is not for the pool to decide."""
    async with listening(saying(EMPTY, EMPTY[:20])) as listener:
        await listener.get()
        with pytest.raises(ConnectionResetError):
            await listener.wires.ask("GET", "/", {}, NO_BODY, 5, repeatable=True)
        assert listener.made == 1


class Hand:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1_000)

    def boot_ns(self) -> int:
        return int(self.now * 1e9)


async def test_connections_that_idle_too_long() -> None:
    """All of those are ended by the next request, not only those that it comes upon."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        try:
            await repeating(EMPTY)(reader, writer)
        finally:
            open_now -= 1
            left.set()

    open_now, left, clock = 0, asyncio.Event(), Hand()
    async with listening(serve, clock) as listener:
        await asyncio.gather(*(listener.get() for _ in range(3)))
        assert listener.made == 3
        clock.now = 40
        await listener.get()
        clock.now = 70
        await listener.get()
        while open_now > 1:
            left.clear()
            await left.wait()
        assert listener.made == 3


async def test_connections_are_bounded() -> None:
    """More calls than connections wait for their turn; one that gets none in time certainly sent nothing."""
    async with listening(repeating(EMPTY), bounds=BOUNDS._replace(connections=2)) as listener:
        await asyncio.gather(*(listener.get() for _ in range(6)))
        assert listener.made == 2
    async with listening(stay, bounds=BOUNDS._replace(connections=1)) as listener:
        first = asyncio.create_task(listener.get())
        await asyncio.sleep(0)
        with pytest.raises(CannotConnect):
            await listener.wires.ask("GET", "/", {}, NO_BODY, 0.01)
        first.cancel()
        await asyncio.wait([first])


async def test_no_answer_in_time() -> None:
    """The outcome of a call that was not answered in time is unknown; its connection ends."""
    async with listening(stay) as listener:
        with pytest.raises(TimeoutError):
            await listener.wires.ask("GET", "/", {}, NO_BODY, 0.05)
        await listener.ended.wait()


async def test_cancelled_call_ends_its_own_connection() -> None:
    """What may still come is nobody's; a call under way beside it is answered, and its connection is kept."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            asked.release()
            if head.startswith(b"GET /waits"):
                await answers.wait()
            elif head.startswith(b"GET /never"):
                await reader.read()
                return
            writer.write(HELLO)

    asked, answers = asyncio.Semaphore(0), asyncio.Event()
    async with listening(serve) as listener:
        other = asyncio.create_task(listener.wires.ask("GET", "/waits", {}, NO_BODY, 5))
        call = asyncio.create_task(listener.wires.ask("GET", "/never", {}, NO_BODY, 5))
        await asked.acquire()
        await asked.acquire()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await listener.ended.wait()
        answers.set()
        assert (await other).body == b"hello"
        await listener.get()
        assert listener.made == 2


async def test_close_ends_calls_under_way() -> None:
    """They fail, also one that receives up to the end; none that waits for its turn connects afterwards."""
    begun = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\npart")
        begun.set()
        await reader.read()

    async with listening(serve, bounds=BOUNDS._replace(connections=1)) as listener:
        calls = [asyncio.create_task(listener.get()) for _ in range(2)]
        await begun.wait()
        await listener.wires.close()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in ended] == [ConnectionAbortedError, CannotConnect]
        assert listener.made == 1


async def test_headers_cannot_be_smuggled() -> None:
    """A value with a line end is refused before anything is sent."""
    with pytest.raises(ValueError, match="line"):
        Wires("http://h", SystemClock(), BOUNDS, "Bearer k\r\nX: y")
    async with listening(stay) as listener:
        with pytest.raises(ValueError, match="line"):
            await listener.wires.ask("GET", "/", {"X": "a\r\nB: c"}, [], 5)
        assert not listener.made


async def test_nobody_there() -> None:
    """No connection is told apart: the request certainly did not arrive."""
    async with listening(stay) as listener:
        listener.server.close()
        await listener.server.wait_closed()
        with pytest.raises(CannotConnect):
            await listener.get()
    with pytest.raises(ValueError, match="address"):
        Wires("nowhere", SystemClock(), BOUNDS)
