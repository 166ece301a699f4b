"""HTTP/1.1 to one service over kept connections, without a copy of a body on either way.

    request   head, and the buffers of its body as they are, in one `writelines`
    answer    the head into a small buffer; a body of known length straight into one buffer of its size

A general client builds request and response objects, parses and copies through streams: with small messages that is
most of what a call costs, with large ones every byte is copied three times.

    Wires   the pool: one request at a time on each connection, the connection used last first
    Wire    one connection

Not here: retries, errors by code, JSON (`connection`). Redirects are not followed, nothing is decompressed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast
from urllib.parse import urlsplit

import pyarrow as pa

from millpond.core import limits
from millpond.core.clock import Clock

CONNECT_SECONDS = 10.0
HEAD_END = b"\r\n\r\n"

Buffer: TypeAlias = bytes | bytearray | memoryview | pa.Buffer


class NotConnected(ConnectionError):
    """No connection could be made: the request certainly did not arrive."""


class BadAnswer(ConnectionError):
    """What came back is not HTTP as any service of ours sends it."""


class Received(NamedTuple):
    """An answer; header names in lower case. A large body is a `pa.Buffer`."""

    status: int
    headers: Mapping[str, str]
    body: bytes | pa.Buffer


class Wires:
    """Connections to the service at `url`; opened when needed, kept for CLIENT_IDLE_SECONDS without use."""

    def __init__(self, url: str, clock: Clock, authorization: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of an HTTP service")
        self._host, self._ssl = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._base = parts.path.rstrip("/")
        fixed = {"Host": parts.netloc.rpartition("@")[2]}
        if authorization:
            fixed["Authorization"] = authorization
        self._fixed = _lines(fixed.items())
        self._clock = clock
        self._idle: list[tuple[Wire, float]] = []
        self._all: set[Wire] = set()
        self._room = asyncio.Semaphore(limits.CLIENT_CONNECTIONS)

    async def ask(
        self, method: str, target: str, headers: Mapping[str, str], body: Sequence[Buffer], timeout_seconds: float
    ) -> Received:
        """The answer. `target` is path and query. Raises NotConnected, ConnectionError, TimeoutError."""
        head = f"{method} {self._base}{target} HTTP/1.1\r\n{self._fixed}{_lines(headers.items())}"
        if body or method not in {"GET", "DELETE"}:
            head += f"Content-Length: {sum(map(len, body))}\r\n"
        buffers = [f"{head}\r\n".encode(), *body]
        async with self._room:
            wire = await self._take()
            try:
                received = await wire.ask(buffers, timeout_seconds)
            finally:
                if wire.reusable:
                    self._idle.append((wire, self._clock.monotonic()))
                else:
                    self._drop(wire)
        return received

    async def close(self) -> None:
        """Close all; calls under way fail."""
        wires = list(self._all)
        for wire in wires:
            self._drop(wire)
        self._idle.clear()
        await asyncio.gather(*(wire.closed for wire in wires))

    async def _take(self) -> Wire:
        oldest = self._clock.monotonic() - limits.CLIENT_IDLE_SECONDS
        while self._idle:
            wire, since = self._idle.pop()
            if wire.reusable and since > oldest:
                return wire
            self._drop(wire)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                loop = asyncio.get_running_loop()
                _, wire = await loop.create_connection(Wire, self._host, self._port, ssl=self._ssl)
        except (OSError, TimeoutError) as error:
            raise NotConnected(str(error) or "no connection in time") from error
        self._all.add(wire)
        return wire

    def _drop(self, wire: Wire) -> None:
        self._all.discard(wire)
        wire.abort()


class Wire(asyncio.BufferedProtocol):
    """One connection: one request and its answer at a time. `closed` is done when it is gone."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(limits.CLIENT_HEAD_BYTES))
        self._filled = 0
        self._answer: asyncio.Future[Received] | None = None
        self._head: tuple[int, dict[str, str]] | None = None
        self._chunks: _Chunks | None = None
        self._body: pa.Buffer | None = None  # being received into; `_rest` is what of it is still empty
        self._rest: memoryview | None = None
        self._to_end: bytearray | None = None  # a body that ends with the connection
        self._last = False

    @property
    def reusable(self) -> bool:
        """Whether another request may go over it."""
        return self._transport is not None and not self._last and self._answer is None

    async def ask(self, buffers: Sequence[Buffer], timeout_seconds: float) -> Received:
        """Send `buffers`, which are a whole request, and receive the answer."""
        assert self._answer is None, "one request at a time"
        if self._transport is None:
            raise ConnectionResetError("the connection was closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Received] = loop.create_future()
        self._answer = answer
        self._transport.writelines(buffers)
        timer = loop.call_later(timeout_seconds, self._fail, TimeoutError("no answer in time"))
        try:
            return await answer
        except BaseException:
            self.abort()  # what may still come belongs to nobody
            raise
        finally:
            timer.cancel()

    def abort(self) -> None:
        self._last = True
        if self._transport is not None:
            self._transport.abort()

    # -- protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._to_end is not None and exc is None:
            self._end(bytes(self._to_end))
        self._fail(exc or ConnectionResetError("the connection was closed before the answer was whole"))
        if not self.closed.done():
            self.closed.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest if self._rest is not None else self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._rest is None:
                self._filled += nbytes
                self._look()
            else:
                self._rest = self._rest[nbytes:]
                if not self._rest:
                    self._end(self._body)
        except ValueError as error:
            self._fail(BadAnswer(f"an answer that is not HTTP: {error}"))
            self.abort()

    # -- the answer -------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """What has come and is not received straight: heads, small bodies, bodies of unknown length."""
        if self._answer is None:
            raise ValueError("bytes that nobody asked for")
        while self._head is None:
            came = self._buffer[: self._filled].tobytes()
            head, end, _ = came.partition(HEAD_END)
            if not end:
                if self._filled == len(self._buffer):
                    raise ValueError("its head is too long")
                return
            self._keep(len(head) + len(HEAD_END))
            found = _head(head)
            if found[0] >= 200:  # others announce the answer
                self._head = found
                self._begin(*found)
                return
        self._more()

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The head is known: how does the body come?"""
        self._last = self._last or headers.get("connection", "").lower() == "close"
        length = headers.get("content-length")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._chunks = _Chunks()
        elif status in {204, 304}:
            self._end(b"")
            return
        elif length is None:
            self._to_end = bytearray()
            self._last = True
        else:
            self._begin_known(_length(length))
            return
        self._more()

    def _begin_known(self, length: int) -> None:
        if length <= self._filled:
            body = self._buffer[:length].tobytes()
            self._keep(length)
            self._end(body)
            return
        self._body = pa.allocate_buffer(length)
        self._rest = memoryview(self._body).cast("B")
        self._rest[: self._filled] = self._buffer[: self._filled]
        self._rest = self._rest[self._filled :]
        self._filled = 0

    def _more(self) -> None:
        """Bytes of a body whose length is not known beforehand."""
        came = self._buffer[: self._filled].tobytes()
        self._filled = 0
        if self._chunks is not None:
            if self._chunks.feed(came):
                self._end(bytes(self._chunks.body))
        elif self._to_end is not None:
            self._to_end += came
            if len(self._to_end) > limits.CLIENT_ANSWER_BYTES:
                raise ValueError("it does not end")

    def _keep(self, used: int) -> None:
        """Forget the first `used` bytes."""
        left = self._filled - used
        if left:
            self._buffer[:left] = self._buffer[used : self._filled].tobytes()
        self._filled = left

    def _end(self, body: bytes | pa.Buffer) -> None:
        """The answer is whole. What is still unsent of the request will not be asked for: the service refused it."""
        assert self._head is not None
        status, headers = self._head
        self._head = self._chunks = self._body = self._rest = self._to_end = None
        transport = self._transport
        self._last = self._last or self._filled > 0 or (transport is not None and transport.get_write_buffer_size() > 0)
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(Received(status, headers, body))

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            self._last = True
            answer.set_exception(error)


class _Chunks:
    """A body in chunks (RFC 9112 7.1); extensions and trailers are passed over."""

    def __init__(self) -> None:
        self.body = bytearray()
        self._rest = bytearray()
        self._trailers = False

    def feed(self, data: bytes) -> bool:
        """Whether that was the end. Raises ValueError."""
        rest = self._rest
        rest += data
        while True:
            end = rest.find(b"\r\n")
            if end < 0:
                if len(rest) > limits.CLIENT_HEAD_BYTES:
                    raise ValueError("a chunk without a size")
                return False
            if self._trailers:
                del rest[: end + 2]
                if end == 0:
                    return True
                continue
            size = int(rest[:end].partition(b";")[0], 16)
            if len(self.body) + size > limits.CLIENT_ANSWER_BYTES or size < 0:
                raise ValueError("it is too long")
            if len(rest) < end + size + 4 and size:
                return False
            self._trailers = size == 0
            self.body += rest[end + 2 : end + 2 + size]
            del rest[: end + 2 + size + (2 if size else 0)]


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers. Raises ValueError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(repr(first[:40]))
    status = int(rest[:3])
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if version == "HTTP/1.0" and "connection" not in headers:
        headers["connection"] = "close"
    return status, headers


def _length(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > limits.CLIENT_ANSWER_BYTES:
        raise ValueError(f"a body of {text[:20]!r} bytes")
    return int(text)


def _lines(headers: Iterable[tuple[str, str]]) -> str:
    """Headers as they are sent. Raises ValueError for one that would end its line."""
    lines = [f"{name}: {value}" for name, value in headers]
    text = "".join([f"{line}\r\n" for line in lines])
    if text.count("\n") != len(lines) or text.count("\r") != len(lines):
        raise ValueError("a header of more than one line")
    return text
