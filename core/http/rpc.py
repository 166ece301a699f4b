"""Calls between the parts: an interface class is the whole description of a service.

    POST /internal/v1/<service>/<method>          Millpond-Cluster-Secret: ...

    body     u32 head length | head | u32 n | n x u64 lengths | n buffers, each at a multiple of 8 from the start
    head     msgpack: the arguments as an array, or the answer; a `pyarrow.Buffer` in it is replaced by its number
    error    the error's own HTTP status, application/vnd.millpond.error: msgpack of `ErrorInfo`

All integers little endian. Buffers are neither copied into the msgpack nor copied out of the body: they are slices
of it. The annotations of the interface's methods say what is decoded, strictly. `serve` gives the routes of an
implementation, `remote` an object with the interface's methods over a transport: `Caller` (HTTP), or `through_codec`
(in process, used by tests so that direct calls behave like HTTP). A method `close` is never sent.

Not versioned beyond the path: the parts of a cluster run the same or neighbouring releases, and structs only grow.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, cast, get_type_hints

import msgspec
import pyarrow as pa
from aiohttp import web

from millpond.core import limits
from millpond.core.errors import BadRequest, ErrorInfo, Internal, MillpondError, Unavailable, from_info
from millpond.core.http.call import Body, Call
from millpond.core.http.client import Answer, HttpClient
from millpond.core.http.problem import PROBLEM_TYPE
from millpond.core.http.routing import Route
from millpond.core.http.secret import SECRET_HEADER
from millpond.core.http.whole import pieces, whole
from millpond.core.http.wire import CannotConnect

BODY_TYPE = "application/vnd.millpond.call"
ERROR_TYPE = "application/vnd.millpond.error"
BODY_BYTES = 256 * limits.MIB  # one call or answer: a group append of many queues, a find over many frames
BUFFERS = 1_000_000  # in one body
MARGIN_MS = 2_000  # a callee answers at its deadline; the caller waits so much longer for the answer to arrive
JOIN_BYTES = 64 * limits.KIB  # smaller bodies are joined into one write
_ALIGNMENT = 8

T = TypeVar("T")
Segments = list[Any]  # bytes or pa.Buffer, to be sent one after the other
_LENGTH = struct.Struct("<I")


# -- codec ----------------------------------------------------------------------------------------------------


def pack(value: Any) -> Segments:
    """`value` as the segments of a body; its buffers are referenced, not copied."""
    buffers: list[pa.Buffer] = []

    def put(item: Any) -> int:
        if not isinstance(item, pa.Buffer):
            raise TypeError(f"{type(item).__name__} does not cross between parts")
        buffers.append(item)
        return len(buffers) - 1

    head = msgspec.msgpack.Encoder(enc_hook=put).encode(value)
    lengths = struct.pack(f"<I{len(buffers)}Q", len(buffers), *(buffer.size for buffer in buffers))
    segments: Segments = [_LENGTH.pack(len(head)) + head + lengths]
    position = len(segments[0])
    for buffer in buffers:
        padding = -position % _ALIGNMENT
        if padding:
            segments.append(bytes(padding))
        if buffer.size:
            segments.append(buffer)
        position += padding + buffer.size
    return segments


def size_of(segments: Segments) -> int:
    return sum(memoryview(segment).nbytes for segment in segments)


class Decoder:
    """Decodes bodies into one type. Not for use by two threads at once: the buffers of a body are held meanwhile."""

    __slots__ = ("_buffers", "_decoder")

    def __init__(self, shape: Any) -> None:
        self._buffers: list[pa.Buffer] = []
        self._decoder = msgspec.msgpack.Decoder(shape, dec_hook=self._take)

    def unpack(self, body: Body) -> Any:
        """Raises ValueError for anything that `pack` would not make of this type."""
        try:
            head, self._buffers = _split(body)
            return self._decoder.decode(head)
        except (struct.error, msgspec.MsgspecError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"not a body of this release: {error}") from error
        finally:
            self._buffers = []

    def _take(self, kind: type, item: Any) -> Any:
        if kind is object:
            return item
        if kind is not pa.Buffer or type(item) is not int or item < 0:
            raise msgspec.ValidationError(f"expected the number of a buffer, got {type(item).__name__}")
        return self._buffers[item]


def _split(body: Body) -> tuple[memoryview, list[pa.Buffer]]:
    """(head, buffers) of a body. Raises struct.error or IndexError when the lengths do not add up."""
    (head_length,) = _LENGTH.unpack_from(body)
    position = _LENGTH.size + head_length
    (count,) = _LENGTH.unpack_from(body, position)
    if count > BUFFERS:
        raise IndexError(f"{count} buffers")
    lengths = struct.unpack_from(f"<{count}Q", body, position + 4)
    head = memoryview(body)[_LENGTH.size : position]
    position += 4 + 8 * count
    whole = pa.py_buffer(body)
    buffers = []
    for length in lengths:
        position += -position % _ALIGNMENT
        if position + length > len(body):
            raise IndexError("a buffer reaches beyond the end")
        buffers.append(whole.slice(position, length))
        position += length
    if position != len(body):
        raise IndexError("bytes after the last buffer")
    return head, buffers


# -- services -------------------------------------------------------------------------------------------------


class Method:
    """One method of an interface: its names, and how its arguments and its answer are decoded."""

    __slots__ = ("_signature", "answer", "arguments", "name", "names", "service")

    def __init__(self, service: str, name: str, function: Callable[..., Any]) -> None:
        hints = get_type_hints(function)
        self.service = service
        self.name = name
        self._signature = inspect.signature(function)
        self.names = [parameter for parameter in self._signature.parameters if parameter != "self"]
        self.arguments = Decoder(cast(Any, tuple)[tuple(hints[name] for name in self.names)])
        self.answer = Decoder(hints["return"])

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Positional arguments with defaults filled in; TypeError as for any call."""
        if len(args) == len(self.names) and not kwargs:
            return args
        bound = self._signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        return bound.args[1:]

    def patience_ms(self, args: tuple[Any, ...]) -> int:
        """How long the callee may take by the call's own `deadline_ms` and `wait_ms`."""
        deadline_ms, wait_ms = limits.CALL_MS, 0
        for name, value in zip(self.names, args, strict=True):
            if name == "deadline_ms":
                deadline_ms = value
            elif name == "wait_ms":
                wait_ms = value
            else:
                deadline_ms = getattr(value, "deadline_ms", deadline_ms)
                wait_ms = getattr(value, "wait_ms", wait_ms)
        return deadline_ms + wait_ms


