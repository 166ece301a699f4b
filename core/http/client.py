"""The HTTP client of internal calls: kept-alive connections to the parts, with bounds that fit calls between them.

Bounded: connections to each peer, time to get one, time to connect, size of an answer. No cookies, no redirects, no
proxies from the environment, no decompression. Timeouts of whole calls are the caller's. Calls go over connections of
our own (`exchange.py`); a WebSocket goes over a session of aiohttp.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import pyarrow as pa
from aiohttp import ClientTimeout, DummyCookieJar, TCPConnector

from millpond.core.http.exchange import Answer, Exchange

CONNECTIONS_PER_PEER = 64  # calls at once; waiting reads are multiplexed and take one more
CONNECT_SECONDS = 3.0  # a peer that does not accept within this is away
KEEP_SECONDS = 30.0  # below the peer's IDLE_SECONDS, so that a request never races the peer's close
READ_BUFFER_BYTES = 1 << 20


class CannotConnect(ConnectionError):
    """The peer does not accept connections: nothing was sent."""


class HttpClient:
    """Made anywhere, used inside a running loop. `close` ends it; a closed one raises ConnectionError."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._closed = False

    def session(self) -> aiohttp.ClientSession:
        """For WebSockets."""
        if self._closed:
            raise ConnectionError("the client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=TCPConnector(limit=0),
                timeout=ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=READ_BUFFER_BYTES,
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
        return self._session

    async def post(
        self,
        url: str,
        segments: Sequence[bytes | pa.Buffer],
        headers: Mapping[str, str],
        seconds: float,
        answer_bytes: int,
    ) -> Answer:
        """Raises CannotConnect, ConnectionError (the outcome is unknown), TimeoutError, ValueError (no answer of ours,
        or too large a one). Never repeats a request."""
        if self._closed:
            raise CannotConnect("the client is closed")
        where = urlsplit(url)
        place = (where.hostname or "", where.port or 80)
        peer = self._peers.get(place)
        if peer is None:
            peer = self._peers[place] = _Peer(*place)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length = sum(map(len, segments))
        head = f"POST {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\n{lines}Content-Length: {length}\r\n\r\n"
        async with asyncio.timeout(seconds):
            return await peer.post(head.encode("latin-1"), segments, answer_bytes)

    async def close(self) -> None:
        self._closed = True
        for peer in self._peers.values():
            peer.close()
        if self._session is not None:
            await self._session.close()


class _Idle(NamedTuple):
    exchange: Exchange
    since: float


class _Peer:
    """The connections to one address; the one used last is used next, so that the others may go."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: deque[_Idle] = deque()
        self._busy: set[Exchange] = set()
        self._turns = asyncio.Semaphore(CONNECTIONS_PER_PEER)
        self._closed = False

    async def post(self, head: bytes, segments: Sequence[bytes | pa.Buffer], answer_bytes: int) -> Answer:
        async with self._turns:
            exchange = self._kept() or await self._connected()
            self._busy.add(exchange)
            try:
                return await exchange.post(head, segments, answer_bytes)
            finally:
                self._busy.discard(exchange)
                if exchange.usable and not self._closed:
                    self._idle.append(_Idle(exchange, asyncio.get_running_loop().time()))
                else:
                    exchange.close()

    def _kept(self) -> Exchange | None:
        """One that is still good; those that have idled too long are ended."""
        oldest = asyncio.get_running_loop().time() - KEEP_SECONDS
        while self._idle and (self._idle[0].since < oldest or not self._idle[0].exchange.usable):
            self._idle.popleft().exchange.close()
        while self._idle:
            exchange = self._idle.pop().exchange
            if exchange.usable:
                return exchange
        return None

    async def _connected(self) -> Exchange:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                loop = asyncio.get_running_loop()
                _, exchange = await loop.create_connection(Exchange, self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise CannotConnect(f"{self._host}:{self._port} cannot be reached") from error
        return exchange

    def close(self) -> None:
        self._closed = True
        for exchange in [*self._busy, *(one.exchange for one in self._idle)]:
            exchange.close()
        self._idle.clear()
