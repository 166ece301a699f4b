"""The interface's own description: /openapi.json, and /docs to browse it."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from millpond import __version__
from millpond.core.http.docs_page import CONTENT_SECURITY_POLICY, page
from millpond.core.http.openapi import document
from millpond.core.http.routing import Route
from millpond.proxy.parts import ProxyCall

TITLE = "Millpond"
DESCRIPTION = "A message queue that is both a pipe and a pool: produce, consume, and walk its whole history again."
_PAGE_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def describe(routes: list[Route]) -> dict[str, Any]:
    """The OpenAPI document of `routes`."""
    return document(tuple(routes), TITLE, __version__, DESCRIPTION)


def routes(api: list[Route]) -> list[Route]:
    """/openapi.json and /docs for `api`; made once, when one of them is first asked for: no start waits for it."""

    @cache
    def made() -> tuple[bytes, bytes]:
        described = describe(api)
        return msgspec.json.format(msgspec.json.encode(described), indent=2), page(described).encode()

    async def text(_call: ProxyCall) -> web.StreamResponse:
        body, _ = await asyncio.to_thread(made)
        return web.Response(body=body, headers={"Content-Type": "application/json"})

    async def html(_call: ProxyCall) -> web.StreamResponse:
        _, body = await asyncio.to_thread(made)
        return web.Response(body=body, headers=_PAGE_HEADERS)

    return [
        Route(method="GET", path="/openapi.json", handler=text, hidden=True),
        Route(method="GET", path="/docs", handler=html, hidden=True),
        Route(method="GET", path="/", handler=_to_docs, hidden=True),
    ]


async def _to_docs(_call: ProxyCall) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "/docs"})
