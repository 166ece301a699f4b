"""A large request body, received straight into the memory where it stays.

    aiohttp   socket -> bytes of <= 256 KiB -> parser's copy -> queue of chunks -> one joined copy
    here      socket -> its place

aiohttp parses the head and whatever of the body came with it. At once this protocol takes the connection's place at
the transport until the body's declared length is there, and gives it back with a fresh parser for the next request.
What comes after the body stays in the socket: no more than the rest is ever asked for. Whether the body is wanted is
decided meanwhile: one that nobody takes is received and forgotten. Who sent a large body sends another, most likely:
the first bytes after it are asked for in a small piece (`NextHead`), so that little of it comes by aiohttp's way.

A body that is given up (too slow) is received further, onto itself, so that the client can read its answer before
the connection closes: aiohttp waits for that, a little (`connection.LINGER_SECONDS`).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import pyarrow as pa
from aiohttp import StreamReader

from millpond.core.limits import BATCH_BYTES, BATCH_OVERHEAD_BYTES

STRAIGHT_BYTES = 128 * 1024  # smaller bodies come in one or two reads anyway
STRAIGHT_BYTES_MOST = BATCH_BYTES + BATCH_OVERHEAD_BYTES  # larger ones are not known to be taken at all
STRAIGHT_BYTES_AT_ONCE = 256 * 1024 * 1024  # declared by all clients together; beyond, memory is taken as bytes come
NEXT_HEAD_BYTES = 16 * 1024  # a head and little more
_scratch = memoryview(bytearray(NEXT_HEAD_BYTES))  # of all connections: filled and emptied in one turn of the loop


class Owner(Protocol):
    """The connection whose place is taken."""

    def data_received(self, data: bytes) -> None: ...
    def connection_lost(self, exc: BaseException | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def began_anew(self) -> None:
        """The body is complete: the next bytes are the head of another request."""
        ...


class _InPlace(asyncio.BufferedProtocol):
    """What stands in the connection's place tells it what it is told itself."""

    def __init__(self, owner: Owner, transport: asyncio.Transport) -> None:
        self._owner = owner
        self._transport = transport
        transport.set_protocol(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()


class NextHead(_InPlace):
    """The first bytes after a large body, at most so many."""

    def get_buffer(self, sizehint: int) -> memoryview:
        return _scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._transport.set_protocol(self._owner)  # type: ignore[arg-type]  # a protocol, by its Connection
        self._owner.data_received(bytes(_scratch[:nbytes]))


class StraightBody(_InPlace):
    """The rest of one body. `view`: all of it, `done` bytes of which are there."""

    declared = 0  # bytes of all bodies under way in this process

    def __init__(self, owner: Owner, transport: asyncio.Transport, content: StreamReader, size: int) -> None:
        self.content = content
        self.view = memoryview(pa.allocate_buffer(size)).cast("B")
        first = content.read_nowait()
        self.view[: len(first)] = first
        self.done = len(first)
        self._complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counted = size
        StraightBody.declared += size
        super().__init__(owner, transport)

    async def received(self, seconds: float, bytes_per_second: float) -> memoryview:
        """The body, once it is whole. Raises TimeoutError when it takes longer than `seconds` and one for each
        `bytes_per_second` received, ConnectionResetError when the client goes."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            while not self._complete.done():
                left = begin + seconds + self.done / bytes_per_second - loop.time()
                try:
                    async with asyncio.timeout(left):
                        await asyncio.shield(self._complete)
                except TimeoutError:
                    if begin + seconds + self.done / bytes_per_second <= loop.time():
                        raise
            self._complete.result()
            return self.view
        finally:
            self._complete.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view[self.done :]

    def buffer_updated(self, nbytes: int) -> None:
        self.done += nbytes
        if self.done == len(self.view):
            self._release()
            NextHead(self._owner, self._transport)
            self.content.feed_eof()
            self._owner.began_anew()
            if not self._complete.done():
                self._complete.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._release()
        if not self._complete.done():
            self._complete.set_exception(ConnectionResetError("the client has gone"))
            self._complete.exception()  # nobody may be waiting any more
        super().connection_lost(exc)

    def _release(self) -> None:
        StraightBody.declared -= self._counted
        self._counted = 0
