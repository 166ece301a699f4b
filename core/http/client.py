"""The HTTP client of internal calls: one aiohttp session with bounds that fit calls between the parts.

Bounded: connections in all and for each peer, time to get one, time to connect, size of an answer. No cookies, no
redirects, no proxies from the environment, no decompression. Timeouts of whole calls are the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import ClientTimeout, DummyCookieJar, TCPConnector

CONNECTIONS = 256  # to all peers; waiting reads are multiplexed and take one
CONNECTIONS_PER_PEER = 64
CONNECT_SECONDS = 3.0  # a peer that does not accept within this is away
KEEP_SECONDS = 30.0  # below the peer's IDLE_SECONDS, so that a request never races the peer's close
READ_BUFFER_BYTES = 1 << 20


class HttpClient:
    """A session made on first use, inside the running loop. `close` ends it; a closed one raises ConnectionError."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ConnectionError("the client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=TCPConnector(
                    limit=CONNECTIONS, limit_per_host=CONNECTIONS_PER_PEER, keepalive_timeout=KEEP_SECONDS
                ),
                timeout=ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=READ_BUFFER_BYTES,
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
            )
        return self._session

    async def post(
        self, url: str, data: Any, headers: Mapping[str, str], seconds: float, answer_bytes: int
    ) -> tuple[int, str, bytes]:
        """(status, media type, body). Raises aiohttp.ClientError, TimeoutError, ValueError (answer too large)."""
        async with (
            asyncio.timeout(seconds),
            self.session().post(url, data=data, headers=headers, allow_redirects=False) as response,
        ):
            if response.content_length is None or response.content_length > answer_bytes:
                response.close()
                raise ValueError(f"{url}: an answer of {response.content_length} bytes, at most {answer_bytes}")
            return response.status, response.content_type, await response.read()

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
