"""One accepted connection: aiohttp's protocol with the bounds it lacks.

    phase        aiohttp alone            here
    head         3,630 s, 1 MiB           HEADER_SECONDS, HEADER_BYTES: closed after a 408 or 431
    body         no bound                 `call.py` (limit, pace)
    idle         3,630 s                  IDLE_SECONDS
    answer       no bound                 STALL_SECONDS without a byte taken by the client: aborted
    connections  no bound                 `Bounds.connections`: further ones are told 503 and closed

Time is watched by one sweep, not by a timer each: a request costs two attribute writes. It looks at the connections
that are in `watched`: those that have no whole head yet, or whose client takes nothing. Others, long polls among them,
cost nothing; but for a timer, once in an idle time, which thousands of them share the turn of.
This file and `server.py` are the only ones that know aiohttp's `RequestHandler` from inside.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.http import HttpRequestParser, RawRequestMessage
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import MAX_MSG_QUEUE_SIZE, _ErrInfo

from millpond.core import limits
from millpond.core.errors import BadRequest, HeadersTooLarge, Internal, MillpondError, RequestTimeout, Unavailable
from millpond.core.gathered import Buffer
from millpond.core.http.again import Again, Taken, again_of
from millpond.core.http.call import Body, BodyPace
from millpond.core.http.problem import problem_response, raw_problem
from millpond.core.http.prompt import PROMPT_BYTES, Headed, Prompt
from millpond.core.http.routing import Found
from millpond.core.http.straight import Straight, StraightBody

STALL_SECONDS = 30.0  # an answer of which the client takes nothing for so long is given up
LINGER_SECONDS = 2.0  # a refused body is read and thrown away so long, so that the client sees the answer
READ_BYTES = 1 << 20  # of a body that aiohttp receives: it pauses the client at twice as much
REFUSED_CONNECTIONS = 256  # beyond the cap: told why; beyond these: closed without a word
PROMPT_SECONDS = 1.0  # a large body that aiohttp does not know of may take so long: then it is told
REFUSED_SECONDS = 1.0  # a refused connection is told why after its first bytes, or after so long
IDLE_STEP = 64  # an idle connection is closed up to this part of the time late: one turn of the loop for many

STRANGE_MOST = 8  # heads in a row that did not come again: then only one in ..
STRANGE_EACH = 64  # .. is remembered

_log = logging.getLogger("millpond.http")


class Bounds(NamedTuple):
    """What one listener allows; tests make them small."""

    connections: int = limits.CONNECTIONS
    header_bytes: int = limits.HEADER_BYTES
    header_seconds: float = limits.HEADER_SECONDS
    idle_seconds: float = limits.IDLE_SECONDS
    stall_seconds: float = STALL_SECONDS
    pace: BodyPace = BodyPace()


class Prompts(Protocol):
    """What of the server (`server.py`) a prompt answer needs."""

    def route_of(self, method: str, target: str) -> Found | None:
        """The route and parameters of a request that may be answered promptly."""
        ...

    def begin(self, found: Found, headed: Headed, body: Body, seen: dict[str, Any]) -> Prompt | None:
        """`seen`: what was found in this head before (`PromptCall`)."""
        ...

    def answer(self, prompt: Prompt, future: asyncio.Future[Any]) -> list[Buffer]:
        """The whole answer, status line included."""
        ...

    def left(self, prompt: Prompt) -> None:
        """The client of a request under way has gone: it is not answered."""
        ...


class _Arriving(NamedTuple):
    """A request of which the body is still to come, and of which aiohttp knows nothing."""

    taken: Taken
    head: bytes
    body: StraightBody


class Connection(web.RequestHandler):
    """`waiting`: the task of a long poll, cancelled when the client goes. `long_head`: the head just read exceeded
    its bound and came in one piece, so that only the dispatcher can refuse it."""

    __slots__ = ("_again", "_arriving", "_at_hand", "_begun", "_bounds", "_head_bytes", "_head_since", "_held",
                 "_place", "_prompting", "_prompts", "_refused", "_stall_bytes", "_stall_since", "_straight",
                 "_strange", "_watched", "long_head", "waiting")  # fmt: skip

    def __init__(
        self, manager: web.Server, bounds: Bounds, prompts: Prompts, watched: set[Connection], refused: bool
    ) -> None:
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
        # The parser stops at as many requests, and counts one that was taken before all of its body was there: it would
        # keep one back while the queue has room, and nobody would ask for it.
        self._max_msg_queue_size = MAX_MSG_QUEUE_SIZE - 1
        self._refused = refused
        self._head_since: float | None = loop.time()
        self._head_bytes = 0
        self._begun = False
        self._stall_since: float | None = None
        self._stall_bytes = 0
        self._place: Straight | None = None  # made for the first large body
        self._straight: StraightBody | None = None  # of a request that aiohttp knows of
        self._arriving: _Arriving | None = None
        self._at_hand: tuple[StreamReader, bytes] | None = None
        self._prompts = prompts
        self._prompting: Prompt | None = None  # the answer to a request is under way without a task
        self._held = b""  # what came meanwhile
        self._again: Again | None = None  # the head of the last request, when that was answered so
        self._strange = 0  # of those answered so, how many had another head than the one before
        self._watched = watched
        self.long_head = False
        self.waiting: asyncio.Task[object] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._keepalive_handle is not None:  # a first request that does not come is seen by the sweep
            self._keepalive_handle.cancel()
            self._keepalive_handle = None
        self._watched.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._watched.discard(self)
        self._arriving = self._place = None
        self.end_waiting()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watched.add(self)

    def end_waiting(self) -> None:
        """Cancel the long poll that waits here, if one does."""
        if self.waiting is not None:
            self.waiting.cancel()
        if self._prompting is not None and self._prompting.leave is not None:
            self._prompting.leave()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._refuse()
            return
        if self._prompting is not None:
            self._hold(data)
            return
        waiter = self._waiter
        idle = not self._messages and self._current_request is None if waiter is None else not waiter.done()
        if self._again is not None:
            if idle and self._go_again(self._again, data):
                return
            self._again = None
        if data and idle:  # without data, a body that is being read calls
            self._waiter = None  # aiohttp's task is not woken where a prompt answer spares it
            super().data_received(data)
            self._waiter = waiter  # None: the task has not begun, and will look for messages first
            if self._messages and not self._go_promptly(data) and waiter is not None:
                waiter.set_result(None)
        else:
            super().data_received(data)
        if data and self._messages and not self._messages[-1][1].is_eof():
            self._go_straight(data)
        waiter = self._waiter
        awaited = waiter is not None and not waiter.done() and self._prompting is None
        # the first bytes may come before aiohttp's own task has begun to wait for a request
        self._begun = self._begun or awaited or bool(self._messages) or self._prompting is not None
        if awaited or not self._begun:
            if data:
                self._head_goes_on(len(data))
        elif self._head_since is not None:
            self.long_head = self._head_bytes + len(data) > self._bounds.header_bytes
            self._head_since = None
            self._head_bytes = 0
        elif len(data) > self._bounds.header_bytes:
            self.long_head = True

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp calls this at every read of a body; the parser holds something back only when reading was paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def _go_promptly(self, data: bytes) -> bool:
        """Answer the request just read without a task, if its route can."""
        message, content = self._messages[0]
        if (
            len(self._messages) > 1
            or isinstance(message, _ErrInfo)
            or not content.is_eof()
            or message.should_close
            or message.version != HttpVersion11
            or len(data) > PROMPT_BYTES
            or self._head_bytes + len(data) - content.total_bytes > self._bounds.header_bytes
            or self._paused
            or self._close
            or self._force_close
        ):
            return False
        found = self._prompts.route_of(message.method, message.path)
        if found is None:
            return False
        body = content.read_nowait()
        seen: dict[str, Any] = {}
        prompt = self._prompts.begin(found, message, body, seen)
        if prompt is None:
            self._at_hand = (content, body)
            return False
        self._messages.popleft()
        assert self._parser is not None
        self._parser.message_consumed()
        self._under_way(prompt)
        self._remember(found, message, data, len(body), len(body), seen)
        return True

    def _remember(
        self, found: Found, message: RawRequestMessage, data: bytes, there: int, length: int, seen: dict[str, Any]
    ) -> None:
        """That head as one that may come again."""
        self._strange += 1
        if not self._head_bytes and (self._strange <= STRANGE_MOST or not self._strange % STRANGE_EACH):
            self._again = again_of(found, message, data, there, length, seen)

    def _go_again(self, again: Again, data: bytes) -> bool:
        """Answer a request with the last one's head, if `data` is one. The parser is between two requests: it has seen
        all of that last one, and nothing since."""
        taken = again.taken_from(data, self._prompts.route_of)
        if taken is None or self._paused or self._close or self._force_close:
            return False
        if len(taken.body) < taken.size:
            return self._arrive(taken, data)
        prompt = self._prompts.begin(taken.found, taken, taken.body, taken.seen)
        if prompt is None:
            return False
        self._strange = 0
        self._under_way(prompt)
        return True

    def _arrive(self, taken: Taken, data: bytes) -> bool:
        """Receive the rest of a large body, of which aiohttp need not know."""
        if not StraightBody.is_due(taken.size) or self._reading_paused:
            return False
        body = StraightBody(taken.size, taken.body)
        self._arriving = _Arriving(taken, data[: len(data) - len(taken.body)], body)
        self._watched.add(self)
        self._receive(body, quick=True)
        return True

    def body_received(self, body: StraightBody) -> None:
        if self._arriving is None:
            if body.content is not None:  # else the connection is being closed
                self._end_content(body.content)
            return
        taken = self._arriving.taken
        prompt = self._prompts.begin(taken.found, taken, body.view, taken.seen)
        if prompt is None:
            self.tell()
        else:
            self._arriving = None
            self._strange = 0
            self._under_way(prompt)

    def tell(self) -> None:
        """Let aiohttp know of the request that is arriving, if there is one: it goes the usual way from now on."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        self._again = None
        if self._place is not None:
            self._place.slow()
        super().data_received(arriving.head)
        if not self._messages:
            return
        body = self._straight = arriving.body
        body.content = self._messages[-1][1]
        if body.whole:
            self._end_content(body.content)

    def _end_content(self, content: StreamReader) -> None:
        """The parser still counts the bytes of a body that it never saw: the next request gets another one."""
        content.feed_eof()
        if self.transport is not None:
            self._parser = self._new_parser()

    def _receive(self, body: StraightBody, *, quick: bool = False) -> None:
        assert self.transport is not None
        if self._place is None:
            self._place = Straight(self, self.transport)
        self._place.receive(body, quick=quick)

    def _under_way(self, prompt: Prompt) -> None:
        assert self._manager is not None
        self._manager.requests_count += 1
        self._keepalive = True
        self._prompting = prompt
        prompt.future.add_done_callback(partial(self._answer_promptly, prompt))

    def _answer_promptly(self, prompt: Prompt, future: asyncio.Future[Any]) -> None:
        self._prompting = None
        transport = self.transport
        gone = transport is None or transport.is_closing()
        if gone and prompt.leave is not None:
            self._prompts.left(prompt)
            if prompt.lost is not None and not future.cancelled() and future.exception() is None:
                prompt.lost()
            return
        answer = self._prompts.answer(prompt, future)
        if transport is None or gone:
            return
        if len(answer) == 1:
            transport.write(answer[0])
        else:
            transport.writelines(answer)
        self._idle_from_now()
        if self._held:
            held, self._held = self._held, b""
            transport.resume_reading()
            self.data_received(held)

    def _idle_from_now(self) -> None:
        self._next_keepalive_close_time = self._shared(self._loop.time() + self._bounds.idle_seconds)
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)

    def _shared(self, time: float) -> float:
        return end_of_step(time, self._bounds.idle_seconds / IDLE_STEP)

    def _process_keepalive(self) -> None:
        """aiohttp's timer, which knows nothing of a request that has no task: the idle time begins with its answer."""
        if self._prompting is None and self._arriving is None:
            self._next_keepalive_close_time = self._shared(self._next_keepalive_close_time)  # by aiohttp, it is not
            super()._process_keepalive()
        else:
            self._keepalive_handle = None

    def _hold(self, data: bytes) -> None:
        """More requests of a client that still waits for an answer: it gets that first."""
        self._held += data
        if len(self._held) > READ_BYTES and self.transport is not None:
            self.transport.pause_reading()

    def _go_straight(self, data: bytes) -> None:
        """A head came without all of its body: when that is large, receive the rest past aiohttp, from now on.

        Not while another request of this connection waits or is handled, of which a client may send many.
        """
        message, content = self._messages[-1]
        if isinstance(message, _ErrInfo):
            return
        size = int(message.headers.get("Content-Length", 0))  # the parser has checked it
        if not StraightBody.is_due(size):
            return
        before = self._straight  # its request has ended when aiohttp has shut its body
        alone = len(self._messages) == 1 and self._current_request is None
        if not alone or (before is not None and before.content is not None and before.content.exception() is None):
            return
        if self._reading_paused or self.transport is None:  # paused: the parser holds some back
            return
        first = content.read_nowait()
        self._straight = StraightBody(size, first, content)
        self._receive(self._straight)
        if "Expect" in message.headers:
            return  # who waits to be asked for the body is asked by aiohttp's task
        found = self._prompts.route_of(message.method, message.path)
        if found is not None and found[0].large:
            self._remember(found, message, data, len(first), size, {})

    def taken(self, request: web.BaseRequest) -> StraightBody | bytes | None:
        """The body of `request`, when aiohttp has it no more; asked for once."""
        straight = self._straight
        if straight is not None and straight.content is request.content:
            self._straight = None
            return straight
        if self._at_hand is not None:
            (content, body), self._at_hand = self._at_hand, None
            if content is request.content:
                return body
        return None

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
            self._watched.add(self)
        self._head_bytes += size
        if self._head_bytes > self._bounds.header_bytes:
            self.end_with(headers_too_large(self._bounds.header_bytes))

    def sweep(self, now: float) -> None:
        """Called about every second while it is watched: end what has taken too long."""
        transport = self.transport
        if transport is None:
            return
        since = self._head_since
        if self._arriving is not None:
            if now - self._arriving.body.since > PROMPT_SECONDS:
                self.tell()
        elif self._refused:
            if since is not None and now - since > REFUSED_SECONDS:
                self._refuse()
        elif since is not None and now - since > self._bounds.header_seconds:
            if self._head_bytes:
                self.end_with(RequestTimeout("request_timeout", "the request's head came too slowly"))
            else:
                self.force_close()
        elif self.writing_paused:
            self._sweep_stalled(now, transport)
        else:
            self._stall_since = None
            if since is None:
                self._watched.discard(self)

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


def end_of_step(time: float, step: float) -> float:
    """The end of the step that `time` is in, which is its own: a millionth of a step past an end is that end still."""
    return ceil(time / step - 1e-6) * step


def headers_too_large(limit_bytes: int) -> HeadersTooLarge:
    return HeadersTooLarge("headers_too_large", f"the request's head is larger than {limit_bytes} bytes")
