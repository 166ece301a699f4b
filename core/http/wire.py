"""HTTP/1.1 to one service over kept connections, without a copy of a body on either way.

    request   head, and the buffers of its body as they are, in one `writelines`
    answer    the head into a small buffer; a body of known length straight into one buffer of its size

A general client builds request and response objects, parses and copies through streams: with small messages that is
most of what a call costs, with large ones every byte is copied three times.

    Wires   the pool: one request at a time on each connection, the connection used last first
    Wire    one connection

The SDK calls the service over it (`client/connection.py`), and parts call each other (`client.py`). Not here: retries,
errors by code, JSON. Redirects are not followed, nothing is decompressed, there are no cookies and no proxies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, cast

import pyarrow as pa

from millpond.core import limits
from millpond.core.clock import Clock
from millpond.core.deadlines import Deadlines
from millpond.core.gathered import Buffer
from millpond.core.http.address import address_of
from millpond.core.http.heard import Chunks, Head, head_of, length_of
from millpond.core.http.low_water import LowWater

RECEIVE_BYTES = 256 * limits.KIB  # by one call of the kernel, which gives the core to nobody else meanwhile
HEAD_END = b"\r\n\r\n"


class CannotConnect(ConnectionError):
    """No connection could be made: nothing was sent."""


class Unanswered(ConnectionResetError):
    """The connection ended before a byte of the answer came. On a kept one, most likely before the request came."""


class BadAnswer(ValueError):
    """What came back is not HTTP as any service of ours sends it, or more than was agreed to."""


class Buffers:
    """What a request brings: `runs` of buffers one after another, `length` bytes in all.

    None ends empty: asyncio's own loop would spin on it, and never close (python/cpython#155888, from 3.12 on).
    """

    __slots__ = ("_runs", "length")

    def __init__(self, *runs: Sequence[Buffer], length: int | None = None) -> None:
        """`length`, when it is known already."""
        if not (runs and runs[-1] and len(runs[-1][-1])):
            runs = ([buffer for buffer in chain.from_iterable(runs) if len(buffer)],)
        self._runs = runs
        self.length = sum(map(len, self)) if length is None else length

    def __iter__(self) -> Iterator[Buffer]:
        return chain.from_iterable(self._runs)


NO_BODY = Buffers()


class Received(NamedTuple):
    """An answer; header names in lower case. A large body is a `pa.Buffer`."""

    status: int
    headers: Mapping[str, str]
    body: bytes | pa.Buffer


class Bounds(NamedTuple):
    """Of a pool. `idle_seconds` is below the service's own, so that a request seldom meets a connection that ends."""

    connections: int
    connect_seconds: float
    idle_seconds: float
    answer_bytes: int


