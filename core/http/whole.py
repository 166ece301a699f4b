"""A small answer that is written to the socket in one piece: `whole`.

aiohttp's `Response` collects headers in a multidict, prepares them and writes them through a stream writer: a quarter
of what a request with one small message costs. An answer of status 200 with a short body of one media type, to a
request over HTTP/1.1 that is not HEAD, needs none of it. Everything else goes the usual way.
"""

from __future__ import annotations

from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time

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
        assert self._request is not None and not data
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        head = _HEAD.format(
            self._media_type, len(self._whole_body), rfc822_formatted_time(), _CLOSE if self._closes else ""
        )
        transport.write(head.encode("latin-1") + self._whole_body)
        if self._request.protocol.writing_paused:
            await self._request.protocol._drain_helper()


def whole(request: web.BaseRequest, body: bytes, media_type: str = JSON) -> web.StreamResponse:
    """`body` as the answer to `request`, status 200."""
    if request.version == HttpVersion11 and request.method != "HEAD":
        return _Whole(body, media_type)
    return web.Response(body=body, headers={"Content-Type": media_type})