def service_of(protocol: type[Any]) -> str:
    """`StoreClient` is the service `store`."""
    return protocol.__name__.removesuffix("Client").lower()


def methods_of(protocol: type[Any]) -> dict[str, Method]:
    service = service_of(protocol)
    functions = inspect.getmembers(protocol, inspect.iscoroutinefunction)
    return {name: Method(service, name, function) for name, function in functions if name[0] != "_" and name != "close"}


def serve(protocol: type[T], implementation: T) -> list[Route]:
    """The routes of a service, for an internal `HttpServer` (its gate checks the cluster secret)."""
    return [
        Route(
            method="POST",
            path=f"/internal/v1/{method.service}/{name}",
            handler=_handler(method, getattr(implementation, name)),
            scope="any",
            hidden=True,
        )
        for name, method in methods_of(protocol).items()
    ]


def _handler(
    method: Method, function: Callable[..., Awaitable[Any]]
) -> Callable[[Call[Any]], Awaitable[web.StreamResponse]]:
    async def handle(call: Call[Any]) -> web.StreamResponse:
        try:
            arguments = _arguments(method, await call.body(BODY_BYTES))
            return body_response(call.request, pack(await function(*arguments)))
        except MillpondError as error:
            return error_response(error)

    return handle


def _arguments(method: Method, body: Body) -> Any:
    try:
        return method.arguments.unpack(body)
    except ValueError as error:
        raise BadRequest("malformed_body", f"{method.name}: {error}") from error


def _answer(method: Method, body: Body) -> Any:
    try:
        return method.answer.unpack(body)
    except ValueError as error:
        raise Internal("internal", f"{method.name}: the answer is {error}") from error


def body_response(request: web.BaseRequest, segments: Segments) -> web.StreamResponse:
    if size_of(segments) <= JOIN_BYTES:
        return whole(request, b"".join(segments), BODY_TYPE)
    return pieces(request, segments, BODY_TYPE)


def error_response(error: MillpondError) -> web.Response:
    headers = {"Content-Type": ERROR_TYPE}
    return web.Response(body=msgspec.msgpack.encode(error.info()), status=error.status, headers=headers)


# -- callers --------------------------------------------------------------------------------------------------


