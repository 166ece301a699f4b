"""The interface's own description: /openapi.json, and /docs to browse it."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from millpond import __version__
from millpond.core.http.docs_page import CONTENT_SECURITY_POLICY, page
from millpond.core.http.openapi import document
from millpond.core.http.routing import Handler, Route
from millpond.proxy.parts import ProxyCall

TITLE = "Millpond"
DESCRIPTION = "A message queue that is both a pipe and a pool: produce, consume, and walk its whole history again."


def describe(routes: list[Route]) -> dict[str, Any]:
    """The OpenAPI document of `routes`."""
    return document(tuple(routes), TITLE, __version__, DESCRIPTION)


def routes(api: list[Route]) -> list[Route]:
    """/openapi.json and /docs for `api`; made once, at start."""
    described = describe(api)
    text = msgspec.json.format(msgspec.json.encode(described), indent=2)
    html = page(described).encode()
    page_headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return [
        Route(
            method="GET", path="/openapi.json", handler=_fixed(text, {"Content-Type": "application/json"}), hidden=True
        ),
        Route(method="GET", path="/docs", handler=_fixed(html, page_headers), hidden=True),
        Route(method="GET", path="/", handler=_to_docs, hidden=True),
    ]


def _fixed(body: bytes, headers: dict[str, str]) -> Handler:
    async def handle(_call: ProxyCall) -> web.StreamResponse:
        return web.Response(body=body, headers=headers)

    return handle


async def _to_docs(_call: ProxyCall) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "/docs"})
