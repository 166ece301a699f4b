"""`POST /v1/topics/{topic}/messages` over HTTP: what is accepted, what is refused and how, and that nothing of a
refused request is written."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pyarrow as pa
import pytest
import yarl
from aiohttp import web

from millpond.core import limits
from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.errors import ErrorInfo, NotFound, Unavailable
from millpond.core.hashing import hash_bytes
from millpond.core.http.prompt import PROMPT_BYTES
from millpond.core.http.routing import Route, Router
from millpond.core.http.server import HttpServer
from millpond.metadata.client import Principal, TopicInfo
from millpond.proxy.coalesce import Coalescer
from millpond.proxy.counters import Counters
from millpond.proxy.parts import ProxyCall
from millpond.proxy.routes import produce
from millpond.proxy.routes.produce import ROUTES, _asked, _begin
from millpond.store.client import AppendOutcome, Duplicate

from .conftest import ScriptedStore, topic_of

ARROW = "application/vnd.apache.arrow.stream"
PRINCIPAL = Principal(1, "default", "k", ["produce"])


class Topics:
    def __init__(self, prompt: bool) -> None:
        """`prompt` False: no topic is known without asking, so every request goes the usual way."""
        self.known = {"orders": topic_of(4, max_message_bytes=1_000), "one": topic_of(1)}
        self.prompt = prompt

    def known_topic(self, tenant: str, name: str) -> TopicInfo | None:
        return self.known.get(name) if self.prompt else None

    async def topic(self, tenant: str, name: str) -> TopicInfo:
        if name not in self.known:
            raise NotFound("topic_not_found", f"no topic {name}")
        return self.known[name]


class OpenGate:
    def known(self, request: object, scope: object) -> Principal:
        return PRINCIPAL


class Client:
    def __init__(self, session: aiohttp.ClientSession, address: str, counters: Counters) -> None:
        self.session, self.address, self.counters = session, address, counters

    async def post(self, body: Any, topic: str = "orders", content_type: str = "application/json", **headers: str):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": content_type, **{name.replace("_", "-"): value for name, value in headers.items()}}
        url = f"{self.address}/v1/topics/{topic}/messages"
        large = len(data) > PROMPT_BYTES  # which aiohttp does not take as it is
        async with self.session.post(url, data=io.BytesIO(data) if large else data, headers=sent) as response:
            content = await response.read()
            shown = response.content_type
            return response.status, json.loads(content) if shown.endswith("json") else content


@asynccontextmanager
async def serving(store: ScriptedStore, prompt: bool, routes: list[Route] = ROUTES) -> AsyncIterator[Client]:
    coalescer = Coalescer(lambda queue: store)
    parts = SimpleNamespace(
        catalog=Topics(prompt), coalescer=coalescer, clock=SystemClock(), random=SystemRandom(), counters=Counters()
    )
    server = HttpServer(Router(routes), OpenGate(), parts, SystemRandom())
    await server.start("127.0.0.1:0")
    async with aiohttp.ClientSession() as session:
        yield Client(session, server.address, parts.counters)
    await coalescer.close()
    await server.stop(0)


@pytest.fixture(params=["prompt", "usual"])
async def client(request: pytest.FixtureRequest, store: ScriptedStore) -> AsyncIterator[Client]:
    """Both ways that a request may take."""
    async with serving(store, request.param == "prompt") as client:
        yield client


def stream(table: dict[str, pa.Array], compression: str | None = None) -> bytes:
    batch = pa.record_batch(table)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


# -- what is accepted -----------------------------------------------------------------------------------------


async def test_one_json_message(client: Client, store: ScriptedStore) -> None:
    """Every field arrives; the id names store group, queue and offset."""
    message = {"body": "hällo", "key": "k", "tag": "t", "properties": {"a": "b"}, "born_ts": 5}
    status, answer = await client.post({"messages": [message]})
    queue = hash_bytes(b"k") % 4
    result = {"message_id": f"a-{100 + queue}-0", "queue": queue, "offset": 0, "store_ts": 1_000}
    assert (status, answer) == (200, {"results": [result]})
    stored = store.frames[0].batch.to_pylist()[0]
    assert (stored["body"], stored["key"], stored["tag"]) == ("hällo".encode(), b"k", "t")
    assert stored["properties"] == [("a", "b")]


async def test_a_json_batch_answers_in_order(client: Client, store: ScriptedStore) -> None:
    """Over all queues: each result is that of its message."""
    messages = [{"body": f"{row}", "queue": row % 4} for row in range(9)]
    messages[4] = {"body_base64": base64.b64encode(b"\xff\x00").decode(), "queue": 0}
    status, answer = await client.post({"messages": messages})
    assert status == 200
    assert [(one["queue"], one["offset"]) for one in answer["results"]] == [(row % 4, row // 4) for row in range(9)]
    assert store.frames[0].bodies == [b"0", b"\xff\x00", b"8"]


async def test_msgpack_takes_bytes(client: Client, store: ScriptedStore) -> None:
    """Binary keys and bodies; the answer may be msgpack too."""
    body = msgspec.msgpack.encode(
        {"messages": [{"body": b"\xff", "key": b"\xfe", "queue": 1}, {"body": b"b", "queue": 1}]}
    )
    status, content = await client.post(body, content_type="application/msgpack", Accept="application/msgpack")
    assert status == 200
    assert [one["offset"] for one in msgspec.msgpack.decode(content)["results"]] == [0, 1]
    assert store.frames[0].batch.to_pydict() == {"key": [b"\xfe", None], "body": [b"\xff", b"b"]}


async def test_a_raw_body_with_headers(client: Client, store: ScriptedStore) -> None:
    """Any other content type is one message as it is; property names come in lower case."""
    status, answer = await client.post(
        b"\x00raw", content_type="image/png", Millpond_Key="k", Millpond_Tag="t", Millpond_Queue="2",
        Millpond_Dedup_Id="d", Millpond_Born_Ts="7", **{"Millpond-Property-Origin": "here"},
    )  # fmt: skip
    assert (status, answer["results"][0]["queue"]) == (200, 2)
    frame = store.frames[0]
    assert frame.batch.to_pylist()[0]["properties"] == [("origin", "here")]
    assert (frame.bodies, frame.append.dedup_window_ms) == ([b"\x00raw"], 300_000)


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_arrow_to_a_named_queue(client: Client, store: ScriptedStore, compression: str | None) -> None:
    """The batch stands in one frame, byte for byte, and the answer is a table of ranges."""
    data = stream({"tag": pa.array(["t"] * 30), "body": pa.array([b"x" * 20] * 30)}, compression)
    status, content = await client.post(data, content_type=ARROW, Millpond_Queue="3", Accept=ARROW)
    table = pa.ipc.open_stream(content).read_all()
    assert (status, table.to_pydict()) == (200, {"queue": [3], "first_offset": [0], "count": [30]})
    assert store.frames[0].append.payload.to_pybytes() in data


async def test_minimal_answers_ranges(client: Client) -> None:
    """`Prefer: return=minimal` of a batch and of one message."""
    status, answer = await client.post(
        {"messages": [{"body": "a", "queue": q} for q in (0, 1, 0)]}, Prefer="return=minimal"
    )
    ranges = [{"queue": 0, "first_offset": 0, "count": 2}, {"queue": 1, "first_offset": 0, "count": 1}]
    assert (status, answer) == (200, {"ranges": ranges})
    _, answer = await client.post({"messages": [{"body": "a", "queue": 0}]}, Prefer="return=minimal")
    assert answer == {"ranges": [{"queue": 0, "first_offset": 2, "count": 1}]}


async def test_a_bad_message_is_its_own_error(client: Client, store: ScriptedStore) -> None:
    """Too large, bad tag, no such queue: an `error` in its place, the others are written."""
    messages = [
        {"body": "a"},
        {"body": "x" * 1_001},
        {"body": "b", "tag": "a|b"},
        {"body": "c", "queue": 4},
        {"body": "d"},
    ]
    status, answer = await client.post({"messages": messages})
    codes = [one.get("error", {}).get("code") for one in answer["results"]]
    assert (status, codes) == (200, [None, "message_too_large", "invalid_request", "queue_not_found", None])
    assert store.frames[0].bodies == [b"a", b"d"]


async def test_a_session_part(client: Client, store: ScriptedStore) -> None:
    """`producer` in JSON, the header elsewhere: the part travels with the frame."""
    part = {"id": "s", "queue": 2, "previous": None, "first": 0, "last": 5}
    status, answer = await client.post({"messages": [{"body": "a", "key": "k"}, {"body": "b"}], "producer": part})
    assert (status, {one["queue"] for one in answer["results"]}) == (200, {2})
    data = stream({"body": pa.array([b"c"])})
    header = json.dumps({**part, "previous": 5, "first": 6, "last": 6})
    assert (await client.post(data, content_type=ARROW, Millpond_Producer=header))[0] == 200
    assert (await client.post(b"d", content_type="text/plain", Millpond_Producer=header))[0] == 200
    assert [(one.append.parts[0].previous, one.append.parts[0].rows) for one in store.frames] == [
        (-1, 2),
        (5, 1),
        (5, 1),
    ]


async def test_idempotency_key_gives_every_message_its_id(client: Client, store: ScriptedStore) -> None:
    """Keyless messages of one request stay in one queue; a repeat is answered with the first places."""
    messages = {"messages": [{"body": "a"}, {"body": "b"}]}
    status, _ = await client.post(messages, Idempotency_Key="K")
    assert (status, len(store.frames)) == (200, 1)
    store.script = lambda append: AppendOutcome(duplicates=[Duplicate(row, row, 1_000) for row in range(append.count)])
    status, answer = await client.post(messages, Idempotency_Key="K")
    assert (status, [one["offset"] for one in answer["results"]]) == (200, [0, 1])
    assert all(one["duplicate"] for one in answer["results"])


# -- what is refused, whole -----------------------------------------------------------------------------------

GOOD = {"messages": [{"body": "a"}, {"body": "b"}]}
PART = {"id": "s", "queue": 0, "previous": 3, "first": 4, "last": 9}
MSGPACK = {"Content-Type": "application/msgpack"}
AS_ARROW = {"Content-Type": ARROW}
REFUSED: list[tuple[int, str, Any, dict[str, str]]] = [
    (400, "malformed_body", b"{", {}),
    (400, "malformed_body", b"\xff\xfe", {}),
    (400, "invalid_request", b"[" * 100_000, {}),
    (400, "invalid_request", b"[" * 100 + b"]" * 100, {}),
    (400, "malformed_body", b"", {}),
    (400, "invalid_request", {"messages": []}, {}),
    (400, "invalid_request", {"messages": {}}, {}),
    (400, "unknown_field", {"messages": [{"body": "a"}], "colour": 1}, {}),
    (400, "unknown_field", {"messages": [{"body": "a", "delay_ms": 5}]}, {}),
    (400, "invalid_request", {"messages": [{}]}, {}),
    (400, "invalid_request", {"messages": [{"body": "a", "body_base64": "YQ=="}]}, {}),
    (400, "invalid_request", {"messages": [{"body_base64": "?"}]}, {}),
    (400, "invalid_request", {"messages": [{"body": 5}]}, {}),
    (400, "invalid_request", {"messages": [{"body": "a", "properties": {"a": 1}}]}, {}),
    (400, "invalid_request", {"messages": [{"body": "a", "born_ts": -1}]}, {}),
    (400, "invalid_request", {"messages": [{"body": "a", "born_ts": 10**30}]}, {}),
    (400, "invalid_request", {"messages": [{"body": "a", "born_ts": 1.5}]}, {}),
    (400, "invalid_request", {"messages": [{"body": "a", "queue": 2**31}]}, {}),
    (404, "queue_not_found", {"messages": [{"body": "a", "queue": -1}]}, {}),
    (404, "queue_not_found", {"messages": [{"body": "a", "queue": 4}, {"body": "a", "queue": 5}]}, {}),
    (413, "message_too_large", {"messages": [{"body": "ä" * 501}]}, {}),
    (413, "batch_too_large", b'{"messages":[' + b'{"body":""},' * 10_000 + b'{"body":""}]}', {}),
    (413, "body_too_large", b" " * (limits.BATCH_BYTES + 1), {}),
    (413, "message_too_large", {"messages": [{"body": "a"}, {"body": "x" * 1_001}]}, {"Prefer": "return=minimal"}),
    (400, "invalid_request", {**GOOD, "producer": {**PART, "previous": 4}}, {}),
    (400, "invalid_request", {**GOOD, "producer": {**PART, "last": 3}}, {}),
    (400, "invalid_request", {**GOOD, "producer": {**PART, "last": 4}}, {}),
    (400, "invalid_request", {**GOOD, "producer": {**PART, "id": ""}}, {}),
    (400, "invalid_request", {**GOOD, "producer": {**PART, "last": 2**63}}, {}),
    (404, "queue_not_found", {**GOOD, "producer": {**PART, "queue": 4}}, {}),
    (400, "invalid_request", {"messages": [{"body": "a", "queue": 0}], "producer": PART}, {}),
    (400, "invalid_request", {"messages": [{"body": "a", "dedup_id": "d"}], "producer": PART}, {}),
    (413, "message_too_large", {"messages": [{"body": "a"}, {"body": "x" * 1_001}], "producer": PART}, {}),
    (400, "invalid_request", {**GOOD, "producer": PART}, {"Idempotency-Key": "K"}),
    (400, "invalid_request", {"messages": [{"body": "a", "dedup_id": "d"}]}, {"Idempotency-Key": "K"}),
    (400, "invalid_request", GOOD, {"Idempotency-Key": "K" * 251}),
    (400, "invalid_request", GOOD, {"Millpond-Queue": "1"}),
    (400, "invalid_request", b"a", {"Content-Type": "text/plain", "Millpond-Queue": "-1"}),
    (404, "queue_not_found", b"a", {"Content-Type": "text/plain", "Millpond-Queue": "4"}),
    (400, "invalid_request", b"a", {"Content-Type": "text/plain", "Millpond-Delay-Ms": "4"}),
    (400, "invalid_request", b"a", {"Content-Type": "text/plain", "Millpond-Producer": "{"}),
    (400, "invalid_request", b"a", {"Content-Type": "text/plain", "Millpond-Tag": "a b"}),
    (413, "message_too_large", b"a" * 1_001, {"Content-Type": "text/plain"}),
    (415, "unsupported_media_type", b"{}", {"Content-Type": "application/cloudevents+json"}),
    (400, "malformed_body", b"\xc1", MSGPACK),
    (400, "unknown_field",
     msgspec.msgpack.encode({"messages": [{"body": b"", "body_base64": ""}]}), MSGPACK),
    (413, "batch_too_large",
     b"\x81\xa8messages\xdd\x00\x00\x27\x11" + b"\x81\xa4body\xc4\x00" * 10_001, MSGPACK),
    (400, "malformed_body", b"not arrow", {"Content-Type": ARROW}),
    (400, "invalid_request", stream({"body": pa.array(["a"]), "key": pa.array([1])}), {"Content-Type": ARROW}),
    (404, "queue_not_found", stream({"body": pa.array(["a"])}), {**AS_ARROW, "Millpond-Queue": "9"}),
    (400, "invalid_request", stream({"body": pa.array(["a"]), "queue": pa.array([0], pa.int32())}),
     {**AS_ARROW, "Millpond-Queue": "0"}),
    (406, "not_acceptable", GOOD, {"Accept": "text/html"}),
]  # fmt: skip


@pytest.mark.parametrize(("status", "code", "body", "headers"), REFUSED)
async def test_refused_whole(
    client: Client, store: ScriptedStore, status: int, code: str, body: Any, headers: dict[str, str]
) -> None:
    """One problem, and nothing is sent to the store."""
    headers = dict(headers)
    content_type = headers.pop("Content-Type", "application/json")
    got, problem = await client.post(body, content_type=content_type, **headers)
    assert (got, problem["code"]) == (status, code), problem
    assert store.requests == []


@pytest.mark.parametrize("name", ["nowhere", "..", "a%2Fb", "a%00b", "x" * 128, "%2e%2e"])
async def test_unknown_topics_and_bad_names(client: Client, name: str) -> None:
    """404 for a topic there is not, 400 for what is no name, and never another path."""
    url = f"{client.address}/v1/topics/{name}/messages"
    async with client.session.post(yarl.URL(url, encoded=True), data=b"a") as response:
        problem = await response.json(content_type=None)
    assert (response.status, problem["code"]) in {
        (404, "topic_not_found"),
        (400, "invalid_name"),
        (404, "route_not_found"),
    }


# -- what the store says --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"), [("disk_full", 507), ("flush_behind", 503), ("out_of_order", 409), ("dedup_window_full", 429)]
)
@pytest.mark.parametrize("messages", [1, 2])
async def test_a_request_of_which_nothing_was_written_is_a_problem(
    client: Client, store: ScriptedStore, code: str, status: int, messages: int
) -> None:
    """The store's error keeps its status, for one message and for many."""
    store.script = lambda append: AppendOutcome(error=ErrorInfo(code, "no"))
    got, problem = await client.post({"messages": [{"body": "a", "queue": 0}] * messages})
    assert (got, problem["code"]) == (status, code)


