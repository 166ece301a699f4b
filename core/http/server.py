"""A listener: aiohttp's low-level server under our router, with bounds (`connection.py`) and a graceful end.

One request: `_handle` finds the route, asks the gate who that is, runs the handler, and turns a `MillpondError` into
a problem answer. No Application, no UrlDispatcher, no access log: they cost more than the request.

    loopback:8080 -> Connection (bounds) -> HttpServer._handle -> Router.find -> Gate -> handler(Call)
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import itertools
import logging
import resource
from collections import Counter
from typing import Any, Protocol, cast

from aiohttp import web

from millpond.core.clock import Random
from millpond.core.errors import Internal, MillpondError, RequestTimeout, StartupError, TooLarge, Unavailable
from millpond.core.gathered import Buffer
from millpond.core.http.bulk import Bulk
from millpond.core.http.call import Body, Call, Principal
from millpond.core.http.connection import REFUSED_CONNECTIONS, Bounds, Connection, Prompts, headers_too_large
from millpond.core.http.problem import problem_response, raw_problem
from millpond.core.http.prompt import Encoded, Headed, Prompt, PromptCall
from millpond.core.http.routing import Found, Route, Router, Scope
from millpond.core.http.whole import head, make_way
from millpond.core.tasks import OnDeath, Tasks
from millpond.core.turns import turn

BACKLOG = 4_096  # connections the kernel holds until they are accepted
DRAIN_SECONDS = 10.0  # requests under way may take so long to end when the listener stops
OTHER_FILES = 512  # file descriptors kept for everything that is not a client connection

_log = logging.getLogger("millpond.http")


class Gate(Protocol):
    """Who may call. `known` is the quick answer without waiting, None when it has to be asked for (`admit`)."""

    def known(self, request: Headed, scope: Scope | None) -> Principal | None: ...

    async def admit(self, request: web.BaseRequest, scope: Scope | None) -> Principal:
        """Raises Unauthenticated, Forbidden, Unavailable."""
        ...


class HttpServer:
    """`requests`: how many answers of each status. `parts` is handed to the handlers, untouched."""

    def __init__(
        self,
        router: Router,
        gate: Gate,
        parts: Any,
        random: Random,
        bounds: Bounds | None = None,
        on_death: OnDeath | None = None,
    ) -> None:
        """`on_death` is told when the listener's own task dies: it can no longer bound its connections."""
        self._router = router
        self._gate = gate
        self._parts = parts
        self._bounds = bounds or Bounds()
        self._names = (f"{prefix}-{number}" for prefix in [random.bytes(6).hex()] for number in itertools.count(1))
        self._tasks = Tasks(on_death)
        self._server: _Server | None = None
        self._listener: asyncio.Server | None = None
        self._draining = False
        self._bulk = Bulk()
        self._prompting: set[asyncio.Future[Any]] = set()  # the loop alone would not keep what nobody else knows
        self.requests: Counter[int] = Counter()
        self.address = ""

    @property
    def connections(self) -> int:
        return 0 if self._server is None else self._server.count

    @property
    def draining(self) -> bool:
        return self._draining

    async def start(self, listen: str, shared: bool = False) -> None:
        """Listen on `host:port` (port 0: any); `address` is then `http://host:port`. Raises StartupError.

        `shared`: other processes of this user listen there, too; the kernel spreads connections over them.
        """
        host, port = split_listen(listen)
        raise_file_limit(self._bounds.connections + REFUSED_CONNECTIONS + OTHER_FILES)
        loop = asyncio.get_running_loop()
        self._server = _Server(self._handle, self._bounds, self)
        try:
            self._listener = await loop.create_server(
                self._server, host or None, port, backlog=BACKLOG, reuse_port=shared or None
            )
        except OSError as error:
            raise cannot_listen(listen, error) from error
        bound = self._listener.sockets[0].getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.address = f"http://{shown}:{bound[1]}"
        self._tasks.spawn(self._server.sweep(), "sweep of connections")

    async def stop(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Accept no more, end long polls with 503 shutting_down, let the rest finish for so long. Idempotent."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._server is not None:
            self._server.end_waiting()
            await self._end_prompts(drain_seconds)
            await self._server.drain(drain_seconds)
        await self._tasks.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call: Call[Any] | None = None
        try:
            if cast(Connection, request.protocol).long_head:
                _check_head(request, self._bounds.header_bytes)
            route, params = self._router.find(request.method, request.raw_path)
            scope = route.scope
            principal = self._gate.known(request, scope) or await self._gate.admit(request, scope)
            pause = self._bulk.pause if route.bulk else turn
            call = Call(request, params, self._parts, principal, self._names.__next__, self._bounds.pace, pause)
            if not route.bulk:
                self._bulk.other()
            response = await (self._wait(route, call) if route.waits else route.handler(call))
            if route.bulk:
                make_way(response, self._bulk)
        except MillpondError as error:
            response = self._refusal(request, error, call)
        except Exception as error:
            if request.transport is None:
                raise ConnectionResetError("the client has gone") from error
            response = self._failure(request, error, call)
        if self._draining:
            response.force_close()
        self.requests[response.status] += 1
        return response

    # -- prompt answers ------------------------------------------------------------------------------------------

    def route_of(self, method: str, target: str) -> Found | None:
        if method not in self._router.prompt_methods:
            return None
        try:
            found = self._router.find(method, target)
        except MillpondError:
            return None
        return found if found[0].prompt is not None else None

    def begin(self, found: Found, headed: Headed, body: Body, seen: dict[str, Any]) -> Prompt | None:
        """Whatever fails here has changed nothing: the usual way finds it again, logs what is a bug, and answers."""
        route, params = found
        assert route.prompt is not None
        if self._draining:
            return None
        try:
            principal = self._gate.known(headed, route.scope)
            if principal is None:
                return None
            prompt = route.prompt(PromptCall(headed.headers, params, body, self._parts, principal, seen))
        except Exception:  # noqa: BLE001 - see above
            return None
        if prompt is not None:
            self._prompting.add(prompt.future)
            self._bulk.other()
        return prompt

    def answer(self, prompt: Prompt, future: asyncio.Future[Any]) -> list[Buffer]:
        self.left(prompt)
        answer = self._outcome(prompt, future)
        if isinstance(answer, MillpondError):
            self.requests[answer.status] += 1
            return [raw_problem(answer, next(self._names), closes=self._draining)]
        self.requests[200] += 1
        if isinstance(answer, bytes):
            return [head(prompt.media_type, len(answer), closes=self._draining) + answer]
        return [head(prompt.media_type, sum(map(len, answer)), closes=self._draining), *answer]

    def left(self, prompt: Prompt) -> None:
        self._prompting.discard(prompt.future)

    def _outcome(self, prompt: Prompt, future: asyncio.Future[Any]) -> Encoded | MillpondError:
        if future.cancelled():
            return _shutting_down()
        try:
            return prompt.encode(future.result())
        except MillpondError as error:
            return error.with_traceback(None)  # its frames lead to the caller, which holds it: a circle with the body
        except Exception as error:  # noqa: BLE001 - as in `_handle`: a bug is logged and answered
            _log.error("a prompt answer failed", exc_info=error)
            return Internal("internal", "something went wrong here; it was logged")

    async def _end_prompts(self, seconds: float) -> None:
        """Until those under way are answered, or the time is up."""
        if self._prompting:
            await asyncio.wait(self._prompting, timeout=seconds)

    # -- long polls, errors --------------------------------------------------------------------------------------

    async def _wait(self, route: Route, call: Call[Any]) -> web.StreamResponse:
        """A long poll: cancelled by the connection's end, and ended with 503 when the listener stops."""
        if self._draining:
            raise _shutting_down()
        connection = cast(Connection, call.request.protocol)
        task = asyncio.current_task()
        assert task is not None
        connection.waiting = task
        try:
            return await route.handler(call)
        except asyncio.CancelledError:
            if not self._draining or call.request.transport is None:
                raise
            task.uncancel()
            raise _shutting_down() from None
        finally:
            connection.waiting = None

    def _refusal(self, request: web.BaseRequest, error: MillpondError, call: Call[Any] | None) -> web.Response:
        if isinstance(error, Internal):
            _log.error("%s %s: %s", request.method, request.raw_path[:200], error.detail, exc_info=error)
        response = problem_response(error, call.request_id if call else next(self._names))
        if isinstance(error, RequestTimeout | TooLarge):
            response.force_close()
        return response

    def _failure(self, request: web.BaseRequest, error: Exception, call: Call[Any] | None) -> web.Response:
        """A bug: logged with its trace under the request's id, and nothing of it in the answer."""
        name = call.request_id if call else next(self._names)
        _log.error("request %s %s %s failed", name, request.method, request.raw_path[:200], exc_info=error)
        return problem_response(Internal("internal", "something went wrong here; it was logged"), name)


class _Server(web.Server):
    """aiohttp's server, making our connections."""

    def __init__(self, handler: Any, bounds: Bounds, prompts: Prompts) -> None:
        super().__init__(handler)
        self._prompts = prompts
        self._bounds = bounds
        self._watched: set[Connection] = set()

    @property
    def count(self) -> int:
        return len(self._connections)

    def __call__(self) -> Connection:
        refused = len(self._connections) >= self._bounds.connections
        return Connection(self, self._bounds, self._prompts, self._watched, refused)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        if len(self._connections) >= self._bounds.connections + REFUSED_CONNECTIONS:
            transport.abort()
        super().connection_made(handler, transport)

    async def sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._bounds.header_seconds / 4, self._bounds.stall_seconds / 4))
            now = loop.time()
            for connection in list(self._watched):
                connection.sweep(now)

    def end_waiting(self) -> None:
        for connection in list(self._connections):
            cast(Connection, connection).end_waiting()
            cast(Connection, connection).tell()

    async def drain(self, seconds: float) -> None:
        self.end_waiting()
        self.pre_shutdown()
        await self.shutdown(seconds)