class Wires:
    """Connections to the service at `url`, opened when needed. Closed ones raise CannotConnect."""

    def __init__(self, url: str, clock: Clock, bounds: Bounds, authorization: str = "") -> None:
        """Raises ValueError as `address_of` does."""
        address = address_of(url)
        self._host, self._port, self._base = address.host, address.port, address.base
        self._ssl = ssl.create_default_context() if address.secure else None
        fixed = {"Host": address.named}
        if authorization:
            fixed["Authorization"] = authorization
        self._fixed = _lines(fixed.items())
        self._clock = clock
        self._bounds = bounds
        self._idle: deque[tuple[Wire, float]] = deque()  # and since when; the one used last stands last
        self._all: set[Wire] = set()
        self._room = asyncio.Semaphore(bounds.connections)
        self._deadlines = Deadlines()
        self._closed = False

    async def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Buffers,
        timeout_seconds: float,
        *,
        answer_bytes: int | None = None,
        repeatable: bool = False,
    ) -> Received:
        """The answer. `target` is path and query; `answer_bytes` replaces the pool's bound.

        A request that is `repeatable` and found its kept connection ended goes once more, over a new one. Raises
        CannotConnect, ConnectionError and TimeoutError (the outcome is unknown), BadAnswer.
        """
        head = f"{method} {self._base}{target} HTTP/1.1\r\n{self._fixed}{_lines(headers.items())}"
        if body.length or method not in {"GET", "HEAD", "DELETE"}:
            head += f"Content-Length: {body.length}\r\n"
        request = _Request(
            f"{head}\r\n".encode(),
            body,
            self._bounds.answer_bytes if answer_bytes is None else answer_bytes,
            method != "HEAD",
        )
        wire = None
        try:
            with self._deadlines.within(timeout_seconds):
                async with self._room:
                    wire = self._kept()
                    if wire is not None:
                        try:
                            return await self._over(wire, request)
                        except Unanswered:
                            if not repeatable:
                                raise
                            wire = None
                    wire = await self._connected()
                    return await self._over(wire, request)
        except TimeoutError as error:
            if wire is None:
                raise CannotConnect("no connection was free in time") from error
            raise

    async def close(self) -> None:
        """Close all; calls under way fail."""
        self._closed = True
        wires = list(self._all)
        for wire in wires:
            self._drop(wire)
        self._idle.clear()
        await asyncio.gather(*(wire.closed for wire in wires))

    async def _over(self, wire: Wire, request: _Request) -> Received:
        try:
            return await wire.ask(request)
        finally:
            if wire.reusable:
                self._idle.append((wire, self._clock.monotonic()))
            else:
                self._drop(wire)

    def _kept(self) -> Wire | None:
        """The one used last that is still good; those that have idled too long are ended."""
        oldest = self._clock.monotonic() - self._bounds.idle_seconds
        while self._idle and (self._idle[0][1] < oldest or not self._idle[0][0].reusable):
            self._drop(self._idle.popleft()[0])
        while self._idle:
            wire, _ = self._idle.pop()
            if wire.reusable:
                return wire
            self._drop(wire)
        return None

    async def _connected(self) -> Wire:
        if self._closed:
            raise CannotConnect("it is closed on this side")
        try:
            async with asyncio.timeout(self._bounds.connect_seconds):
                loop = asyncio.get_running_loop()
                _, wire = await loop.create_connection(Wire, self._host, self._port, ssl=self._ssl)
        except (OSError, TimeoutError) as error:
            raise CannotConnect(str(error) or "no connection in time") from error
        if self._closed:  # meanwhile
            wire.abort()
            raise CannotConnect("it is closed on this side")
        self._all.add(wire)
        return wire

    def _drop(self, wire: Wire) -> None:
        self._all.discard(wire)
        wire.abort()


class _Request(NamedTuple):
    head: bytes
    body: Buffers
    answer_bytes: int
    has_body: bool  # the answer: that to HEAD has none, whatever it says