async def test_only_what_stands_is_counted_as_produced(client: Client, store: ScriptedStore) -> None:
    """Not what a store refused, in part of a request or in all of it."""
    no = AppendOutcome(error=ErrorInfo("flush_behind", "no"))
    store.script = lambda append: no if append.queue.queue == 1 else None
    for queues in ((0, 1, 0), (1, 1), (1,), (0,)):
        await client.post({"messages": [{"body": "a", "queue": queue} for queue in queues]})
    assert client.counters.snapshot()["produced_messages_total"] == 3


async def test_one_queue_fails(client: Client, store: ScriptedStore) -> None:
    """Results say which messages stand; minimal falls back to them; Arrow's problem names the ranges that stand."""
    no = AppendOutcome(error=ErrorInfo("flush_behind", "no"))
    store.script = lambda append: no if append.queue.queue == 1 else None
    messages = {"messages": [{"body": "a", "queue": queue} for queue in (0, 1, 0)]}
    for prefer in ("", "return=minimal"):
        status, answer = await client.post(messages, Prefer=prefer)
        codes = [one.get("error", {}).get("code") for one in answer["results"]]
        assert (status, codes) == (200, [None, "flush_behind", None])
        assert answer["results"][1]["error"]["retryable"] is True
    status, problem = await client.post(messages, Accept=ARROW)
    assert (status, problem["ranges"]) == (503, [{"queue": 0, "first_offset": 4, "count": 2}])


