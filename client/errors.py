"""Errors that only a client can see; all others come from the service, by code (`core.errors`).

MillpondError
|-- Unreachable ..... nobody answers at the address
|-- BufferFull ...... more unsent bytes than the producer may hold: await `producer.ready()`
|-- Closed .......... used after `close()`
`-- UnknownProblem .. an answer that is no problem of ours (a proxy in between, a newer service)
"""

from __future__ import annotations

from typing import Any

from millpond.core.errors import ERRORS, FieldError, MillpondError

_STANDARD = {"type", "title", "status", "detail", "code", "retryable", "errors", "instance"}


class Unreachable(MillpondError):
    """No connection, or no answer in time. Retried by the SDK before it is raised."""

    status, title, retryable = 503, "Unreachable", True
    codes = ("unreachable",)

    def __init__(self, detail: str) -> None:
        super().__init__("unreachable", detail)


class BufferFull(MillpondError):
    """`send_nowait` would hold more than `buffer_bytes`. Nothing was taken; `await producer.ready()` and repeat."""

    status, title, retryable = 429, "Buffer full", True
    codes = ("buffer_full",)

    def __init__(self, detail: str) -> None:
        super().__init__("buffer_full", detail)


class Closed(MillpondError):
    """The producer, consumer or connection was closed."""

    title = "Closed"
    codes = ("closed",)

    def __init__(self, detail: str) -> None:
        super().__init__("closed", detail)


class UnknownProblem(MillpondError):
    """An error answer without one of our codes; `extra["status"]` is its HTTP status."""

    title = "Unknown problem"
    codes = ("unknown_problem",)

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__("unknown_problem", detail, **extra)


class GatewayProblem(UnknownProblem):
    """502, 503 or 504 without one of our codes: something between here and the service; worth another try."""

    title, retryable = "Gateway problem", True


def from_problem(status: int, problem: object) -> MillpondError:
    """The error that an answer of `status` with a decoded problem+json body describes, as its own class.

    Members of the problem beyond the standard ones (`request_id`, `start_offset`, ..) become `extra`.
    """
    unknown = GatewayProblem if status in {502, 503, 504} else UnknownProblem
    if not isinstance(problem, dict):
        return unknown(f"HTTP {status} without a problem body", status=status)
    code, detail = str(problem.get("code", "")), str(problem.get("detail") or problem.get("title") or f"HTTP {status}")
    extra = {name: value for name, value in problem.items() if name not in _STANDARD}
    cls = ERRORS.get(code)
    if cls is None:
        return unknown(f"{code or status}: {detail}", **{**extra, "status": status})
    fields = [_field(item) for item in problem.get("errors") or [] if isinstance(item, dict)]
    return cls(code, detail, fields=fields, **extra)


def _field(item: dict[str, Any]) -> FieldError:
    return FieldError(str(item.get("field", "")), str(item.get("expected", "")), str(item.get("got", "")))
