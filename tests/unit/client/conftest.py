"""A small service that speaks the part of the HTTP API which the SDK needs, with faults on demand."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from millpond.client.connection import Connection
from millpond.core.schema import TIER_SCHEMA

ARROW = "application/vnd.apache.arrow.stream"


class Asked(NamedTuple):
    method: str
    path: str
    body: bytes


@dataclass
class FakeService:
    """One topic's queues as lists of rows; sessions as the store keeps them; groups as cursors and leases."""

    queues: int = 4
    rows: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    sessions: dict[tuple[str, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    produced: list[dict[str, Any]] = field(default_factory=list)  # one entry a request: what its head said
    settled: list[dict[str, Any]] = field(default_factory=list)
    statuses: dict[str, str] = field(default_factory=dict)  # of a lease id; ok for others
    requests: list[Asked] = field(default_factory=list)
    faults: deque[Callable[[str], web.Response | None]] = field(default_factory=deque)  # each used by one request
    held: dict[int, asyncio.Event] = field(default_factory=dict)  # produces to these queues wait for it
    came: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))  # released by every produce
    lose_answers: int = 0  # so many produce requests are done and then answered by a closed connection
    receives: deque[web.Response] = field(default_factory=deque)
    more: asyncio.Event = field(default_factory=asyncio.Event)  # set: a waiting receive looks again
    settles: asyncio.Event = field(default_factory=asyncio.Event)  # set by every settle
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    url: str = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(Asked(request.method, request.path, await request.read()))
        if self.faults:
            fault = self.faults.popleft()(request.path)
            if fault is not None:
                await request.read()
                return fault
        if request.path.endswith("/queues"):
            listed = [
                {
                    "queue": q, "start_offset": 0, "tiered_to": 0, "end_offset": len(self.rows[q]),
                    "id_prefix": f"a-{q + 10}-",
                }
                for q in range(self.queues)
            ]  # fmt: skip
            return web.json_response({"queues": listed})
        if request.path.endswith("/messages") and request.method == "POST":
            return await self._produce(request)
        if request.path.endswith("/messages/receive"):
            await request.read()
            if not self.receives:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.more.wait(), 5)
                self.more.clear()
            return self.receives.popleft() if self.receives else arrow_answer([], {})
        if request.path.endswith("/messages/ack"):
            return await self._settle(request)
        if "/groups/" in request.path:
            return await self._group(request)
        return problem(404, "route_not_found", "nothing here")

    async def _group(self, request: web.BaseRequest) -> web.StreamResponse:
        name = request.path.rpartition("/")[2]
        if request.method == "PUT":
            asked = json.loads(await request.read())
            self.groups[name] = {"start": "latest", "filter": {"tag": None}, **asked}
        if name not in self.groups:
            return problem(404, "group_not_found", name)
        answer = {
            "group": name,
            "topic": "t",
            "start": "latest",
            "filter": {},
            "filter_version": 1,
            "max_in_flight": 1,
            "created_ms": 1,
        }
        return web.json_response(answer | self.groups[name])

    async def _produce(self, request: web.BaseRequest) -> web.StreamResponse:
        batch = pa.ipc.open_stream(await request.read()).read_all()
        part = json.loads(request.headers["Millpond-Producer"])
        queue = int(request.headers["Millpond-Queue"])
        self.produced.append({**part, "count": batch.num_rows, "bytes": batch.nbytes, "schema": batch.schema})
        self.came.release()
        if queue in self.held:
            await self.held[queue].wait()
        first = self._accept(part, queue, batch)
        if first is None:
            return problem(409, "out_of_order", "previous is not the last")
        if self.lose_answers:
            self.lose_answers -= 1
            assert request.transport is not None
            request.transport.close()
        ranges = [{"queue": queue, "first_offset": first, "count": batch.num_rows}]
        return web.json_response({"ranges": ranges})

    def _accept(self, part: dict[str, Any], queue: int, batch: pa.Table) -> int | None:
        parts = self.sessions.setdefault((part["id"], queue), [])
        if parts and part["last"] <= parts[-1][1]:
            return next((offset for _, last, offset in parts if part["last"] == last), -1)
        if part["previous"] != (parts[-1][1] if parts else None):
            return None
        first = len(self.rows[queue])
        self.rows[queue] += batch.to_pylist()
        parts.append((part["first"], part["last"], first))
        return first

    async def _settle(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = json.loads(await request.read())
        self.settled.append(asked)
        items = [*asked.get("acks", []), *asked.get("nacks", []), *asked.get("extends", [])]
        named = [{"lease_id": item} if isinstance(item, str) else item for item in items]
        self.settles.set()
        results = [{**item, "status": self.statuses.get(str(item.get("lease_id")), "ok")} for item in named]
        return web.json_response({"results": results})

    def settled_rows(self, kind: str) -> list[str]:
        """`token.row` of everything settled so far by acks, nacks or extends, ascending."""
        found = []
        for call in self.settled:
            for item in call.get(kind, []):
                if isinstance(item, str) or "lease_id" in item:
                    found.append(item if isinstance(item, str) else item["lease_id"])
                else:
                    for part in item["rows"].split(","):
                        first, _, last = part.partition("-")
                        found += [f"{item['receipt']}.{row}" for row in range(int(first), int(last or first) + 1)]
        return sorted(found)


def problem(status: int, code: str, detail: str, **headers: str) -> web.Response:
    body = {"type": "about:blank", "title": code, "status": status, "code": code, "detail": detail, "request_id": "r1"}
    return web.json_response(body, status=status, headers=headers, content_type="application/problem+json")


def arrow_answer(
    rows: list[dict[str, Any]], metadata: dict[str, Any], attempt: int = 1, batch_rows: int | None = None
) -> web.Response:
    """A receive's answer in Arrow: TIER_SCHEMA, delivery_attempt, and the receipts in the schema's metadata; in record
    batches of so many rows."""
    schema = TIER_SCHEMA.append(pa.field("delivery_attempt", pa.int32()))
    schema = schema.with_metadata({b"millpond": json.dumps({"receipts": [], **metadata}).encode()})
    full = [{**dict.fromkeys(schema.names), "store_ts": 1, "delivery_attempt": attempt, **row} for row in rows]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.Table.from_pylist(full, schema), batch_rows)
    return web.Response(body=sink.getvalue().to_pybytes(), content_type=ARROW)


class Steady:
    """Randomness for tests: the shortest delays, so that retries cost no time, and ids that differ."""

    def __init__(self) -> None:
        self.count = 0

    def bytes(self, count: int) -> bytes:
        self.count += 1
        return self.count.to_bytes(count, "big")

    def uniform(self, low: float, high: float) -> float:
        return 0.0


@pytest.fixture
async def connection(service: FakeService) -> AsyncIterator[Connection]:
    async with Connection(service.url, random=Steady()) as connection:
        yield connection


@pytest.fixture
async def service() -> AsyncIterator[FakeService]:
    fake = FakeService()
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{tail:.*}", fake.handle)
    server = TestServer(app)
    await server.start_server()
    fake.url = str(server.make_url("")).rstrip("/")
    yield fake
    fake.more.set()
    for held in fake.held.values():
        held.set()
    await server.close()