async def test_another_body_under_the_same_idempotency_key(client: Client, store: ScriptedStore) -> None:
    """422, and nothing is written in its place: for one message and for a batch."""
    store.script = lambda append: AppendOutcome(duplicates=[Duplicate(0, 7, 5, mismatch=True)])
    for messages in ([{"body": "a"}], [{"body": "a"}, {"body": "b"}]):
        status, problem = await client.post({"messages": messages}, Idempotency_Key="K")
        assert (status, problem["code"]) == (422, "dedup_mismatch")
    assert store.frames == []


async def test_a_mismatch_in_one_queue_refuses_the_whole_request(client: Client, store: ScriptedStore) -> None:
    """A request that reuses the key for another body is 422 also when another queue saw nothing strange."""
    again = AppendOutcome(duplicates=[Duplicate(0, 7, 5, mismatch=True)])
    store.script = lambda append: again if append.queue.queue == 1 else None
    messages = [{"body": "a", "queue": 0}, {"body": "b", "queue": 1}]
    status, problem = await client.post({"messages": messages}, Idempotency_Key="K")
    assert (status, problem["code"]) == (422, "dedup_mismatch")


async def test_a_client_that_leaves_in_the_middle(client: Client, store: ScriptedStore) -> None:
    """What was accepted is written although nobody waits for the answer; the next request is served."""
    store.gate.clear()
    leaving = asyncio.create_task(client.post({"messages": [{"body": "a", "queue": 0}]}))
    await store.arrived.wait()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    store.gate.set()
    status, answer = await client.post({"messages": [{"body": "b", "queue": 0}]})
    assert (status, answer["results"][0]["offset"]) == (200, 1)
    assert [frame.bodies for frame in store.frames] == [[b"a"], [b"b"]]


