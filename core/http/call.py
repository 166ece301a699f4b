"""One HTTP request as a handler sees it: `Call`, and `answer` for the usual reply.

A handler is `async def handler(call: Call[Parts]) -> web.StreamResponse`. It reads what it needs through the
call, which checks and bounds it, and raises `MillpondError`s, which become problem answers in `server.py`.
Request structs derive from `Input`: an unknown field is an error.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import parse_qsl

import msgspec
from aiohttp import web

from millpond.core import limits
from millpond.core.errors import BadRequest, FieldError, NotAcceptable, RequestTimeout, TooLarge, UnsupportedMedia
from millpond.core.http.straight import StraightBody
from millpond.core.turns import Pause

JSON = "application/json"
PartsT = TypeVar("PartsT")
Body = bytes | memoryview
StructT = TypeVar("StructT", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of everything a client may send."""


class Principal(Protocol):
    """Who asks (`metadata.client.Principal`). `scopes`: produce, consume, admin."""

    @property
    def tenant_id(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def key_id(self) -> str: ...
    @property
    def scopes(self) -> list[str]: ...


class Taker(Protocol):
    """What of a connection (`connection.py`) a request's body needs."""

    def taken(self, request: web.BaseRequest) -> StraightBody | bytes | None: ...


class BodyPace(NamedTuple):
    """How slow a body may be: `seconds`, and one more for each `bytes_per_second` received."""

    seconds: float = limits.BODY_SECONDS
    bytes_per_second: float = limits.BODY_BYTES_PER_SECOND


class Call(Generic[PartsT]):
    """One request. `params`: decoded path parameters; `parts`: what the server was built with; `principal`: who asks
    (calls of routes without scope and without credential have the anonymous principal of the gate). `pause`: to be
    made between pieces of much work; of a bulk route it is longer while there are other requests."""

    __slots__ = ("_body", "_name", "_pace", "params", "parts", "pause", "principal", "request")

    def __init__(
        self,
        request: web.BaseRequest,
        params: dict[str, str],
        parts: PartsT,
        principal: Principal,
        name: Callable[[], str],
        pace: BodyPace,
        pause: Pause,
    ) -> None:
        self.request = request
        self.params = params
        self.parts = parts
        self.principal = principal
        self._name: str | Callable[[], str] = name
        self._pace = pace
        self.pause = pause
        self._body: Body | None = None

    @property
    def request_id(self) -> str:
        """Names this request in logs and problems; made when first asked for."""
        if not isinstance(self._name, str):
            self._name = self._name()
        return self._name

    @property
    def media_type(self) -> str:
        """Content-Type in lower case without parameters; empty when there is none."""
        return media_type_of(self.request.headers)

    def query(self, shape: type[StructT]) -> StructT:
        """The query string as `shape` (every field a parameter). Raises BadRequest naming the parameter."""
        target: str = self.request._message.path
        return decode_query(target.partition("?")[2], shape)

    async def body(self, limit_bytes: int) -> Body:
        """The whole body, never more than `limit_bytes`; a large one is a view. A second call returns it again.

        Raises TooLarge (declared length first, else as soon as it overruns), RequestTimeout (slow body),
        UnsupportedMedia (a content encoding: nothing is ever inflated).
        """
        if self._body is None:
            request = self.request
            _check_declared(request, limit_bytes)
            taken = cast(Taker, request.protocol).taken(request)
            if isinstance(taken, bytes):
                self._body = _bounded(taken, limit_bytes)
            elif taken is not None:
                self._body = await _read_straight(request, taken, self._pace)
            elif request.content.is_eof():
                self._body = _bounded(request.content.read_nowait(), limit_bytes)  # it came with the head
            else:
                self._body = await _read_slowly(request, limit_bytes, self._pace)
        return self._body

    async def json(self, shape: type[StructT], limit_bytes: int = limits.MIB) -> StructT:
        """The body as `shape`; an empty body is `{}`. Raises BadRequest (malformed_body, unknown_field,
        invalid_request naming the field), UnsupportedMedia when the Content-Type is another one."""
        body = await self.body(limit_bytes)
        if body and self.media_type not in {JSON, ""}:
            raise UnsupportedMedia("unsupported_media_type", f"Content-Type: expected {JSON}, got {self.media_type!r}")
        return decode_json(body or b"{}", shape)

    def accepts(self, *media_types: str) -> str:
        """The best of `media_types` for the Accept header; the first is the default. Raises NotAcceptable."""
        header = self.request.headers.get("Accept")
        if header is None or header == "*/*" or header == media_types[0]:
            return media_types[0]
        return header if header in media_types else negotiate(header, media_types)


def media_type_of(headers: Mapping[str, str]) -> str:
    """Content-Type in lower case without parameters; empty when there is none."""
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """`value` (a struct, or anything msgspec encodes) as JSON."""
    merged = {"Content-Type": JSON} if headers is None else {"Content-Type": JSON, **headers}
    return web.Response(body=_encoder.encode(value), status=status, headers=merged)


def empty(status: int = 204, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, headers=headers)


# -- body -----------------------------------------------------------------------------------------------------


def _check_declared(request: web.BaseRequest, limit_bytes: int) -> None:
    """Refuse what must not be read."""
    if request.headers.get("Content-Encoding", "identity").lower() not in {"identity", ""}:
        raise UnsupportedMedia("unsupported_media_type", "Content-Encoding: bodies are taken as they are, not encoded")
    declared = request.content_length
    if declared is not None and declared > limit_bytes:
        raise _too_large(limit_bytes)


def _bounded(body: bytes, limit_bytes: int) -> bytes:
    if len(body) > limit_bytes:
        raise _too_large(limit_bytes)
    return body


async def _go_on(request: web.BaseRequest) -> None:
    """A client that asked whether to send its body is told to."""
    if "Expect" in request.headers:
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0


async def _read_straight(request: web.BaseRequest, straight: StraightBody, pace: BodyPace) -> memoryview:
    await _go_on(request)
    try:
        return await straight.received(*pace)
    except TimeoutError as error:
        raise _too_slow(straight.done) from error


async def _read_slowly(request: web.BaseRequest, limit_bytes: int, pace: BodyPace) -> bytes:
    """A body that has not arrived whole: under a deadline that every received byte moves a little."""
    await _go_on(request)
    chunks: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    begin = loop.time()
    try:
        async with asyncio.timeout_at(begin + pace.seconds) as deadline:
            while chunk := await request.content.readany():
                size += len(chunk)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                chunks.append(chunk)
                deadline.reschedule(begin + pace.seconds + size / pace.bytes_per_second)
    except TimeoutError as error:
        raise _too_slow(size) from error
    except web.RequestPayloadError as error:
        raise BadRequest("malformed_body", f"the body is not properly framed: {error}") from error
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_slow(size: int) -> RequestTimeout:
    return RequestTimeout("request_timeout", f"the body came too slowly: {size} bytes so far")


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge("body_too_large", f"the body is larger than {limit_bytes} bytes", limit_bytes=limit_bytes)


# -- strict decoding ------------------------------------------------------------------------------------------


@cache
def _json_decoder(shape: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(shape)


@cache
def _query_names(shape: type[Any]) -> dict[str, str]:
    """Parameter -> field."""
    return {field.encode_name: field.name for field in msgspec.structs.fields(shape)}


def decode_json(body: Body, shape: type[StructT]) -> StructT:
    try:
        value: StructT = _json_decoder(shape).decode(body)
        return value
    except msgspec.ValidationError as error:
        raise bad_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("malformed_body", f"the body is not JSON: {error}") from error


def decode_query(text: str, shape: type[StructT]) -> StructT:
    """Raises BadRequest for an unknown, repeated, missing or ill-typed parameter."""
    names = _query_names(shape)
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=64)
    except (ValueError, UnicodeDecodeError) as error:
        raise BadRequest("invalid_request", "the query string is malformed") from error
    values: dict[str, str] = {}
    for name, value in pairs:
        if name not in names:
            expected = "one of " + ", ".join(names) if names else "no query parameters"
            raise BadRequest(
                "unknown_field", f"{name[:80]!r} is not a parameter here", fields=[FieldError(name[:80], expected)]
            )
        if name in values:
            raise BadRequest.field(name, "one value", "more than one")
        values[name] = value
    try:
        query = msgspec.convert(values, shape, strict=False)
    except msgspec.ValidationError as error:
        raise bad_field(str(error), values) from error
    for name, value in values.items():
        if getattr(query, names[name]) is None:  # msgspec reads "null" as None
            raise BadRequest.field(name, "a value, or to be left out", value)
    return query


_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)`$")
_EXPECTED = re.compile(r"Expected (.+?)(?:, got (.+))?$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$")


def bad_field(text: str, values: dict[str, str] | None = None) -> BadRequest:
    """msgspec's validation message as a BadRequest that names the field."""
    where = _AT.search(text)
    path = where.group(1) if where else ""
    text = text[: where.start()] if where else text
    if unknown := _UNKNOWN.match(text):
        field = ".".join(filter(None, (path, unknown.group(1))))[:200]
        return BadRequest(
            "unknown_field", f"{field!r} is not a field here", fields=[FieldError(field, "a known field")]
        )
    if missing := _MISSING.match(text):
        field = ".".join(filter(None, (path, missing.group(1))))
        return BadRequest("invalid_request", f"{field} is required", fields=[FieldError(field, "a value")])
    field = path or "body"
    found = _EXPECTED.match(text)
    expected, got = (found.group(1), found.group(2) or "") if found else (text, "")
    if values is not None and path in values:
        got = json.dumps(values[path])[:80]
    detail = f"{field}: expected {expected}" + (f", got {got}" if got else "")
    return BadRequest("invalid_request", detail, fields=[FieldError(field, expected, got)])


# -- content negotiation --------------------------------------------------------------------------------------


def negotiate(header: str, media_types: tuple[str, ...]) -> str:
    """RFC 9110 12.5.1: the most specific range that matches decides a type's quality; then ours come in order."""
    ranges = [_media_range(item) for item in header.split(",")[:32] if item.strip()]
    best, best_quality = "", 0.0
    for media_type in media_types:
        matching = [(specific, quality) for name, specific, quality in ranges if _matches(name, media_type)]
        quality = max(matching)[1] if matching else 0.0
        if quality > best_quality:
            best, best_quality = media_type, quality
    if not best:
        raise NotAcceptable("not_acceptable", f"Accept: this call answers {', '.join(media_types)}")
    return best


def _media_range(item: str) -> tuple[str, int, float]:
    """(range in lower case, how specific 0..2, quality 0..1); a malformed quality counts as 1."""
    name, *parameters = (part.strip() for part in item.split(";"))
    quality = 1.0
    for parameter in parameters:
        if parameter[:2].lower() == "q=":
            try:
                quality = min(1.0, max(0.0, float(parameter[2:])))
            except ValueError:
                quality = 1.0
    name = name.lower()
    return name, 2 - name.count("*"), quality


def _matches(name: str, media_type: str) -> bool:
    return name in {"*/*", media_type} or (name.endswith("/*") and media_type.startswith(name[:-1]))
