"""A large body is told when much of it has come: on both event loops, over TCP."""

from __future__ import annotations

import array
import asyncio
import fcntl
import socket
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from millpond.core.http.low_water import LEAST_BYTES, MOST_BYTES, LowWater

from .conftest import until
from .listening import listening

TOTAL = 2 * LEAST_BYTES


class Told(asyncio.Protocol):
    """Notes what it is told of, and expects TOTAL bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.socket: socket.socket = transport.get_extra_info("socket")
        self.low_water = LowWater(cast(asyncio.Transport, transport))
        self.low_water.expect(TOTAL)

    def data_received(self, data: bytes) -> None:
        self.sizes.append(len(data))
        self.low_water.expect(max(0, TOTAL - sum(self.sizes)))

    def connection_lost(self, exc: BaseException | None) -> None:
        self.ended = True

    async def has_come(self, size: int) -> None:
        """Until so much is there to be received, or has been, and the loop has had time to notice."""
        there = array.array("i", [0])

        def enough() -> bool:
            fcntl.ioctl(self.socket.fileno(), termios.FIONREAD, there)
            return there[0] + sum(self.sizes) == size

        await until(enough)
        for _ in range(20):
            await asyncio.sleep(0)


@asynccontextmanager
async def _told() -> AsyncIterator[tuple[Told, socket.socket]]:
    """One that is told, and the socket that tells it."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        transport, told = await loop.create_connection(Told, *listener.getsockname())
        sender, _ = listener.accept()
        with sender:
            sender.setblocking(False)
            yield told, sender
        transport.close()
        await until(lambda: told.ended)


async def test_nothing_is_told_before_it_is_there() -> None:
    """Half of a body waits for the other half; what comes behind it is told at once."""
    loop = asyncio.get_running_loop()
    async with _told() as (told, sender):
        await loop.sock_sendall(sender, bytes(TOTAL // 2))
        await told.has_come(TOTAL // 2)
        assert told.sizes == []
        await loop.sock_sendall(sender, bytes(TOTAL // 2))
        await until(lambda: sum(told.sizes) == TOTAL)
        await loop.sock_sendall(sender, b"!")
        await until(lambda: sum(told.sizes) == TOTAL + 1)


async def test_no_longer_expected() -> None:
    """With 0 what has come is told, and so is each byte that follows."""
    loop = asyncio.get_running_loop()
    async with _told() as (told, sender):
        await loop.sock_sendall(sender, bytes(1000))
        await told.has_come(1000)
        told.low_water.expect(0)
        await until(lambda: sum(told.sizes) == 1000)


async def test_the_end_is_always_told() -> None:
    """And what came before it."""
    async with _told() as (told, sender):
        sender.send(bytes(1000))
        sender.close()
        await until(lambda: told.ended)
        assert sum(told.sizes) == 1000


async def test_small_after_large_on_one_connection() -> None:
    """Answers of any size are whole, one after another, in whatever pieces they come."""
    bodies = [bytes(MOST_BYTES * 3 // 2), b"small", bytes(LEAST_BYTES), b"", bytes(MOST_BYTES + 1)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in bodies:
            await reader.readuntil(b"\r\n\r\n")
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            for at in range(0, len(answer), 100_000):
                writer.write(answer[at : at + 100_000])
                await writer.drain()

    async with listening(serve) as listener:
        assert [len((await listener.get()).body) for _ in bodies] == [len(body) for body in bodies]
        assert listener.made == 1


class Transport:
    """Counts how often the mark of its socket was set."""

    def __init__(self, **extra: object) -> None:
        self.extra = {"socket": self, **extra}
        self.marks: list[int] = []
        self.closing = False

    def get_extra_info(self, name: str) -> object:
        return self.extra.get(name)

    def is_closing(self) -> bool:
        return self.closing

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.marks.append(value)


def _low_water(transport: Any) -> LowWater:
    return LowWater(transport)


def test_it_is_set_when_it_changes_only() -> None:
    """To what is left, or as much as is waited for at most; never for a body that is small anyway."""
    transport = Transport()
    low_water = _low_water(transport)
    for left in (LEAST_BYTES - 1, 0, 3 * MOST_BYTES, 2 * MOST_BYTES, MOST_BYTES - 1, 7, 0, 0):
        low_water.expect(left)
    assert transport.marks == [MOST_BYTES, MOST_BYTES - 1, 7, 1]


def test_it_is_not_set_of_a_socket_that_may_be_anothers() -> None:
    """Once a transport is closing its descriptor is given to the next connection; with TLS, what it has taken out of
    the socket and not told yet would be waited for."""
    closing, tls = Transport(), Transport(sslcontext=object())
    closing.closing = True
    for transport in (closing, tls, Transport(socket=None)):
        _low_water(transport).expect(MOST_BYTES)
    assert closing.marks == tls.marks == []


def test_where_there_is_no_such_mark() -> None:
    """It is tried once."""
    tried = []

    class Sandboxed(Transport):
        def setsockopt(self, level: int, name: int, value: int) -> None:
            tried.append(value)
            raise OSError(92, "Protocol not available")

    low_water = _low_water(Sandboxed())
    for left in (MOST_BYTES, LEAST_BYTES, 0):
        low_water.expect(left)
    assert tried == [MOST_BYTES]