def _check_head(request: web.BaseRequest, limit_bytes: int) -> None:
    """The head came together with other bytes: count its own."""
    cast(Connection, request.protocol).long_head = False
    size = len(request.raw_path) + sum(len(name) + len(value) + 4 for name, value in request.raw_headers)
    if size > limit_bytes:
        raise headers_too_large(limit_bytes)


def _shutting_down() -> Unavailable:
    return Unavailable("shutting_down", "this process is stopping: ask again, another one answers")


def split_listen(listen: str) -> tuple[str, int]:
    """`host:port`, `[v6]:port` or `:port` (every address). Raises StartupError."""
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise StartupError(f"cannot listen on {listen!r}: not host:port", "give it as 127.0.0.1:8080 or [::1]:8080")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(listen: str) -> bool:
    """Whether only this machine can connect there."""
    host = split_listen(listen)[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def raise_file_limit(wanted: int) -> None:
    """RLIMIT_NOFILE up to `wanted` or the hard limit: usual soft limits (1,024) end at a thousand clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def cannot_listen(listen: str, error: OSError) -> StartupError:
    remedies = {
        errno.EADDRINUSE: "another process listens there: stop it, or choose another port",
        errno.EACCES: "ports below 1024 need a privilege: choose a higher one",
        errno.EADDRNOTAVAIL: "this machine has no such address: choose one of its own, or 127.0.0.1",
    }
    remedy = remedies.get(error.errno or 0, "check the address and the port")
    return StartupError(f"cannot listen on {listen}: {error.strerror or error}", remedy)