class Wire(asyncio.BufferedProtocol):
    """One connection: one request and its answer at a time. `closed` is done when it is gone."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._scratch = bytearray(limits.CLIENT_HEAD_BYTES)
        self._buffer = memoryview(self._scratch)
        self._filled = 0
        self._searched = 0  # .. of which hold no end of a head
        self._request: _Request | None = None
        self._answer: asyncio.Future[Received] | None = None
        self._heard = False  # a byte of the answer
        self._head: Head | None = None
        self._chunks: Chunks | None = None
        self._body: pa.Buffer | None = None  # being received into; `_rest` is what of it is still empty
        self._rest: memoryview | None = None
        self._to_end: bytearray | None = None  # a body that ends with the connection
        self._last = False

    @property
    def reusable(self) -> bool:
        """Whether another request may go over it."""
        return self._transport is not None and not self._last and self._answer is None

    async def ask(self, request: _Request) -> Received:
        """Cancelled, it leaves a connection that is not reusable: what may still come belongs to nobody."""
        assert self._answer is None, "one request at a time"
        if self._transport is None or self._last:
            raise Unanswered("the connection was closed")
        self._answer = asyncio.get_running_loop().create_future()
        self._request, self._heard = request, False
        try:
            self._transport.writelines(chain((request.head,), request.body))
            return await self._answer
        finally:
            self._request = None

    def abort(self) -> None:
        self._fail(ConnectionAbortedError("the connection was closed on this side"))
        self._last = True
        if self._transport is not None:
            self._transport.abort()

    # -- protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._low_water = LowWater(self._transport)

    def eof_received(self) -> None:
        self._gone(None)  # at once: a transport with bytes unsent would wait to get rid of them

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._gone(exc)
        if not self.closed.done():
            self.closed.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest[:RECEIVE_BYTES] if self._rest is not None else self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        try:
            if self._rest is None:
                self._filled += nbytes
                self._look()
            else:
                self._rest = self._rest[nbytes:]
                self._low_water.expect(len(self._rest))
                if not self._rest:
                    self._end(self._body)
        except ValueError as error:
            self._fail(BadAnswer(f"an answer that is not HTTP: {error}"))
            self._filled = 0
            self.abort()

    # -- the answer -------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """What has come and is not received straight: heads, small bodies, bodies of unknown length."""
        if self._answer is None:
            raise ValueError("bytes that nobody asked for")
        while self._head is None:
            end = self._scratch.find(HEAD_END, self._searched, self._filled)
            if end < 0:
                if self._filled == len(self._scratch):
                    raise ValueError("its head is too long")
                self._searched = max(0, self._filled - len(HEAD_END) + 1)
                return
            head = head_of(self._buffer[:end].tobytes())
            self._keep(end + len(HEAD_END))
            if head.status >= 200:
                self._head = head
                self._begin(head)
                return
            if head.status == 101 or "content-length" in head.headers or "transfer-encoding" in head.headers:
                raise ValueError(f"{head.status} where an answer is only announced")
        self._more()

    def _begin(self, head: Head) -> None:
        """The head is known: how does the body come?"""
        assert self._request is not None
        self._last = self._last or head.ends
        if head.status in {204, 304} or not self._request.has_body:
            self._end(b"")
            return
        length = length_of(head, self._request.answer_bytes)
        if length is not None:
            self._begin_known(length)
            return
        if "transfer-encoding" in head.headers:
            self._chunks = Chunks(self._request.answer_bytes)
        else:
            self._to_end = bytearray()
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
        self._low_water.expect(len(self._rest))

    def _more(self) -> None:
        """Bytes of a body whose length is not known beforehand."""
        came = self._buffer[: self._filled].tobytes()
        self._filled = 0
        if self._chunks is not None:
            if self._chunks.feed(came):
                self._last = self._last or bool(self._chunks.rest)
                self._end(bytes(self._chunks.body))
        elif self._to_end is not None and self._request is not None:
            self._to_end += came
            if len(self._to_end) > self._request.answer_bytes:
                raise ValueError(f"a body of more than {self._request.answer_bytes} bytes")

    def _keep(self, used: int) -> None:
        """Forget the first `used` bytes."""
        left = self._filled - used
        if left:
            self._buffer[:left] = self._buffer[used : self._filled].tobytes()
        self._filled, self._searched = left, 0

    def _end(self, body: bytes | pa.Buffer) -> None:
        """The answer is whole. What is still unsent of the request will not be asked for: the service refused it."""
        assert self._head is not None
        status, headers, _ = self._head
        self._head = self._chunks = self._body = self._rest = self._to_end = None
        transport = self._transport
        self._last = self._last or self._filled > 0 or (transport is not None and transport.get_write_buffer_size() > 0)
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(Received(status, headers, body))

    def _gone(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._last = True
        if self._to_end is not None and exc is None:
            self._end(bytes(self._to_end))
            return
        kind = ConnectionResetError if self._heard else Unanswered
        error = kind(str(exc or "the connection was closed before the answer was whole"))
        error.__cause__ = exc
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            self._last = True
            answer.set_exception(error)


def _lines(headers: Iterable[tuple[str, str]]) -> str:
    """Headers as they are sent. Raises ValueError for one that would end its line."""
    lines = [f"{name}: {value}" for name, value in headers]
    text = "".join([f"{line}\r\n" for line in lines])
    if text.count("\n") != len(lines) or text.count("\r") != len(lines):
        raise ValueError("a header of more than one line")
    return text
