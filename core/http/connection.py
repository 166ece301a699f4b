"""One accepted connection: aiohttp's protocol with the bounds it lacks.

    phase        aiohttp alone            here
    head         3,630 s, 1 MiB           HEADER_SECONDS, HEADER_BYTES: closed after a 408 or 431
    body         no bound                 `call.py` (limit, pace)
    idle         3,630 s                  IDLE_SECONDS
    answer       no bound                 STALL_SECONDS without a byte taken by the client: aborted
    connections  no bound                 `Bounds.connections`: further ones are told 503 and closed

Time is watched by one sweep over all connections, not by a timer each: a request costs two attribute writes.
This file and `server.py` are the only ones that know aiohttp's `RequestHandler` from inside.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import NamedTuple

from aiohttp import web
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import MAX_MSG_QUEUE_SIZE, _ErrInfo

from millpond.core import limits
from millpond.core.errors import BadRequest, HeadersTooLarge, Internal, MillpondError, RequestTimeout, Unavailable
from millpond.core.http.call import BodyPace
from millpond.core.http.problem import problem_bytes, problem_headers, problem_response
from millpond.core.http.straight import STRAIGHT_BYTES, STRAIGHT_BYTES_AT_ONCE, STRAIGHT_BYTES_MOST, StraightBody

STALL_SECONDS = 30.0  # an answer of which the client takes nothing for so long is given up
LINGER_SECONDS = 2.0  # a refused body is read and thrown away so long, so that the client sees the answer
READ_BYTES = 1 << 20  # of a body that aiohttp receives: it pauses the client at twice as much
REFUSED_CONNECTIONS = 256  # beyond the cap: told why; beyond these: closed without a word
REFUSED_SECONDS = 1.0  # a refused connection is told why after its first bytes, or after so long

_log = logging.getLogger("millpond.http")


class Bounds(NamedTuple):
    """What one listener allows; tests make them small."""

    connections: int = limits.CONNECTIONS
    header_bytes: int = limits.HEADER_BYTES
    header_seconds: float = limits.HEADER_SECONDS
    idle_seconds: float = limits.IDLE_SECONDS
    stall_seconds: float = STALL_SECONDS
    pace: BodyPace = BodyPace()


class Connection(web.RequestHandler):
    """`waiting`: the task of a long poll, cancelled when the client goes. `long_head`: the head just read exceeded
    its bound and came in one piece, so that only the dispatcher can refuse it."""

    __slots__ = ("_begun", "_bounds", "_head_bytes", "_head_since", "_refused", "_stall_bytes", "_stall_since",
                 "_straight", "long_head", "waiting")  # fmt: skip

    def __init__(self, manager: web.Server, bounds: Bounds, refused: bool) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=bounds.idle_seconds,
            access_log=None,  # type: ignore[arg-type]  # aiohttp takes None for "no access log" here
            auto_decompress=False,  # nothing is ever inflated: no gzip bombs
            lingering_time=LINGER_SECONDS,
            max_line_size=bounds.header_bytes // 2,
            max_field_size=bounds.header_bytes // 2,
            read_bufsize=READ_BYTES,
        )
        self._bounds = bounds
        self._refused = refused
        self._head_since: float | None = loop.time()
        self._head_bytes = 0
        self._begun = False
        self._stall_since: float | None = None
        self._stall_bytes = 0
        self._straight: StraightBody | None = None
        self.long_head = False
        self.waiting: asyncio.Task[object] | None = None

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self.waiting is not None:
            self.waiting.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._refuse()
            return
        super().data_received(data)
        if data and self._messages and not self._messages[-1][1].is_eof():  # no data: called by a body being read
            self._go_straight()
        waiter = self._waiter
        awaited = waiter is not None and not waiter.done()
        # the first bytes may come before aiohttp's own task has begun to wait for a request
        self._begun = self._begun or awaited or bool(self._messages)
        if awaited or not self._begun:
            if data:
                self._head_goes_on(len(data))
        elif self._head_since is not None:
            self.long_head = self._head_bytes + len(data) > self._bounds.header_bytes
            self._head_since = None
            self._head_bytes = 0
        elif len(data) > self._bounds.header_bytes:
            self.long_head = True

    def _go_straight(self) -> None:
        """A head came without all of its body: when that is large, receive the rest past aiohttp, from now on.

        Not while another request of this connection waits or is handled, of which a client may send many.
        """
        message, content = self._messages[-1]
        if isinstance(message, _ErrInfo):
            return
        size = int(message.headers.get("Content-Length", 0))  # the parser has checked it
        if not STRAIGHT_BYTES <= size <= STRAIGHT_BYTES_MOST or StraightBody.declared + size > STRAIGHT_BYTES_AT_ONCE:
            return
        before = self._straight  # its request has ended when aiohttp has shut its body
        alone = len(self._messages) == 1 and self._current_request is None
        if not alone or (before is not None and before.content.exception() is None):
            return
        if self._reading_paused or self.transport is None:  # paused: the parser holds some back
            return
        self._straight = StraightBody(self, self.transport, content, size)

    def straight(self, request: web.BaseRequest) -> StraightBody | None:
        """The body of `request`, when it is received past aiohttp; asked for once."""
        straight = self._straight
        if straight is None or straight.content is not request.content:
            return None
        self._straight = None
        return straight

    def began_anew(self) -> None:
        """The parser still counts the bytes of a body that it never saw: the next request gets another one."""
        if self.transport is not None:
            self._parser = self._new_parser()

    def _new_parser(self) -> HttpRequestParser:
        bounds = self._bounds
        return HttpRequestParser(
            self,
            self._loop,
            READ_BYTES,
            max_line_size=bounds.header_bytes // 2,
            max_field_size=bounds.header_bytes // 2,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=MAX_MSG_QUEUE_SIZE,
        )

    def _head_goes_on(self, size: int) -> None:
        """Bytes came and there is still no whole head."""
        if self._head_since is None:
            self._head_since = self._loop.time()
        self._head_bytes += size
        if self._head_bytes > self._bounds.header_bytes:
            self.end_with(headers_too_large(self._bounds.header_bytes))

    def sweep(self, now: float) -> None:
        """Called about every second: end what has taken too long."""
        transport = self.transport
        if transport is None:
            return
        if self._refused:
            if self._head_since is not None and now - self._head_since > REFUSED_SECONDS:
                self._refuse()
            return
        since = self._head_since
        if since is not None and now - since > self._bounds.header_seconds:
            if self._head_bytes:
                self.end_with(RequestTimeout("request_timeout", "the request's head came too slowly"))
            else:
                self.force_close()
        elif self.writing_paused:
            self._sweep_stalled(now, transport)
        else:
            self._stall_since = None

    def _sweep_stalled(self, now: float, transport: asyncio.Transport) -> None:
        left = transport.get_write_buffer_size()
        if self._stall_since is None or left != self._stall_bytes:
            self._stall_since, self._stall_bytes = now, left
        elif now - self._stall_since > self._bounds.stall_seconds:
            transport.abort()

    def _refuse(self) -> None:
        self.end_with(Unavailable("too_many_connections", "this listener has all the connections it allows"))

    def end_with(self, error: MillpondError) -> None:
        """Answer `error` where no request can be answered the usual way, and close."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(raw_problem(error))
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not HTTP (400, 431), and what failed outside of any handler (500)."""
        error: MillpondError
        if isinstance(exc, LineTooLong):
            error = headers_too_large(self._bounds.header_bytes)
        elif status < 500:
            error = BadRequest("invalid_request", f"this is not HTTP: {(message or '').partition(chr(10))[0]}")
        elif isinstance(exc, ConnectionError) and self.transport is None:
            raise exc
        else:
            _log.error("a request failed outside of its handler", exc_info=exc)
            error = Internal("internal", "something went wrong here; it was logged")
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        response = problem_response(error, "-")
        response.force_close()
        return response


def headers_too_large(limit_bytes: int) -> HeadersTooLarge:
    return HeadersTooLarge("headers_too_large", f"the request's head is larger than {limit_bytes} bytes")


def raw_problem(error: MillpondError) -> bytes:
    """A whole HTTP/1.1 answer that closes the connection."""
    body = problem_bytes(error, "-")
    headers = {**problem_headers(error, "-"), "Content-Length": str(len(body)), "Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n".encode() + body