LARGEST_TEXT = {"body": "\u6d88" * (limits.MESSAGE_BYTES // 3)}
LARGEST_PROPERTIES = {"body": "x", "properties": {"a": "v" * (limits.PROPERTIES_BYTES - 1)}}
MOST_PROPERTIES = {"body": "x", "properties": {f"{number:04}": "" for number in range(limits.PROPERTIES_BYTES // 4)}}


@pytest.mark.parametrize(
    ("body", "media", "each"),
    [
        (json.dumps({"messages": [LARGEST_TEXT]}, ensure_ascii=False).encode(), "application/json", 4_000_000),
        (json.dumps({"messages": [LARGEST_PROPERTIES]}).encode(), "application/json", 32_000),
        (json.dumps({"messages": [MOST_PROPERTIES]}).encode(), "application/json", 90_000),
        (stream({"body": pa.array([bytes(limits.MESSAGE_BYTES)])}, "zstd"), ARROW, 4_000_000),
    ],
    ids=["text", "large properties", "many properties", "compressed"],
)
async def test_what_gathers_is_never_too_large_for_a_frame(
    store: ScriptedStore, body: bytes, media: str, each: int
) -> None:
    """It is counted as it stands there: bytes and not characters, properties too, decompressed."""
    coalescer = Coalescer(lambda queue: store)
    parts: Any = SimpleNamespace(coalescer=coalescer, clock=SystemClock(), random=SystemRandom(), counters=Counters())
    count = (limits.BATCH_BYTES + limits.BATCH_OVERHEAD_BYTES) // each + 1
    begun = [_begin(parts, topic_of(), _asked({}, media, "application/json"), body) for _ in range(count)]
    for one in begun:
        one.encode(await one.future)  # raises what a client would be refused with
    await coalescer.close()
    assert sum(frame.append.count for frame in store.frames) == count
    assert coalescer.pending_bytes == 0


# -- which way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "content_type", "headers"),
    [
        (b"raw", "text/plain", {}),
        ({"messages": [{"body": "a", "queue": 0}, {"body": "b", "queue": 3}]}, "application/json", {}),
        (stream({"body": pa.array([b"a"])}), ARROW, {"Prefer": "return=minimal", "Millpond-Queue": "1"}),
        (stream({"body": pa.array([b"a"])}), ARROW, {"Accept": ARROW}),
    ],
)
async def test_what_came_as_a_whole_has_no_task(
    store: ScriptedStore, body: Any, content_type: str, headers: dict[str, str]
) -> None:
    """It never comes to the usual handler."""
    usual: list[object] = []

    async def handler(call: ProxyCall) -> web.StreamResponse:
        usual.append(call)
        raise Unavailable("store_unavailable", "the usual way")

    [route] = ROUTES
    async with serving(store, True, [replace(route, handler=handler)]) as client:
        status, _ = await client.post(body, content_type=content_type, **headers)
    assert (status, usual) == (200, [])


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ({"messages": [{"body": "x" * 1_000}] * 400}, "application/json"),
        ({"messages": [{"body": "x" * 1_000, "key": "k"}] * 400}, "application/json"),
        (msgspec.msgpack.encode({"messages": [{"body": b"x" * 1_000}] * 400}), "application/msgpack"),
        (stream({"body": pa.array([b"x" * 1_000] * 400)}), ARROW),
    ],
)
async def test_of_large_ones_only_the_first_has_a_task(store: ScriptedStore, body: Any, content_type: str) -> None:
    """Those behind it, with its head, are the same messages, and never come to the usual handler."""
    usual: list[ProxyCall] = []

    async def handler(call: ProxyCall) -> web.StreamResponse:
        usual.append(call)
        return await produce.produce(call)

    [route] = ROUTES
    async with serving(store, True, [replace(route, handler=handler)]) as client:
        for _ in range(3):
            status, _ = await client.post(body, content_type=content_type)
            assert status == 200
    assert len(usual) == 1
    assert [frame.bodies for frame in store.frames] == [[b"x" * 1_000] * 400] * 3


async def test_a_body_over_the_limit_behind_a_large_one(client: Client, store: ScriptedStore) -> None:
    """Is refused as ever, whatever head it has."""
    body = json.dumps({"messages": [{"body": "x" * 1_000}] * 400}).encode()
    assert (await client.post(body))[0] == 200
    status, problem = await client.post(body + b" " * limits.BATCH_BYTES)
    assert (status, problem["code"]) == (413, "body_too_large")
    assert len(store.frames) == 1


async def test_headers_that_come_again_are_read_once(store: ScriptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message has the key and the answer that its own headers ask for, whatever came before on its connection;
    headers are read once for as often as they come in a row."""
    read: list[str] = []

    def asked(headers: Any, media: str, accepted: str) -> Any:
        read.append(headers["Millpond-Key"])
        return _asked(headers, media, accepted)

    monkeypatch.setattr(produce, "_asked", asked)
    sent = [("a", "*/*"), ("b", "*/*"), ("b", ARROW), ("a", "*/*")]
    async with serving(store, True) as client:
        for key, accept in sent:
            for _ in range(4):
                headers = {"Millpond-Key": key, "Accept": accept}
                status, answer = await client.post(b"x", "one", "text/plain", **headers)
                assert status == 200 and isinstance(answer, dict if accept == "*/*" else bytes)
    stored = [row["key"].decode() for frame in store.frames for row in frame.batch.to_pylist()]
    assert stored == [key for key, _ in sent for _ in range(4)]
    assert read == [key for key, _ in sent]
