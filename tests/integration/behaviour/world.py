"""What the behaviour suite stands on: Millpond as real processes, together or apart, and a plain HTTP client."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pyarrow as pa
from support.processes import Apart, Process, standalone
from yarl import URL

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.http.secret import load_secret
from millpond.metadata.local import LocalMetadata
from millpond.metadata.remote import RemoteMetadata

JSON = "application/json"
MSGPACK = "application/msgpack"
ARROW = "application/vnd.apache.arrow.stream"
PROBLEM = "application/problem+json"
SEGMENT_BYTES = 8 << 20  # the least that holds the largest message beside others
SMALL_DISK = ["--segment-bytes", str(SEGMENT_BYTES), "--local-bytes", "1", "--checkpoint-bytes", str(2 << 20)]
PATIENCE_SECONDS = 30.0  # for what must happen soon, on a machine with much else to do


class Service:
    """One Millpond: `kind` says whether its parts are one process or three."""

    def __init__(self, kind: str, folder: Path, *flags: str) -> None:
        self.kind = kind
        self.folder = folder
        self._parts: Apart | None = None
        self._alone: Process | None = None
        if kind == "standalone":
            self._alone = standalone(folder, *SMALL_DISK, *flags)
        else:
            assert not flags, "flags of a proxy: `proxy_beside`"
            self._parts = Apart(folder, *SMALL_DISK)

    @property
    def url(self) -> str:
        if self._alone is not None:
            return self._alone.url
        assert self._parts is not None
        return self._parts.url

    async def start(self) -> None:
        if self._alone is not None:
            await self._alone.start()
        elif self._parts is not None:
            await self._parts.start()

    async def restart(self) -> None:
        """Every process ends by SIGTERM and starts again, on its own directory and port."""
        if self._alone is not None:
            processes = [self._alone]
        else:
            assert self._parts is not None
            processes = [self._parts.metadata, self._parts.store, self._parts.proxy]
        for process in reversed(processes):
            assert await process.stop() == 0, process.log()
        for process in processes:
            await process.start()

    def proxy_beside(self, folder: Path, *flags: str) -> Process:
        """Another proxy of the same store and metadata, not launched yet."""
        assert self._parts is not None
        beside = ["--metadata", self._parts.metadata.url, "--cluster-secret-file", str(self._parts.secret)]
        return Process(folder, "proxy", [*beside, "--tier", str(self.folder / "tier"), *flags])

    @asynccontextmanager
    async def metadata(self) -> Any:
        """Its catalog, as an operator reaches it: tenants other than the caller's own are made there only."""
        found: LocalMetadata | RemoteMetadata
        if self._parts is None:
            url = f"sqlite:///{self.folder / 'data' / 'metadata.db'}"
            found = await LocalMetadata.open(url, SystemClock(), SystemRandom())
        else:
            found = RemoteMetadata(self._parts.metadata.url, await asyncio.to_thread(load_secret, self._parts.secret))
        try:
            yield found
        finally:
            await found.close()

    def close(self) -> None:
        for one in (self._alone, self._parts):
            if one is not None:
                one.close()


