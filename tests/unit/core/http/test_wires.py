"""The pool of our own connections: when one is used again, when a new one is made, and what ends one."""

from __future__ import annotations

import asyncio

import pytest

from millpond.core.clock import SystemClock
from millpond.core.http.wire import NO_BODY, Buffers, CannotConnect, Wires

from .listening import BOUNDS, CHUNKED, EMPTY, HELLO, listening, repeating, saying, stay


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


async def test_nobody_there() -> None:
    """No connection is told apart: the request certainly did not arrive."""
    async with listening(stay) as listener:
        listener.server.close()
        await listener.server.wait_closed()
        with pytest.raises(CannotConnect):
            await listener.get()


@pytest.mark.parametrize(
    "url", ["nowhere", "localhost:8080", "ftp://host", "http://", "http://host:port", "http://[::1"]
)
def test_what_is_no_address(url: str) -> None:
    """Is refused before anything is sent."""
    with pytest.raises(ValueError, match="url: expected"):
        Wires(url, SystemClock(), BOUNDS)
