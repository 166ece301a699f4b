"""A store over HTTP: `routes(store)` for an internal listener.

Everything of `StoreClient` is one POST each (`core.http.rpc`); calls that wait share one WebSocket for each proxy
(`store.waiting` has its grammar), so that ten thousand long polls are not ten thousand connections.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import google_crc32c
from aiohttp import WSMsgType, web

from millpond.core import limits
from millpond.core.errors import BadRequest, Internal, MillpondError, TooManyRequests
from millpond.core.http import rpc
from millpond.core.http.call import Call, answer
from millpond.core.http.routing import Route
from millpond.core.tasks import Tasks
from millpond.store import waiting
from millpond.store.client import AppendRequest, AppendResult, StoreClient

CALL_BYTES = 256 * limits.KIB  # of one waiting call: a receive names its queues

_log = logging.getLogger("millpond.store.server")


def routes(store: StoreClient) -> list[Route]:
    """All routes of a store's listener: its calls, the waiting socket, /healthz and /readyz."""
    releases = Tasks()

    async def wait(call: Call[Any]) -> web.StreamResponse:
        return await _Socket(store, releases).serve(call.request)

    async def healthz(call: Call[Any]) -> web.StreamResponse:
        return answer({"status": "ok"})

    async def readyz(call: Call[Any]) -> web.StreamResponse:
        status = await store.status()
        return answer({"ready": status.ready}, 200 if status.ready else 503)

    return [
        *rpc.serve(StoreClient, _Arriving(store)),  # type: ignore[type-abstract]  # the interface itself is meant
        Route(method="GET", path=waiting.PATH, handler=wait, scope="any", waits=True, hidden=True),
        Route(method="GET", path="/healthz", handler=healthz, hidden=True),
        Route(method="GET", path="/readyz", handler=readyz, hidden=True),
    ]


class _Arriving:
    """`store`, for calls that came over a network: a payload is compared with the checksum its proxy made of it.

    In one process the bytes have not moved since, so nobody compares them again (33 us a MiB).
    """

    def __init__(self, store: StoreClient) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def append(self, request: AppendRequest) -> AppendResult:
        if any(google_crc32c.value(one.payload) != one.payload_crc for one in request.appends):
            raise BadRequest("malformed_body", "a payload was damaged on its way to the store")
        return await self._store.append(request)


class _Socket:
    """One proxy's waiting calls. `releases` outlives the socket: it gives back leases that could not be sent."""

    def __init__(self, store: StoreClient, releases: Tasks) -> None:
        self._store = store
        self._releases = releases
        self._methods = rpc.methods_of(StoreClient)
        self._socket = web.WebSocketResponse(
            heartbeat=waiting.HEARTBEAT_SECONDS, compress=False, max_msg_size=CALL_BYTES
        )
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._tasks = Tasks()

    async def serve(self, request: web.BaseRequest) -> web.WebSocketResponse:
        await self._socket.prepare(request)
        try:
            async for message in self._socket:
                if message.type is not WSMsgType.BINARY:
                    break
                await self._take(message.data)
        except ValueError as error:
            _log.warning("a proxy's waiting socket is closed: %s", error)
        finally:
            await self._tasks.close()
        await self._socket.close()
        return self._socket

    async def _take(self, message: bytes) -> None:
        number, kind, body = waiting.split(message)
        if kind == waiting.CANCEL:
            task = self._calls.get(number)
            if task is not None:
                task.cancel()
        elif kind not in waiting.METHODS or number in self._calls:
            raise ValueError(f"message {number} of kind {kind}")
        elif len(self._calls) >= limits.WAITERS:
            error = TooManyRequests("too_many_waiters", f"{limits.WAITERS} calls of this proxy wait already")
            await self._send(number, waiting.ERROR, rpc.pack(error.info()))
        else:
            task = self._tasks.spawn(self._run(number, waiting.METHODS[kind], body), f"waiting call {number}")
            self._calls[number] = task
            task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _run(self, number: int, name: str, body: bytes) -> None:
        try:
            (request,) = self._arguments(name, body)
            result = await getattr(self._store, name)(request)
        except asyncio.CancelledError:
            await self._send(number, waiting.ENDED)
            raise
        except MillpondError as error:
            await self._send(number, waiting.ERROR, rpc.pack(error.info()))
        except Exception:  # noqa: BLE001 - a bug in the store: logged here, told to the proxy without internals
            _log.exception("a waiting %s failed", name)
            failure = Internal("internal", "something went wrong in the store; it was logged")
            await self._send(number, waiting.ERROR, rpc.pack(failure.info()))
        else:
            await self._deliver(number, request, result)

    def _arguments(self, name: str, body: bytes) -> Any:
        try:
            return self._methods[name].arguments.unpack(body)
        except ValueError as error:
            raise BadRequest("malformed_body", f"{name}: {error}") from error

    async def _deliver(self, number: int, request: Any, result: Any) -> None:
        """Send an answer; leases of one that cannot be sent would keep their messages from others: give them back."""
        delivered = False
        try:
            delivered = await self._send(number, waiting.ANSWER, rpc.pack(result))
        finally:
            if not delivered:
                self._releases.spawn(waiting.release(self._store, request, result), "release of leases")

    async def _send(self, number: int, kind: int, segments: rpc.Segments | None = None) -> bool:
        """Whether it went out (into the socket: what is lost after that runs out as a lease)."""
        if self._socket.closed:
            return False
        try:
            await self._socket.send_bytes(waiting.join(number, kind, segments), compress=False)
        except ConnectionError:
            return False
        return True
