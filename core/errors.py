"""Every error that crosses a boundary of Millpond, with its HTTP status.

    MillpondError
    |-- BadRequest ........ 400  invalid_request, invalid_name, malformed_body, unknown_field
    |-- Unauthenticated ... 401  unauthenticated
    |-- Forbidden ......... 403  forbidden
    |-- NotFound .......... 404  topic_not_found, queue_not_found, group_not_found, message_not_found, ...
    |-- MethodNotAllowed .. 405  method_not_allowed (with Allow)
    |-- NotAcceptable ..... 406  not_acceptable
    |-- RequestTimeout .... 408  request_timeout
    |-- Conflict .......... 409  topic_differs, topic_replaced, filter_differs, out_of_order, unknown_producer, ...
    |-- OffsetExpired ..... 410  offset_expired (names the first offset there is)
    |-- TooLarge .......... 413  body_too_large, message_too_large, batch_too_large
    |-- UnsupportedMedia .. 415  unsupported_media_type
    |-- OffsetOutOfRange .. 416  offset_out_of_range
    |-- StaleRoute ........ 421  stale_route (carries the epoch)
    |-- Unprocessable ..... 422  dedup_mismatch
    |-- HeadersTooLarge ... 431  headers_too_large
    |-- TooManyRequests ... 429  dedup_window_full, cold_read_limit, too_many_waiters (with Retry-After)
    |-- Internal .......... 500  internal, corrupt_range, tier_corrupt, metadata_corrupt, newer_format
    |-- Unavailable ....... 503  store_unavailable, metadata_unavailable, flush_behind, ... (with Retry-After)
    `-- DiskFull .......... 507  disk_full

An error is known by its `code`; codes are stable, texts are not. Errors travel between processes as
`ErrorInfo` and come out as the same class (`raise_info`). A condition that can only be a bug is an
`assert`, never one of these.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class FieldError(msgspec.Struct, frozen=True):
    """One offending field of a request: where it stands and what was expected there."""

    field: str
    expected: str
    got: str = ""


class ErrorInfo(msgspec.Struct, frozen=True):
    """A `MillpondError` as data, for crossing a process boundary or standing beside results."""

    code: str
    detail: str
    fields: list[FieldError] = []
    extra: dict[str, Any] = {}


class MillpondError(Exception):
    """Base of all. `status`: HTTP status; `retryable`: whether the same request may succeed later."""

    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    title: ClassVar[str] = "Internal error"
    codes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, code: str, detail: str, *, fields: list[FieldError] | None = None, **extra: Any) -> None:
        assert code in type(self).codes, f"{type(self).__name__} has no code {code!r}"
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.fields = fields or []
        self.extra = extra

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.detail, self.fields, self.extra)


class BadRequest(MillpondError):
    status, title = 400, "Bad request"
    codes = ("invalid_request", "invalid_name", "malformed_body", "unknown_field")

    @classmethod
    def field(cls, field: str, expected: str, got: object = "") -> BadRequest:
        """The usual case: one field is wrong."""
        shown = repr(got)[:80] if got != "" else ""
        detail = f"{field}: expected {expected}" + (f", got {shown}" if shown else "")
        return cls("invalid_request", detail, fields=[FieldError(field, expected, shown)])


class Unauthenticated(MillpondError):
    status, title = 401, "Unauthenticated"
    codes = ("unauthenticated",)


class Forbidden(MillpondError):
    status, title = 403, "Forbidden"
    codes = ("forbidden",)


class NotFound(MillpondError):
    status, title = 404, "Not found"
    codes = (
        "topic_not_found", "queue_not_found", "group_not_found", "message_not_found", "replay_not_found",
        "producer_not_found", "key_not_found", "object_not_found", "route_not_found",
    )  # fmt: skip


class MethodNotAllowed(MillpondError):
    status, title = 405, "Method not allowed"
    codes = ("method_not_allowed",)


class NotAcceptable(MillpondError):
    status, title = 406, "Not acceptable"
    codes = ("not_acceptable",)


class RequestTimeout(MillpondError):
    status, title, retryable = 408, "Request timeout", True
    codes = ("request_timeout",)


class Conflict(MillpondError):
    status, title = 409, "Conflict"
    codes = (
        "topic_differs", "topic_replaced", "group_differs", "filter_differs", "out_of_order", "unknown_producer",
        "replay_differs", "epoch_superseded", "manifest_conflict", "object_exists", "sealing_off",
        "claim_ended",
    )  # fmt: skip


class OffsetExpired(MillpondError):
    """The offset is below the first one kept; `extra["start_offset"]` names that one."""

    status, title = 410, "Offset expired"
    codes = ("offset_expired",)


class TooLarge(MillpondError):
    status, title = 413, "Too large"
    codes = ("body_too_large", "message_too_large", "batch_too_large")


class UnsupportedMedia(MillpondError):
    status, title = 415, "Unsupported media type"
    codes = ("unsupported_media_type",)


class OffsetOutOfRange(MillpondError):
    """The offset is beyond the confirmed end; `extra["end_offset"]` names that one."""

    status, title = 416, "Offset out of range"
    codes = ("offset_out_of_range",)


class StaleRoute(MillpondError):
    status, title, retryable = 421, "Stale route", True
    codes = ("stale_route",)


class Unprocessable(MillpondError):
    status, title = 422, "Unprocessable"
    codes = ("dedup_mismatch",)


class HeadersTooLarge(MillpondError):
    status, title = 431, "Request head too large"
    codes = ("headers_too_large",)


class TooManyRequests(MillpondError):
    status, title, retryable = 429, "Too many requests", True
    codes = ("dedup_window_full", "cold_read_limit", "too_many_waiters", "too_many_requests")


class Internal(MillpondError):
    status, title = 500, "Internal error"
    codes = ("internal", "corrupt_range", "tier_corrupt", "metadata_corrupt", "newer_format")


class Unavailable(MillpondError):
    status, title, retryable = 503, "Unavailable", True
    codes = (
        "store_unavailable", "metadata_unavailable", "tier_unavailable", "flush_behind", "deadline_exceeded",
        "shutting_down", "too_many_connections", "unknown_outcome",
    )  # fmt: skip


class BelowLocal(MillpondError):
    """The store no longer holds this offset: the tier does. Between store and proxy only.

    `extra["first_local_offset"]` names the first offset the store still holds.
    """

    status, title, retryable = 503, "Not on the local disk", True
    codes = ("below_local",)


class DiskFull(MillpondError):
    status, title, retryable = 507, "Disk full", True
    codes = ("disk_full",)


class StartupError(Exception):
    """A part cannot start. Never crosses the network: the command prints `detail` and `remedy`."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(f"{detail}; {remedy}")
        self.detail = detail
        self.remedy = remedy


def _classes(base: type[MillpondError]) -> list[type[MillpondError]]:
    return [c for sub in base.__subclasses__() for c in (sub, *_classes(sub))]


ERRORS: dict[str, type[MillpondError]] = {code: cls for cls in _classes(MillpondError) for code in cls.codes}


def from_info(info: ErrorInfo) -> MillpondError:
    """The error that `info` describes, as its own class; a code from a newer peer becomes `internal`."""
    cls = ERRORS.get(info.code)
    if cls is None:
        return Internal("internal", f"{info.code}: {info.detail}")
    return cls(info.code, info.detail, fields=list(info.fields), **info.extra)
