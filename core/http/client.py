"""The HTTP client of internal calls: kept-alive connections to the parts, with bounds that fit calls between them.

Bounded: connections to each peer, time to get one, time to connect, size of an answer. Calls go over connections of
our own (`wire.py`); a WebSocket goes over a session of aiohttp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import pyarrow as pa
from aiohttp import ClientTimeout, DummyCookieJar, TCPConnector

from millpond.core import limits
from millpond.core.clock import Clock, SystemClock
from millpond.core.http.call import Body
from millpond.core.http.wire import Bounds, Buffers, CannotConnect, Wires

CONNECTIONS_PER_PEER = 64  # calls at once; waiting reads are multiplexed and take one more
CONNECT_SECONDS = 3.0  # a peer that does not accept within this is away
KEEP_SECONDS = 30.0  # below the peer's IDLE_SECONDS, so that a request never races the peer's close
READ_BUFFER_BYTES = 1 << 20
BOUNDS = Bounds(CONNECTIONS_PER_PEER, CONNECT_SECONDS, KEEP_SECONDS, limits.CLIENT_ANSWER_BYTES)


class Answer(NamedTuple):
    """`media_type` without parameters."""

    status: int
    media_type: str
    body: Body


class HttpClient:
    """Made anywhere, used inside a running loop. `close` ends it; a closed one raises ConnectionError."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._session: aiohttp.ClientSession | None = None
        self._peers: dict[str, Wires] = {}
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
        place = f"{where.scheme}://{where.netloc}"
        peer = self._peers.get(place)
        if peer is None:
            peer = self._peers[place] = Wires(place, self._clock, BOUNDS)
        sent = Buffers(segments)
        status, told, body = await peer.ask("POST", where.path, headers, sent, seconds, answer_bytes=answer_bytes)
        media_type = told.get("content-type", "").partition(";")[0].strip().lower()
        return Answer(status, media_type, body if isinstance(body, bytes) else memoryview(body).cast("B"))

    async def close(self) -> None:
        self._closed = True
        for peer in self._peers.values():
            await peer.close()
        if self._session is not None:
            await self._session.close()
