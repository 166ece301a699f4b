"""Errors as answers: RFC 9457 `application/problem+json`.

    {"type": "/docs#topic_not_found", "title": "Not found", "status": 404, "detail": "...", "code": "topic_not_found",
     "retryable": false, "request_id": "...", "errors": [{"field": "...", "expected": "...", "got": "..."}], ...extra}

`code` is the stable part. `extra` of the error (such as `start_offset`) stands beside the standard members.
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from millpond.core.errors import FieldError, MillpondError

PROBLEM_TYPE = "application/problem+json"
RETRY_AFTER_MS = 1_000  # when the error does not say: soon, but not at once
_STANDARD = frozenset({"type", "title", "status", "detail", "code", "retryable", "request_id", "errors"})
_encoder = msgspec.json.Encoder()


class Problem(msgspec.Struct, frozen=True):
    """The shape of every error answer (documented in OpenAPI); further members depend on `code`."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    request_id: str
    errors: list[FieldError] = []


def problem_bytes(error: MillpondError, request_id: str) -> bytes:
    members: dict[str, Any] = {
        "type": f"/docs#{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
        "retryable": error.retryable,
        "request_id": request_id,
        "errors": error.fields,
    }
    members.update((name, value) for name, value in error.extra.items() if name not in _STANDARD)
    return _encoder.encode(members)


def problem_headers(error: MillpondError, request_id: str) -> dict[str, str]:
    """Content-Type and, where they belong, Retry-After (whole seconds, at least 1), Allow, WWW-Authenticate."""
    headers = {"Content-Type": PROBLEM_TYPE, "Millpond-Request-Id": request_id, "Cache-Control": "no-store"}
    if error.status in {429, 503}:
        wait_ms = error.extra.get("retry_after_ms", RETRY_AFTER_MS)
        headers["Retry-After"] = str(max(1, math.ceil(wait_ms / 1_000)))
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="millpond"'
    if error.status == 405:
        headers["Allow"] = ", ".join(error.extra.get("allow", ()))
    return headers


def problem_response(error: MillpondError, request_id: str) -> web.Response:
    return web.Response(
        status=error.status, body=problem_bytes(error, request_id), headers=problem_headers(error, request_id)
    )


def raw_problem(error: MillpondError, request_id: str = "-", *, closes: bool = True) -> bytes:
    """A whole HTTP/1.1 answer."""
    body = problem_bytes(error, request_id)
    headers = {**problem_headers(error, request_id), "Content-Length": str(len(body))}
    if closes:
        headers["Connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n".encode() + body