class Transport(Protocol):
    """How a call gets to the implementation and back."""

    async def call(self, method: Method, args: tuple[Any, ...]) -> Any: ...

    async def close(self) -> None: ...


def remote(protocol: type[T], transport: Transport) -> T:
    """An object with the methods of `protocol`, each a call over `transport`; `close` closes the transport."""

    def stub(method: Method) -> Callable[..., Awaitable[Any]]:
        async def call(_self: Any, *args: Any, **kwargs: Any) -> Any:
            return await transport.call(method, method.bind(args, kwargs))

        call.__name__ = method.name
        return call

    async def close(_self: Any) -> None:
        await transport.close()

    members: dict[str, Any] = {name: stub(method) for name, method in methods_of(protocol).items()}
    return cast(T, type(f"Remote{protocol.__name__}", (), {**members, "close": close})())


class Caller:
    """Calls over HTTP to one peer. Never retries: whether a call may be repeated is the caller's knowledge.

    Raises what the callee raised; Unavailable(<service>_unavailable) when it cannot be reached or refuses the secret;
    Unavailable(unknown_outcome) when the connection or the time ended after the call was sent.
    """

    def __init__(self, base_url: str, secret: str, client: HttpClient | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._client = client or HttpClient()
        self._owns_client = client is None
        self._headers = {SECRET_HEADER: secret, "Content-Type": BODY_TYPE}

    async def call(self, method: Method, args: tuple[Any, ...]) -> Any:
        seconds = (method.patience_ms(args) + MARGIN_MS) / 1_000
        status, kind, body = await self._post(method, pack(args), seconds)
        if status == 200 and kind == BODY_TYPE:
            return _answer(method, body)
        raise _error_of(method, status, kind, body)

    async def _post(self, method: Method, segments: Segments, seconds: float) -> Answer:
        url = f"{self._base_url}/internal/v1/{method.service}/{method.name}"
        try:
            return await self._client.post(url, segments, self._headers, seconds, BODY_BYTES)
        except CannotConnect as error:
            raise _away(method, f"{self._base_url} cannot be reached") from error
        except TimeoutError as error:
            raise Unavailable("unknown_outcome", f"{method.name}: no answer within {seconds:.0f} s") from error
        except ConnectionError as error:
            raise Unavailable("unknown_outcome", f"{method.name}: the connection ended: {error}") from error
        except ValueError as error:
            raise Internal("internal", str(error)) from error

    async def close(self) -> None:
        if self._owns_client:
            await self._client.close()


def _away(method: Method, detail: str) -> Unavailable:
    code = f"{method.service}_unavailable"
    return Unavailable(code if code in Unavailable.codes else "store_unavailable", detail)


class _Problem(msgspec.Struct):
    code: str
    detail: str


def _error_of(method: Method, status: int, kind: str, body: Body) -> MillpondError:
    """The error an answer stands for; what the listener itself refused is the peer being unavailable."""
    try:
        if kind == ERROR_TYPE:
            return from_info(msgspec.msgpack.decode(body, type=ErrorInfo))
        if kind == PROBLEM_TYPE:
            problem = msgspec.json.decode(body, type=_Problem)
            if status in {401, 404, 503}:
                return _away(method, f"{method.service}: {problem.code}: {problem.detail}")
            return from_info(ErrorInfo(problem.code, problem.detail))
    except msgspec.MsgspecError:
        pass  # falls through to the general answer: whatever spoke there is not of this release
    return Internal("internal", f"{method.name}: the peer answered {status} {kind}")


class _InProcess:
    """A transport without a network: the codec on both sides, and nothing else."""

    def __init__(self, implementation: Any) -> None:
        self._implementation = implementation

    async def call(self, method: Method, args: tuple[Any, ...]) -> Any:
        try:
            arguments = _arguments(method, b"".join(pack(args)))
            answer = await getattr(self._implementation, method.name)(*arguments)
        except MillpondError as error:
            info = msgspec.msgpack.decode(msgspec.msgpack.encode(error.info()), type=ErrorInfo)
            raise from_info(info) from error
        return _answer(method, b"".join(pack(answer)))

    async def close(self) -> None:
        if hasattr(self._implementation, "close"):
            await self._implementation.close()


def through_codec(protocol: type[T], implementation: T) -> T:
    """`implementation` behind the codec: every argument, answer and error is encoded and decoded."""
    return remote(protocol, _InProcess(implementation))
