"""A large request body, received straight into the memory where it stays.

    aiohttp   socket -> bytes of <= 256 KiB -> parser's copy -> queue of chunks -> one joined copy
    here      socket -> its place

The head, and whatever of the body came with it, comes to the connection as ever. At once `Straight` takes the
connection's place at the transport until the body's declared length is there. What comes after the body stays in the
socket: no more than the rest is ever asked for. Who sent a large body sends another, most likely: the first bytes after
it are asked for in a small piece, so that little of it comes by another way; if it is none, the connection has its
place back. Whether a body is wanted is decided meanwhile: one that nobody takes is received and forgotten.

Of a body that is `quick` little is told before most of it has come (`low_water.py`). A slow one is waited for with a
deadline, which each byte of it is to move.

A body that is given up (too slow) is received further, onto itself, so that the client can read its answer before
the connection closes: aiohttp waits for that, a little (`connection.LINGER_SECONDS`).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import pyarrow as pa
from aiohttp import StreamReader

from millpond.core.http.low_water import LowWater
from millpond.core.limits import BATCH_BYTES, BATCH_OVERHEAD_BYTES

STRAIGHT_BYTES = 128 * 1024  # smaller bodies come in one or two reads anyway
STRAIGHT_BYTES_MOST = BATCH_BYTES + BATCH_OVERHEAD_BYTES  # larger ones are not known to be taken at all
STRAIGHT_BYTES_AT_ONCE = 256 * 1024 * 1024  # declared by all clients together; beyond, memory is taken as bytes come
NEXT_HEAD_BYTES = 16 * 1024  # a head and little more
_scratch = memoryview(bytearray(NEXT_HEAD_BYTES))  # of all connections: filled and emptied in one turn of the loop


class StraightBody:
    """One body. `view`: all of it, `done` bytes of which are there. `content`: what aiohttp knows it by, once it does.
    `since`: when it began, in the loop's seconds."""

    declared = 0  # bytes of all bodies under way in this process

    def __init__(self, size: int, first: bytes, content: StreamReader | None = None) -> None:
        self.view = memoryview(pa.allocate_buffer(size)).cast("B")
        self.view[: len(first)] = first
        self.done = len(first)
        self.content = content
        self.since = asyncio.get_running_loop().time()
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self._counted = size
        StraightBody.declared += size

    @classmethod
    def is_due(cls, size: int) -> bool:
        """Whether a body of that size is received so, now."""
        return STRAIGHT_BYTES <= size <= STRAIGHT_BYTES_MOST and cls.declared + size <= STRAIGHT_BYTES_AT_ONCE

    @property
    def left(self) -> int:
        return len(self.view) - self.done

    @property
    def whole(self) -> bool:
        return not self.left

    async def received(self, seconds: float, bytes_per_second: float) -> memoryview:
        """The body, once it is whole. Raises TimeoutError when it takes longer than `seconds` and one for each
        `bytes_per_second` received, from its first bytes on; ConnectionResetError when the client goes."""
        loop = asyncio.get_running_loop()
        begin = self.since
        while not self.whole:
            if self._lost:
                raise ConnectionResetError("the client has gone")
            left = begin + seconds + self.done / bytes_per_second - loop.time()
            self._waiter = loop.create_future()
            try:
                async with asyncio.timeout(left):
                    await self._waiter
            except TimeoutError:
                if begin + seconds + self.done / bytes_per_second <= loop.time():
                    raise
        return self.view

    def ended(self, *, lost: bool = False) -> None:
        """No more comes: all is there, or the client is `lost`."""
        self._lost = lost
        StraightBody.declared -= self._counted
        self._counted = 0
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Owner(Protocol):
    """The connection whose place is taken."""

    def data_received(self, data: bytes) -> None: ...
    def connection_lost(self, exc: BaseException | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def body_received(self, body: StraightBody) -> None:
        """`body` is whole: the next bytes are the head of another request."""
        ...


class Straight(asyncio.BufferedProtocol):
    """What stands in the connection's place tells it what it is told itself."""

    def __init__(self, owner: Owner, transport: asyncio.Transport) -> None:
        self._owner = owner
        self._transport = transport
        self._body: StraightBody | None = None
        self._quick = False
        self._low_water = LowWater(transport)
        self._in_place = False

    def receive(self, body: StraightBody, *, quick: bool = False) -> None:
        """The rest of `body` comes next. Nobody looks at how much of a `quick` one has come until `slow` says so."""
        self._body = body
        self._quick = quick
        if quick:
            self._low_water.expect(body.left)
        if not self._in_place:
            self._in_place = True
            self._transport.set_protocol(self)

    def slow(self) -> None:
        """What comes is told at once from now on, and whatever has come."""
        self._quick = False
        self._low_water.expect(0)

    def get_buffer(self, sizehint: int) -> memoryview:
        body = self._body
        return _scratch if body is None else body.view[body.done :]

    def buffer_updated(self, nbytes: int) -> None:
        body = self._body
        if body is None:
            self._owner.data_received(bytes(_scratch[:nbytes]))
            if self._body is None:
                self._in_place = False
                self._transport.set_protocol(self._owner)  # type: ignore[arg-type]  # a protocol, by its Connection
            return
        body.done += nbytes
        if self._quick:
            self._low_water.expect(body.left)
        if body.whole:
            self._body = None
            body.ended()
            self._owner.body_received(body)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._body is not None:
            self._body.ended(lost=True)
            self._body = None
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()
