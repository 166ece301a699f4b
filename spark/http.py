"""The service as a Spark task sees it: one kept-alive connection, blocking, standard library only.

Every call here may be repeated: reads change nothing, a replay's PUT is idempotent, and what is published carries
a producer session (`previous`, `first`, `last`), so the store answers a repeat instead of appending it again.

Not here: what the calls mean (`plan`, `read_range`, `publish`). The SDK's own connection is asynchronous
(`millpond.client.connection`); a Spark task has no event loop.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from millpond.core.clock import Clock, Random, SystemClock, SystemRandom
from millpond.core.errors import MillpondError
from millpond.core.http.address import address_of
from millpond.core.limits import CLIENT_RETRY_AFTER_SECONDS, SPARK_CALL_SECONDS, SPARK_RETRY_SECONDS

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.05, 5.0

Shape = TypeVar("Shape")


class Answer(NamedTuple):
    """A successful answer, whole."""

    status: int
    content_type: str
    body: bytes


class HttpClient:
    """Calls one service at `url` (`http://host:port` or https), as the owner of `key` (None: an open one).

    Belongs to one thread. Raises `MillpondError`s by code, and `Unreachable` when nobody answers in time.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout_seconds: float = SPARK_CALL_SECONDS,
        retry_seconds: float = SPARK_RETRY_SECONDS,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        """Raises ValueError when `url` is no address of an HTTP service."""
        self._address = address_of(url)
        self.url = url.rstrip("/")
        self.key = key or None
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._clock = clock or SystemClock()
        self._random = random or SystemRandom()
        self._pause = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- calls ------------------------------------------------------------------------------------------------

    def get(self, path: str, shape: type[Shape], query: Mapping[str, object] | None = None) -> Shape:
        """The JSON answer of a GET as `shape`; members that it does not know are ignored (the API only adds)."""
        return self.decode(self.call("GET", path, query=query), shape)

    def send(self, method: str, path: str, body: object, shape: type[Shape]) -> Shape:
        """The JSON answer to a JSON body."""
        return self.decode(self.call(method, path, msgspec.json.encode(body)), shape)

    def call(
        self,
        method: str,
        path: str,
        body: bytes | memoryview | None = None,
        *,
        query: Mapping[str, object] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The answer of a call that succeeded. What may succeed later is repeated until `retry_seconds` are over."""
        target = self._address.base + path + _query(query)
        sent = {"Accept": accept, "Connection": "keep-alive", **(headers or {})}
        if body is not None:
            sent["Content-Type"] = content_type
        if self.key is not None:
            sent["Authorization"] = f"Bearer {self.key}"
        deadline = self._clock.monotonic() + self._retry_seconds
        attempt = 0
        while True:
            try:
                return self._once(method, target, body, sent)
            except MillpondError as error:
                delay = self._delay_seconds(attempt, error)
                if not error.retryable or self._clock.monotonic() + delay > deadline:
                    raise
            attempt += 1
            self._pause.wait(delay)

    @staticmethod
    def decode(answer: Answer, shape: type[Shape]) -> Shape:
        try:
            return msgspec.json.decode(answer.body or b"null", type=shape)
        except msgspec.DecodeError as error:
            from millpond.client.errors import from_problem  # loads the whole SDK: only where something is wrong

            raise from_problem(answer.status, {"detail": f"an answer that is not as expected: {error}"}) from error

    def _once(self, method: str, target: str, body: bytes | memoryview | None, headers: Mapping[str, str]) -> Answer:
        reused = self._connection is not None
        try:
            return self._exchange(method, target, body, headers)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
            self.close()
            if not reused:
                raise self._unreachable(error) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(error) from error
        try:  # the service had closed an idle connection: that says nothing about the service
            return self._exchange(method, target, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._unreachable(error) from error

    def _exchange(
        self, method: str, target: str, body: bytes | memoryview | None, headers: Mapping[str, str]
    ) -> Answer:
        connection = self._open()
        connection.request(method, target, body, dict(headers))
        response = connection.getresponse()
        data = response.read()
        if response.will_close:
            self.close()
        if response.status >= 400:
            raise _error_of(response.status, response.headers.get("Retry-After", ""), data)
        return Answer(response.status, response.headers.get("Content-Type", ""), data)

    def _open(self) -> http.client.HTTPConnection:
        if self._connection is None:
            address = self._address
            kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
            self._connection = kind(address.host, address.port, timeout=self._timeout_seconds)
        return self._connection

    def _delay_seconds(self, attempt: int, error: MillpondError) -> float:
        longest = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(attempt, 16))
        return max(self._random.uniform(longest / 2, longest), float(error.extra.get("retry_after", 0)))

    def _unreachable(self, error: Exception) -> MillpondError:
        from millpond.client.errors import Unreachable

        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return Unreachable(f"{self.url} does not answer: {reason}")


def path_of(*parts: str | int) -> str:
    """`/v1/` and the percent-encoded parts."""
    return "/v1/" + "/".join(quote(str(part), safe="") for part in parts)


def _query(query: Mapping[str, object] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return "?" + urlencode(given) if given else ""


def _error_of(status: int, retry_after: str, body: bytes) -> MillpondError:
    from millpond.client.errors import from_problem

    try:
        problem: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = None
    error = from_problem(status, problem)
    if retry_after.isdigit():
        error.extra["retry_after"] = min(int(retry_after), CLIENT_RETRY_AFTER_SECONDS)
    return error
