"""One kept-alive connection of an internal caller: a POST and its answer, one at a time.

    aiohttp's client   a request object, its headers in a multidict, a timer, a parser and a queue of chunks each time
    here               the head is one format of bytes; a large answer is received straight into its own memory

Only what `server.py` sends is understood: HTTP/1.1 with a Content-Length, no chunks, no compression, no interim
answers. Everything else is a ValueError, and the connection is not used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, cast

import pyarrow as pa

from millpond.core.http.call import Body

HEAD_BYTES = 64 * 1024  # of an answer, and of what came along with it
LARGE_BYTES = 32 * 1024  # larger bodies get memory of their own
_END = b"\r\n\r\n"


class Answer(NamedTuple):
    """`media_type` without parameters."""

    status: int
    media_type: str
    body: Body


class Head(NamedTuple):
    status: int
    media_type: str
    length: int
    keeps: bool


class Exchange(asyncio.BufferedProtocol):
    """`post` raises ConnectionError when the connection ends, ValueError for an answer that is none or too large."""

    def __init__(self) -> None:
        self._scratch = bytearray(HEAD_BYTES)
        self._view = memoryview(self._scratch)
        self._filled = 0
        self._head: Head | None = None
        self._body: memoryview | None = None  # memory of its own, where the answer is large
        self._received = 0  # .. bytes of it
        self._most = 0
        self._answer: asyncio.Future[Answer] | None = None
        self._keeps = True
        self._transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        """Whether another request may go over it."""
        return self._keeps and self._transport is not None and not self._transport.is_closing()

    async def post(self, head: bytes, segments: Sequence[bytes | pa.Buffer], answer_bytes: int) -> Answer:
        """`head`: all of the request before its body. Cancelling this ends the connection."""
        assert self._answer is None and self._transport is not None, "one at a time"
        self._most = answer_bytes
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._keeps, self._answer = False, None
            raise ConnectionResetError("the connection had ended")
        self._transport.writelines([head, *segments])
        try:
            return await self._answer
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        self._keeps = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._keeps = False
        self._fail(ConnectionResetError(str(exc or "closed by the peer")))

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None:
            return self._body[self._received :]
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is not None:
            self._received += nbytes
            if self._received == len(self._body):
                self._done(self._body)
            return
        self._filled += nbytes
        if self._answer is None or self._answer.done():
            self._filled = 0
            self.close()  # nothing was asked, or nobody waits: what comes belongs to no request
            return
        try:
            self._read()
        except ValueError as error:
            self._fail(error)
            self._filled = 0
            self.close()

    def _read(self) -> None:
        """The head, and the body that came with it or will come. Raises ValueError."""
        end = self._scratch.find(_END, 0, self._filled)
        if end < 0:
            if self._filled == HEAD_BYTES:
                raise ValueError(f"an answer's head of more than {HEAD_BYTES} bytes")
            return
        if self._head is None:
            self._head = _parsed(bytes(self._view[:end]), self._most)
        begin, length = end + len(_END), self._head.length
        here = self._filled - begin
        if here > length:
            raise ValueError("more bytes than the answer has")
        if here == length:
            self._done(bytes(self._view[begin : self._filled]))
        elif length > LARGE_BYTES or begin + length > HEAD_BYTES:
            self._body = memoryview(pa.allocate_buffer(length)).cast("B")
            self._body[:here] = self._view[begin : self._filled]
            self._received = here

    def _done(self, body: Body) -> None:
        assert self._head is not None
        head = self._head
        self._keeps = self._keeps and head.keeps
        self._head, self._body, self._filled = None, None, 0  # the transport may ask for room at once
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Answer(head.status, head.media_type, body))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _parsed(head: bytes, most: int) -> Head:
    """Raises ValueError."""
    line, *fields = head.decode("latin-1").split("\r\n")
    version, _, rest = line.partition(" ")
    status = int(rest[:3]) if version == "HTTP/1.1" and rest[:3].isdigit() else 0
    named = {}
    for field in fields:
        name, _, value = field.partition(":")
        named[name.lower()] = value.strip()
    length = named.get("content-length", "")
    if status < 200 or "transfer-encoding" in named or not length.isdigit():
        raise ValueError(f"not an answer of this release: {line[:80]!r}")
    if int(length) > most:
        raise ValueError(f"an answer of {length} bytes, at most {most}")
    media_type = named.get("content-type", "").partition(";")[0].strip().lower()
    return Head(status, media_type, int(length), named.get("connection", "").lower() != "close")
