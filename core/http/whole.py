"""An answer that is at hand as a whole: in one piece (`whole`), or in several that are not put together (`pieces`).

aiohttp's `Response` collects headers in a multidict, prepares them and writes them through a stream writer: a quarter
of what a request with one small message costs; and it joins head and body, which copies a large one once more. An
answer of status 200 with a body of one media type, to a request over HTTP/1.1 that is not HEAD, needs none of it.
Everything else goes the usual way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time

from millpond.core.gathered import Buffer
from millpond.core.http.bulk import Bulk, sliced

JSON = "application/json"
_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {}\r\nContent-Length: {}\r\nDate: {}\r\n{}\r\n"
_CLOSE = "Connection: close\r\n"


class _Whole(web.StreamResponse):
    """What aiohttp asks of a response, and no more."""

    def __init__(self, body: bytes, media_type: str) -> None:  # the base's own would make what is not needed
        self._whole_body = body
        self._media_type = media_type
        self._closes = False
        self._request: web.BaseRequest | None = None

    @property
    def status(self) -> int:
        return 200

    @property
    def keep_alive(self) -> bool | None:
        return not self._closes

    def force_close(self) -> None:
        self._closes = True

    async def prepare(self, request: web.BaseRequest) -> None:
        self._request = request
        self._closes = self._closes or not request.keep_alive

    async def write_eof(self, data: bytes = b"") -> None:
        assert not data
        transport = self._transport()
        transport.write(self._head(len(self._whole_body)) + self._whole_body)
        await self._drain()

    def _transport(self) -> asyncio.Transport:
        assert self._request is not None
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        return transport

    def _head(self, length: int) -> bytes:
        return head(self._media_type, length, closes=self._closes)

    async def _drain(self) -> None:
        """Until the socket has taken most of it."""
        assert self._request is not None
        if self._request.protocol.writing_paused:
            await self._request.protocol._drain_helper()


class _Pieces(_Whole):
    """The same for a body that stands in several buffers."""

    def __init__(self, body: Sequence[Buffer], media_type: str) -> None:
        super().__init__(b"", media_type)
        self._pieces = body
        self._bulk: Bulk | None = None

    def make_way(self, bulk: Bulk) -> None:
        self._bulk = bulk

    async def write_eof(self, data: bytes = b"") -> None:
        assert not data
        pieces, self._pieces = self._pieces, ()
        whole = [self._head(sum(map(len, pieces))), *pieces]
        slices = sliced(whole) if self._bulk is not None else iter((whole,))
        del pieces, whole  # what the socket has taken need not wait for the rest
        part = next(slices)
        for following in slices:
            assert self._bulk is not None
            self._write(part)
            part = following
            await self._bulk.pause()
            await self._drain()
        self._write(part)
        del part
        await self._drain()

    def _write(self, part: list[Buffer]) -> None:
        self._transport().writelines(part)


def head(media_type: str, length: int, *, closes: bool = False) -> bytes:
    """Of an answer of status 200, up to its body."""
    return _head(media_type, length, rfc822_formatted_time(), _CLOSE if closes else "")


@lru_cache(maxsize=256)
def _head(media_type: str, length: int, date: str, connection: str) -> bytes:
    """Answers with one message's result are of a few lengths: within a second most heads are the same."""
    return _HEAD.format(media_type, length, date, connection).encode("latin-1")


def whole(request: web.BaseRequest, body: bytes, media_type: str = JSON) -> web.StreamResponse:
    """`body` as the answer to `request`, status 200."""
    if request.version == HttpVersion11 and request.method != "HEAD":
        return _Whole(body, media_type)
    return web.Response(body=body, headers={"Content-Type": media_type})


def make_way(answer: web.StreamResponse, bulk: Bulk) -> None:
    """Let `answer`, if it is one in pieces, go in slices between other requests."""
    if isinstance(answer, _Pieces):
        answer.make_way(bulk)


def pieces(request: web.BaseRequest, body: Sequence[Buffer], media_type: str) -> web.StreamResponse:
    """The buffers of `body` (of bytes), one after another, as the answer to `request`, status 200. They are not
    copied, and must not change until they are sent."""
    if request.version == HttpVersion11 and request.method != "HEAD":
        return _Pieces(body, media_type)
    return web.Response(body=b"".join(body), headers={"Content-Type": media_type})
