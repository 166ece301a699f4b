"""A store over HTTP, as its callers see it: `RemoteStore`, the counterpart of `store.server`.

Calls are one POST each. `receive`, and `read` when it waits, share one WebSocket to the store: it is opened when
first needed and again after it closed; what waited on a closed one fails with Unavailable(store_unavailable).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
from aiohttp import WSMsgType

from millpond.core import limits
from millpond.core.errors import Internal, MillpondError, Unavailable, from_info
from millpond.core.http import rpc
from millpond.core.http.client import HttpClient
from millpond.core.http.secret import SECRET_HEADER
from millpond.core.tasks import Tasks
from millpond.store import waiting
from millpond.store.client import (
    AppendRequest,
    AppendResult,
    FindRequest,
    Grant,
    GroupRef,
    LagRequest,
    LagResult,
    LeaseRequest,
    ProducerState,
    QueueEnds,
    ReadRequest,
    ReadResult,
    ReceiveRequest,
    ReceiveResult,
    SeekRequest,
    SeekResult,
    SettleRequest,
    SettleResult,
    StoreClient,
    StoredFrame,
    StoreStatus,
    TimeRequest,
    TimeResult,
)

OPEN_SECONDS = limits.CALL_MS / 1000  # a store that has accepted may be slow to answer

_log = logging.getLogger("millpond.store.remote")


class RemoteStore:
    """`StoreClient` of the store at `base_url` (`http://host:port`). `close` ends its connections."""

    def __init__(self, base_url: str, secret: str) -> None:
        self._client = HttpClient()
        caller = rpc.Caller(base_url, secret, self._client)
        self._calls = rpc.remote(StoreClient, caller)  # type: ignore[type-abstract]  # the interface itself is meant
        self._waiting = _WaitingSocket(base_url.rstrip("/") + waiting.PATH, secret, self._client, self._calls)

    async def append(self, request: AppendRequest) -> AppendResult:
        return await self._calls.append(request)

    async def read(self, request: ReadRequest) -> ReadResult:
        if not request.wait_ms:
            return await self._calls.read(request)
        answer: ReadResult = await self._waiting.call(waiting.READ, request, request.wait_ms)
        return answer

    async def queues(self, queue_ids: list[int]) -> list[QueueEnds]:
        return await self._calls.queues(queue_ids)

    async def offsets_at(self, request: TimeRequest) -> TimeResult:
        return await self._calls.offsets_at(request)

    async def find(self, request: FindRequest) -> list[StoredFrame]:
        return await self._calls.find(request)

    async def receive(self, request: ReceiveRequest) -> ReceiveResult:
        answer: ReceiveResult = await self._waiting.call(waiting.RECEIVE, request, request.wait_ms)
        return answer

    async def lease(self, request: LeaseRequest) -> Grant:
        return await self._calls.lease(request)

    async def settle(self, request: SettleRequest) -> SettleResult:
        return await self._calls.settle(request)

    async def seek(self, request: SeekRequest) -> SeekResult:
        return await self._calls.seek(request)

    async def lag(self, request: LagRequest) -> LagResult:
        return await self._calls.lag(request)

    async def producers(self, queue_ids: list[int], producer_id: str) -> list[ProducerState]:
        return await self._calls.producers(queue_ids, producer_id)

    async def close_producer(self, queue_ids: list[int], producer_id: str) -> None:
        await self._calls.close_producer(queue_ids, producer_id)

    async def seal(self, topic_id: int, deadline_ms: int) -> dict[int, int]:
        return await self._calls.seal(topic_id, deadline_ms)

    async def delete_topic(self, topic_id: int) -> None:
        await self._calls.delete_topic(topic_id)

    async def delete_group(self, group: GroupRef) -> None:
        await self._calls.delete_group(group)

    async def status(self) -> StoreStatus:
        return await self._calls.status()

    async def close(self) -> None:
        await self._waiting.close()
        await self._client.close()


class _WaitingSocket:
    """The one socket: calls by number, answers to whom they belong, leases of cancelled receives given back."""

    def __init__(self, url: str, secret: str, client: HttpClient, calls: StoreClient) -> None:
        self._url = url
        self._secret = secret
        self._client = client
        self._calls = calls
        self._methods = rpc.methods_of(StoreClient)
        self._next = 0
        self._pending: dict[int, tuple[int, Any, asyncio.Future[Any]]] = {}
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._opening = asyncio.Lock()
        self._tasks = Tasks()

    async def call(self, kind: int, request: Any, wait_ms: int) -> Any:
        """The answer to `request`. Cancelling this cancels the call in the store."""
        method = self._methods[waiting.METHODS[kind]]
        seconds = (method.patience_ms((request,)) + rpc.MARGIN_MS) / 1_000
        socket = await self._open()
        self._next = number = (self._next + 1) & 0xFFFF_FFFF
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = (kind, request, future)
        try:
            async with asyncio.timeout(seconds):
                await socket.send_bytes(waiting.join(number, kind, rpc.pack((request,))), compress=0)
                return await future
        except TimeoutError as error:
            raise Unavailable("unknown_outcome", f"{method.name}: no answer within {seconds:.0f} s") from error
        except ConnectionError as error:
            self._pending.pop(number, None)
            raise _away(self._url) from error
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:  # answered in the same turn
                self._tasks.spawn(self._release(request, future.result()), "release of leases")
            raise
        finally:
            if not future.done() or future.cancelled():
                self._cancel(number, socket)

    def _cancel(self, number: int, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Nobody waits any more: say so, and keep the number until the store has answered to it."""
        if number in self._pending and not socket.closed:
            self._tasks.spawn(_send_quietly(socket, waiting.join(number, waiting.CANCEL)), "cancel of a waiting call")

    async def _open(self) -> aiohttp.ClientWebSocketResponse:
        """Raises Unavailable(store_unavailable) OPEN_SECONDS from now at the latest, however many wait for it."""
        if self._socket is not None and not self._socket.closed:
            return self._socket
        try:
            async with asyncio.timeout(OPEN_SECONDS), self._opening:
                if self._socket is None or self._socket.closed:
                    self._socket = await self._client.session().ws_connect(
                        self._url,
                        headers={SECRET_HEADER: self._secret},
                        heartbeat=waiting.HEARTBEAT_SECONDS,
                        max_msg_size=rpc.BODY_BYTES,
                    )
                    self._tasks.spawn(self._listen(self._socket), "waiting socket")
                return self._socket
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise _away(self._url) from error

    async def _listen(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                self._take(message.data)
        finally:
            pending, self._pending = self._pending, {}
            for _, _, future in pending.values():
                if not future.done():
                    future.set_exception(_away(self._url))
            await socket.close()

    def _take(self, message: bytes) -> None:
        number, kind, body = waiting.split(message)
        found = self._pending.pop(number, None)
        if found is None:
            raise ValueError(f"an answer to {number}, which was never asked")
        method_kind, request, future = found
        if kind == waiting.ANSWER:
            answer = self._methods[waiting.METHODS[method_kind]].answer.unpack(body)
            if future.done():
                self._tasks.spawn(self._release(request, answer), "release of leases")
            else:
                future.set_result(answer)
        elif not future.done():
            future.set_exception(_error_of(kind, body))

    async def _release(self, request: Any, answer: Any) -> None:
        try:
            await waiting.release(self._calls, request, answer)
        except MillpondError as error:
            _log.warning("leases that reached nobody were not given back, they will run out: %s", error)

    async def close(self) -> None:
        await self._tasks.close()
        if self._socket is not None:
            await self._socket.close()


def _error_of(kind: int, body: bytes) -> MillpondError:
    if kind == waiting.ERROR:
        return from_info(waiting.error_decoder.unpack(body))
    if kind == waiting.ENDED:
        return Unavailable("shutting_down", "the store ended the call")
    return Internal("internal", f"an answer of kind {kind}")


async def _send_quietly(socket: aiohttp.ClientWebSocketResponse, message: bytes) -> None:
    try:
        await socket.send_bytes(message, compress=0)
    except ConnectionError:
        return  # the socket's end cancels the call, too


def _away(url: str) -> Unavailable:
    return Unavailable("store_unavailable", f"{url.removesuffix(waiting.PATH)} cannot be reached")
