"""One service as seen by a client: `Connection`. Where it is, who asks, timeouts, retries, errors by code.

A call is tried again when that cannot do a thing twice: GET, PUT and DELETE, those that say `repeatable`, and any
call that certainly never arrived. Between tries it waits, doubling from 50 ms to 5 s with jitter, at least what
`Retry-After` asks, until `retry_seconds` have passed; then the last error is raised. That a kept connection had ended
before such a call is no try at all: it goes over a new one at once.

Not here: what the calls mean (`topics`, `groups`, `producer`, `consumer`, `reader`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import pyarrow as pa

from millpond.client.errors import Closed, Unreachable, from_problem
from millpond.core import limits
from millpond.core.clock import Clock, Random, SystemClock, SystemRandom
from millpond.core.errors import BadRequest, MillpondError, TooManyRequests
from millpond.core.gathered import Buffer
from millpond.core.http.address import EXPECTED, address_of
from millpond.core.http.wire import NO_BODY, BadAnswer, Bounds, Buffers, CannotConnect, Received, Wires

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
DEFAULT_URL = "http://127.0.0.1:8080"
REPEATABLE_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE"})
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.05, 5.0
BOUNDS = Bounds(
    limits.CLIENT_CONNECTIONS, limits.CLIENT_CONNECT_SECONDS, limits.CLIENT_IDLE_SECONDS, limits.CLIENT_ANSWER_BYTES
)

Shape = TypeVar("Shape")


class Answer(NamedTuple):
    """A successful answer: its status, headers (names in lower case) and whole body (large ones as `pa.Buffer`)."""

    status: int
    headers: Mapping[str, str]
    body: bytes | pa.Buffer

    def decode(self, shape: type[Shape]) -> Shape:
        """The JSON body as `shape`; members it does not know are ignored (the API only adds)."""
        try:
            return msgspec.json.decode(self.body, type=shape)
        except msgspec.DecodeError as error:
            raise from_problem(self.status, {"detail": f"an answer that is not as expected: {error}"}) from error


class Connection:
    """A pool of HTTP connections to one service.

    `url` and `api_key` come from the arguments, else from MILLPOND_URL and MILLPOND_KEY, else the service is the
    open one on this machine. It opens on first use and belongs to the event loop that uses it.

    >>> async with Connection("http://127.0.0.1:8080") as connection:
    ...     print(await connection.get("/v1/topics"))
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 30.0,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        """Raises BadRequest when the address is none."""
        self.url = service_url(url)
        self._api_key = api_key or os.environ.get("MILLPOND_KEY") or ""
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self.clock = clock or SystemClock()
        self.random = random or SystemRandom()
        self._wires: Wires | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the pool; calls under way fail. Idempotent."""
        self._closed = True
        if self._wires is not None:
            await self._wires.close()
            self._wires = None

    # -- calls ------------------------------------------------------------------------------------------------

    async def get(self, path: str, params: Mapping[str, object] | None = None, shape: type[Shape] | None = None) -> Any:
        return await self.json("GET", path, params=params, shape=shape)

    async def json(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, object] | None = None,
        shape: type[Shape] | None = None,
        repeatable: bool | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Send `body` as JSON and decode the answer (as `shape` when given); None for an empty answer."""
        data = None if body is None else msgspec.json.encode(body)
        answer = await self.call(
            method, path, data, content_type=JSON, params=params, repeatable=repeatable, timeout_seconds=timeout_seconds
        )
        if not answer.body:
            return None
        return answer.decode(shape if shape is not None else Any)

    async def call(
        self,
        method: str,
        path: str,
        data: Buffer | Buffers | None = None,
        *,
        content_type: str = JSON,
        accept: str = JSON,
        params: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
        timeout_seconds: float | None = None,
        retry_seconds: float | None = None,
    ) -> Answer:
        """The answer of a call that succeeded (2xx). Raises MillpondError by code, `Unreachable`, `Closed`.

        `data`: the body, whole or in buffers; they are not copied.
        """
        may_repeat = method in REPEATABLE_METHODS if repeatable is None else repeatable
        sent = {"Accept": accept, **(headers or {})}
        body = NO_BODY if data is None else data if isinstance(data, Buffers) else Buffers([data])
        deadline = self.clock.monotonic() + (self._retry_seconds if retry_seconds is None else retry_seconds)
        attempt = 0
        while True:
            try:
                return await self._once(method, path, body, content_type, params, sent, timeout_seconds, may_repeat)
            except MillpondError as error:
                delay = self._delay_seconds(attempt, error)
                late = self.clock.monotonic() + delay > deadline
                if late or not error.retryable or not (may_repeat or _never_arrived(error)):
                    raise
            attempt += 1
            await asyncio.sleep(delay)

    async def _once(
        self,
        method: str,
        path: str,
        data: Buffers,
        content_type: str,
        params: Mapping[str, object] | None,
        headers: Mapping[str, str],
        timeout_seconds: float | None,
        repeatable: bool,
    ) -> Answer:
        target = f"{path}?{urlencode(query)}" if (query := _query(params)) else path
        sent = {**headers, "Content-Type": content_type} if data.length else headers
        try:
            seconds = timeout_seconds or self._timeout_seconds
            answer = await self._open().ask(method, target, sent, data, seconds, repeatable=repeatable)
        except (OSError, TimeoutError, BadAnswer) as error:
            raise self._unreachable(error) from error
        if answer.status >= 300:
            raise _error_of(answer)
        return Answer(*answer)

    def _open(self) -> Wires:
        if self._closed:
            raise Closed("the connection is closed")
        if self._wires is None:
            authorization = f"Bearer {self._api_key}" if self._api_key else ""
            self._wires = Wires(self.url, self.clock, BOUNDS, authorization)
        return self._wires

    def _delay_seconds(self, attempt: int, error: MillpondError) -> float:
        longest = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(attempt, 16))
        asked = error.extra.get("retry_after")
        jittered = self.random.uniform(longest / 2, longest)
        return max(jittered, float(asked)) if isinstance(asked, int | float) else jittered

    def _unreachable(self, error: Exception) -> Unreachable:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        unreachable = Unreachable(f"{self.url} does not answer: {reason}")
        unreachable.extra["arrived"] = not isinstance(error, CannotConnect)
        return unreachable


def service_url(url: str | None) -> str:
    """`url`, else that of MILLPOND_URL, else of the service on this machine. Raises BadRequest."""
    found = (url or os.environ.get("MILLPOND_URL") or DEFAULT_URL).rstrip("/")
    try:
        address_of(found)
    except ValueError as error:
        raise BadRequest.field("url", EXPECTED, found) from error
    return found


def path_of(*parts: str | int) -> str:
    """`/v1/` and the percent-encoded parts: `path_of("topics", "a b")` is `/v1/topics/a%20b`."""
    return "/v1/" + "/".join(quote(str(part), safe="") for part in parts)


def _query(params: Mapping[str, object] | None) -> dict[str, str] | None:
    """Query parameters as text; None values are left out."""
    if not params:
        return None
    return {name: _text(value) for name, value in params.items() if value is not None}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _error_of(answer: Received) -> MillpondError:
    try:
        problem: object = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        problem = None
    error = from_problem(answer.status, problem)
    asked = answer.headers.get("retry-after", "")
    if asked.isdigit():
        error.extra["retry_after"] = min(int(asked), limits.CLIENT_RETRY_AFTER_SECONDS)
    return error


def _never_arrived(error: MillpondError) -> bool:
    """Whether the service certainly did nothing: no connection was made, or it said so."""
    return error.extra.get("arrived") is False or isinstance(error, TooManyRequests)