class Answer(NamedTuple):
    """One HTTP answer, read whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body) if self.body else None

    def ok(self, *statuses: int) -> Any:
        """Its JSON; AssertionError with the body unless the status is one of these (200 when none is named)."""
        assert self.status in (statuses or (200,)), (self.status, self.body[:2_000])
        return self.json

    @property
    def good(self) -> bytes:
        """The body of a 200; AssertionError for anything else."""
        assert self.status == 200, (self.status, self.body[:2_000])
        return self.body

    def refused(self, status: int, code: str, field: str | None = None) -> Any:
        """The problem, which says all that a client needs: what, whether again, where, and what was expected."""
        assert self.status == status, (self.status, self.body[:2_000])
        assert self.headers["Content-Type"] == PROBLEM
        problem = self.json
        assert (problem["code"], problem["status"]) == (code, status), problem
        assert problem["title"]
        assert problem["detail"]
        assert problem["type"] == f"/docs#{code}"
        assert isinstance(problem["retryable"], bool)
        assert problem["request_id"] == self.headers["Millpond-Request-Id"]
        if field is not None:
            assert problem["errors"], problem
            assert problem["errors"][0]["field"] == field, problem["errors"]
            assert problem["errors"][0]["expected"]
        return problem


class Http:
    """A client of the public interface. `headers` go with every call."""

    def __init__(self, url: str, session: aiohttp.ClientSession, headers: dict[str, str] | None = None) -> None:
        self.url = url
        self.session = session
        self.headers = headers or {}

    async def call(
        self, method: str, path: str, body: Any = None, *, data: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """`body` is sent as JSON, `data` as it is. `path` is sent as it is, too."""
        sent = {**self.headers, **(headers or {})}
        if body is not None:
            data = msgspec.json.encode(body)
            sent.setdefault("Content-Type", JSON)
        if isinstance(data, bytes) and len(data) > 1 << 20:
            data = io.BytesIO(data)  # aiohttp warns of large bodies as bytes
        url = URL(self.url + path, encoded=True)
        async with self.session.request(method, url, data=data, headers=sent) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, accept: str | None = None) -> Answer:
        return await self.call("GET", path, headers=None if accept is None else {"Accept": accept})

    async def make(self, topic: str, queues: int = 1, **settings: Any) -> Any:
        return (await self.call("PUT", f"/v1/topics/{topic}", {"queues": queues, **settings})).ok(201)

    async def send(self, topic: str, *messages: Any, headers: dict[str, str] | None = None, **more: Any) -> Answer:
        """Messages as dicts, or texts that are bodies."""
        listed = [{"body": one} if isinstance(one, str) else one for one in messages]
        return await self.call("POST", f"/v1/topics/{topic}/messages", {"messages": listed, **more}, headers=headers)

    async def sent(self, topic: str, *messages: Any, **more: Any) -> list[Any]:
        """The results of messages of which none may be refused."""
        results: list[Any] = (await self.send(topic, *messages, **more)).ok()["results"]
        assert not [one for one in results if "error" in one], results
        return results

    async def post(self, topic: str, data: bytes, content_type: str, **headers: str) -> Answer:
        """One produce request with this body. `millpond_key=..` is the header Millpond-Key."""
        named = {name.replace("_", "-").title(): value for name, value in headers.items()}
        path = f"/v1/topics/{topic}/messages"
        return await self.call("POST", path, data=data, headers={"Content-Type": content_type, **named})

    async def read(self, topic: str, query: str = "offset=0", queue: int = 0, accept: str | None = None) -> Answer:
        return await self.get(f"/v1/topics/{topic}/queues/{queue}/messages?{query}", accept)

    async def messages(self, topic: str, query: str = "offset=0&limit=1000", queue: int = 0) -> list[Any]:
        found: list[Any] = (await self.read(topic, query, queue)).ok()["messages"]
        return found

    async def ends(self, topic: str) -> list[int]:
        """Each queue's end: what was appended shows here."""
        states = (await self.get(f"/v1/topics/{topic}/queues")).ok()["queues"]
        return [one["end_offset"] for one in states]

    async def receive_answer(self, topic: str, group: str, accept: str | None = None, **wanted: Any) -> Answer:
        path = f"/v1/topics/{topic}/groups/{group}/messages/receive"
        headers = None if accept is None else {"Accept": accept}
        return await self.call("POST", path, {"max_messages": 100, "start": "earliest", **wanted}, headers=headers)

    async def receive(self, topic: str, group: str, **wanted: Any) -> Any:
        return (await self.receive_answer(topic, group, **wanted)).ok()

    async def leased(self, topic: str, group: str, **wanted: Any) -> list[Any]:
        found: list[Any] = (await self.receive(topic, group, **wanted))["messages"]
        return found

    async def settle(self, topic: str, group: str, **items: Any) -> Answer:
        return await self.call("POST", f"/v1/topics/{topic}/groups/{group}/messages/ack", items)

    async def settled(self, topic: str, group: str, **items: Any) -> list[str]:
        """The status of each item."""
        return [one["status"] for one in (await self.settle(topic, group, **items)).ok()["results"]]

    async def seek(self, topic: str, group: str, to: Any, **more: Any) -> Answer:
        return await self.call("POST", f"/v1/topics/{topic}/groups/{group}/seek", {"to": to, **more})

    async def lag(self, topic: str, group: str) -> Any:
        return (await self.get(f"/v1/topics/{topic}/groups/{group}/lag")).ok()

    async def metrics(self) -> dict[str, float]:
        """Samples by name; labels are part of it."""
        text = (await self.get("/metrics")).body.decode()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        }


_numbers = itertools.count(1)


def fresh(kind: str = "t") -> str:
    """A name that no other test of this run has."""
    return f"{kind}{next(_numbers)}"


def bodies(messages: Sequence[Any]) -> list[str]:
    return [one["body"] for one in messages]


def leases(messages: Sequence[Any]) -> list[str]:
    return [one["lease_id"] for one in messages]


async def until(claim: Callable[[], Awaitable[bool]], seconds: float = PATIENCE_SECONDS) -> None:
    """Ask again until it holds; TimeoutError when it does not. For states that no call can wait for."""
    async with asyncio.timeout(seconds):
        while not await claim():  # noqa: ASYNC110  # no event says so from outside
            await asyncio.sleep(0.02)


def stream(columns: dict[str, pa.Array], compression: str | None = None) -> bytes:
    """One record batch as an Arrow stream."""
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
