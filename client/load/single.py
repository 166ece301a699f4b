"""One message a request over many kept-alive connections, from a process of its own: `python -m ... URL PATH`.

The least a client can do, so that the service is what is measured: a request is bytes made once, and of an answer
only its status and Content-Length are looked at. Prints a `Single` as JSON.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from millpond.client.errors import Unreachable
from millpond.client.load.figures import Rate, Single, Times
from millpond.core.clock import Clock, SystemClock

CONNECTIONS = 64
END_OF_HEAD = b"\r\n\r\n"
LENGTH = b"content-length: "
MARGIN_SECONDS = 30.0


class _Connection(asyncio.Protocol):
    """Sends the next request when an answer is complete, until it is told to stop."""

    def __init__(self, request: bytes, clock: Clock, answered: Callable[[float, bool], bool]) -> None:
        self._request, self._clock, self._answered = request, clock, answered
        self._received = b""
        self._began = 0.0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self._send()

    def _send(self) -> None:
        self._began = self._clock.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        received = self._received + data if self._received else data
        head = received.find(END_OF_HEAD)
        if head < 0:
            self._received = received
            return
        at = received.lower().find(LENGTH, 0, head)
        length = int(received[at + len(LENGTH) : received.find(b"\r\n", at)]) if at >= 0 else 0
        if len(received) < head + len(END_OF_HEAD) + length:
            self._received = received
            return
        self._received = b""
        good = received[9:10] == b"2"
        if self._answered(self._clock.monotonic() - self._began, good):
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


def request_bytes(url: str, path: str, body: bytes, api_key: str, content_type: str) -> bytes:
    host = urlsplit(url).netloc
    authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{authorization}"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def measure(
    url: str,
    path: str,
    body: bytes,
    seconds: float,
    *,
    api_key: str = "",
    content_type: str = "application/octet-stream",
    connections: int = CONNECTIONS,
    clock: Clock | None = None,
) -> Single:
    """Requests over `connections` for `seconds`. Raises Unreachable."""
    clock = clock or SystemClock()
    request = request_bytes(url, path, body, api_key, content_type)
    times: list[float] = []
    errors = 0
    begin = clock.monotonic()

    def answered(took: float, good: bool) -> bool:
        nonlocal errors
        times.append(took)
        errors += not good
        return clock.monotonic() - begin < seconds

    where = urlsplit(url)
    host, port = where.hostname or "127.0.0.1", where.port or 80
    loop = asyncio.get_running_loop()
    try:
        made = [
            await loop.create_connection(lambda: _Connection(request, clock, answered), host, port)
            for _ in range(connections)
        ]
    except OSError as error:
        raise Unreachable(f"{url} does not answer: {error}") from error
    async with asyncio.timeout(seconds + MARGIN_SECONDS):
        await asyncio.gather(*(protocol.closed for _, protocol in made))
    took = clock.monotonic() - begin
    return Single(Rate(len(times) - errors, len(body), took), Times.of(times), errors, connections)


async def in_own_process(
    url: str, path: str, body_bytes: int, seconds: float, api_key: str = "", connections: int = CONNECTIONS
) -> Single:
    """`measure` in a fresh process, so that neither side waits for the other's interpreter."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millpond.client.load.single", url, path, str(body_bytes), str(seconds),
        str(connections), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(seconds + 2 * MARGIN_SECONDS):
        out, _ = await process.communicate(api_key.encode())
    if process.returncode:
        raise Unreachable(f"{url}: the load process failed")
    return msgspec.json.decode(out, type=Single)


def main() -> None:
    url, path, body_bytes, seconds, connections = sys.argv[1:]
    api_key = sys.stdin.read().strip()  # not an argument: arguments are seen by everybody on the machine
    done = uvloop.run(
        measure(url, path, b"x" * int(body_bytes), float(seconds), api_key=api_key, connections=int(connections))
    )
    sys.stdout.write(msgspec.json.encode(done).decode() + "\n")


if __name__ == "__main__":
    main()
