"""What is wrong is refused with a problem that names code, field and what was expected; nothing of it is done."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from integration.behaviour.world import ARROW, JSON, MSGPACK, Http, fresh, leases, stream

NAMES = [
    "..", "a..b", "%2F", "a%2Fb", "..%2F..%2Fetc", "%00", "a%00", "%0A", "-a", ".a", "_a", "a%20b", "%C3%A4", "~",
    "x" * 128, "%FF", "a%25",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
async def test_names(http: Http, topic: str, name: str) -> None:
    """No path, no control character, no 128th character: 400 wherever a name stands, and nothing is made."""
    listed = (await http.get("/v1/topics?page_size=1000")).body
    message = {"messages": [{"body": "x"}]}
    calls: list[tuple[str, str, Any]] = [
        ("PUT", f"/v1/topics/{name}", {}), ("GET", f"/v1/topics/{name}", None), ("PATCH", f"/v1/topics/{name}", {}),
        ("DELETE", f"/v1/topics/{name}", None), ("POST", f"/v1/topics/{name}/messages", message),
        ("PUT", f"/v1/topics/{topic}/groups/{name}", {}), ("GET", f"/v1/topics/{topic}/groups/{name}/lag", None),
        ("POST", f"/v1/topics/{topic}/groups/{name}/messages/receive", {}),
        ("POST", f"/v1/topics/{topic}/groups/{name}/seek", {"to": "earliest"}),
        ("GET", f"/v1/topics/{name}/queues/0/messages?offset=0", None),
        ("PUT", f"/v1/replays/{name}", {"topic": topic, "target": topic}),
    ]  # fmt: skip
    code = "invalid_request" if name == "%FF" else "invalid_name"  # bytes that are no text have no name at all
    for answer in await asyncio.gather(*(http.call(*call) for call in calls)):
        answer.refused(400, code)
    assert (await http.get("/v1/topics?page_size=1000")).body == listed
    assert (await http.get(f"/v1/topics/{topic}/groups")).ok()["groups"] == []


async def test_the_longest_name(http: Http) -> None:
    """127 characters are a name everywhere."""
    name = (fresh() + "." + "x" * 127)[:127]
    await http.make(name)
    await http.sent(name, "a")
    group = "g" * 127
    assert len(await http.leased(name, group)) == 1
    (await http.call("DELETE", f"/v1/topics/{name}")).ok(204)


async def test_unknown_objects(http: Http, topic: str) -> None:
    """404 with the kind of object in its code; producing, reading and settling make nothing."""
    nobody = fresh("nobody")
    (await http.send(nobody, "a")).refused(404, "topic_not_found")
    (await http.receive_answer(nobody, "g")).refused(404, "topic_not_found")
    (await http.read(nobody)).refused(404, "topic_not_found")
    (await http.settle(topic, nobody, acks=["x.0"])).refused(404, "group_not_found")
    (await http.get(f"/v1/topics/{topic}/groups/{nobody}/lag")).refused(404, "group_not_found")
    (await http.read(topic, queue=1)).refused(404, "queue_not_found")
    (await http.get("/v1/nothing")).refused(404, "route_not_found")
    answer = await http.call("POST", f"/v1/topics/{topic}")
    answer.refused(405, "method_not_allowed")
    assert {"GET", "PUT", "PATCH", "DELETE"} <= set(answer.headers["Allow"].replace(" ", "").split(","))
    (await http.get(f"/v1/topics/{nobody}")).refused(404, "topic_not_found")


MALFORMED: list[tuple[str, bytes, str, str | None]] = [
    (JSON, b"", "malformed_body", None),
    (JSON, b"{", "malformed_body", None),
    (JSON, b"[]", "invalid_request", "body"),
    (JSON, b"\xff\xfe", "malformed_body", None),
    (JSON, b'{"messages":[{"body":"\xff"}]}', "malformed_body", None),
    (JSON, b'{"messages":' + b"[" * 100_000, "invalid_request", "messages[0]"),
    (JSON, b'{"messages":[]}', "invalid_request", "messages"),
    (JSON, b'{"messages":null}', "invalid_request", "messages"),
    (JSON, b'{"messages":[{"body":1}]}', "invalid_request", "messages[0].body"),
    (JSON, b'{"messages":[{}]}', "invalid_request", "messages[0]"),
    (JSON, b'{"messages":[{"body":"a","body_base64":"YQ=="}]}', "invalid_request", "messages[0]"),
    (JSON, b'{"messages":[{"body_base64":"a"}]}', "invalid_request", "messages[0].body_base64"),
    (JSON, b'{"messages":[{"body":"a","delay_ms":1}]}', "unknown_field", "messages[0].delay_ms"),
    (JSON, b'{"messages":[{"body":"a"}],"more":1}', "unknown_field", "more"),
    (JSON, b'{"messages":[{"body":"a","properties":{"a":1}}]}', "invalid_request", None),
    (JSON, b'{"messages":[{"body":"a","queue":1e99}]}', "invalid_request", None),
    (JSON, b'{"messages":[{"body":"a","queue":99999999999999999999}]}', "invalid_request", None),
    (JSON, b'{"messages":[{"body":"a","born_ts":-1}]}', "invalid_request", "born_ts"),
    (JSON, b'{"messages":[{"body":"a","born_ts":253402300800000}]}', "invalid_request", "born_ts"),
    (JSON, b'{"messages":[{"body":"a","born_ts":1.5}]}', "invalid_request", "messages[0].born_ts"),
    (JSON, b'{"messages":[{"body":"a","tag":""}]}', "invalid_request", "tag"),
    (JSON, b'{"messages":[{"body":"a","tag":"a||b"}]}', "invalid_request", "tag"),
    (JSON, b'{"messages":[{"body":"a","dedup_id":""}]}', "invalid_request", "dedup_id"),
    (JSON, b'{"messages":[{"body":"a"}],"producer":{"id":"p","queue":0,"first":1,"last":0}}', "invalid_request",
     "producer.last"),
    (JSON, b'{"messages":[{"body":"a"}],"producer":{"id":"p","queue":-1,"first":0,"last":0}}', "queue_not_found", None),
    (JSON, b'{"messages":[{"body":"a"}],"producer":{"id":"p","queue":0,"first":0,"last":9e99}}', "invalid_request",
     None),
    (MSGPACK, b"", "malformed_body", None),
    (MSGPACK, b"\xc1", "malformed_body", None),
    (MSGPACK, b"\xdd\xff\xff\xff\xff", "invalid_request", None),
    (MSGPACK, b"\x81\xa8messages\xdd\xff\xff\xff\xff", "malformed_body", None),
    (MSGPACK, msgspec.msgpack.encode({"messages": [{"body": 5}]}), "invalid_request", "messages[0].body"),
    (MSGPACK, msgspec.msgpack.encode({"messages": [{"body": b"a", "x": 1}]}), "unknown_field", "messages[0].x"),
    (MSGPACK, msgspec.msgpack.encode({"messages": [{"body": b"a"}]})[:-1], "malformed_body", None),
    (ARROW, b"", "malformed_body", None),
    (ARROW, b"not arrow at all, only text of some length", "malformed_body", None),
    (ARROW, stream({"body": pa.array([b"a"])})[:-20], "malformed_body", None),
    (ARROW, stream({"body": pa.array([1, 2])}), "invalid_request", "body"),
    (ARROW, stream({"body": pa.array([b"a", None])}), "invalid_request", "body"),
    (ARROW, stream({"key": pa.array([b"a"])}), "invalid_request", "body"),
    (ARROW, stream({"body": pa.array([b"a"]), "tag": pa.array([1])}), "invalid_request", "tag"),
    (ARROW, stream({"body": pa.array([b"a"]), "born_ts": pa.array(["x"])}), "invalid_request", "born_ts"),
    (ARROW, stream({"body": pa.array([b"a"]), "more": pa.array(["x"])}), "unknown_field", "more"),
    (ARROW, stream({"body": pa.array([b"a"]), "delay_ms": pa.array([1])}), "invalid_request", "delay_ms"),
    (ARROW, stream({"body": pa.array([], pa.binary())}), "invalid_request", "body"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(MALFORMED)))
async def test_malformed_messages(http: Http, topic: str, case: int) -> None:
    """Every codec says what is wrong and where, and appends nothing."""
    content_type, body, code, field = MALFORMED[case]
    answer = await http.post(topic, body, content_type, Accept=JSON)
    problem = answer.refused(404 if code == "queue_not_found" else 400, code)
    if field is not None:
        assert problem["errors"][0]["field"] == field, problem
        assert problem["errors"][0]["expected"]
    assert await http.ends(topic) == [0]
    await http.sent(topic, "still served")


async def test_hostile_arrow_never_ends_the_process(http: Http, topic: str) -> None:
    """Each byte of a stream turned over: refused or taken, never a failure, and the process lives."""
    good = stream({"body": pa.array([b"abc", b"defg"]), "tag": pa.array(["x", None])}, "lz4")
    before = (await http.metrics()).get('millpond_proxy_requests_total{status="500"}', 0.0)

    async def send(at: int) -> int:
        bad = bytearray(good)
        bad[at] ^= 0xFF
        return (await http.post(topic, bytes(bad), ARROW)).status

    for start in range(0, len(good), 64):
        some = await asyncio.gather(*(send(at) for at in range(start, min(len(good), start + 64))))
        assert set(some) <= {200, 400, 413}
    assert (await http.metrics()).get('millpond_proxy_requests_total{status="500"}', 0.0) == before
    await http.sent(topic, "still served")
    assert (await http.read(topic, "offset=0&limit=10000")).status == 200


HEADERS: list[tuple[dict[str, str], str]] = [
    ({"millpond_queue": "-1"}, "Millpond-Queue"),
    ({"millpond_queue": "x"}, "Millpond-Queue"),
    ({"millpond_queue": "9" * 30}, "Millpond-Queue"),
    ({"millpond_born_ts": "yesterday"}, "Millpond-Born-Ts"),
    ({"millpond_delay_ms": "5"}, "Millpond-Delay-Ms"),
    ({"millpond_producer": "{"}, "Millpond-Producer"),
    ({"millpond_tag": "a b"}, "tag"),
    ({"millpond_key": "k" * 1_025}, "key"),
    ({"millpond_property_a": "v" * 4_000, **{f"millpond_property_b{n}": "v" * 4_000 for n in range(2)}}, ""),
    ({"idempotency_key": "k" * 300}, "Idempotency-Key"),
]


@pytest.mark.parametrize("case", range(len(HEADERS)))
async def test_bad_headers_of_a_raw_message(http: Http, topic: str, case: int) -> None:
    """A header that cannot be is named, and nothing is appended. (Twelve kilobytes of properties are fine.)"""
    headers, field = HEADERS[case]
    answer = await http.post(topic, b"x", "text/plain", **headers)
    if field:
        answer.refused(400, "invalid_request", field)
    assert await http.ends(topic) == [0 if field else 1]


async def test_numbers_that_make_no_sense(http: Http, topic: str) -> None:
    """Negative, huge, fractional, of the wrong type: 400 that names the field, and nobody got a lease."""
    await http.sent(topic, "a", "b")
    receive: list[tuple[dict[str, Any], str]] = [
        ({"max_messages": 0}, "max_messages"), ({"max_messages": 1_001}, "max_messages"),
        ({"max_messages": -1}, "max_messages"), ({"max_messages": 10**30}, "max_messages"),
        ({"max_messages": "5"}, "max_messages"), ({"max_messages": 1.5}, "max_messages"),
        ({"wait_ms": -1}, "wait_ms"), ({"wait_ms": 30_001}, "wait_ms"), ({"lease_ms": 999}, "lease_ms"),
        ({"lease_ms": 12 * 3_600_000 + 1}, "lease_ms"), ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": (16 << 20) + 1}, "max_bytes"), ({"attempt_id": ""}, "attempt_id"),
        ({"attempt_id": "x" * 128}, "attempt_id"), ({"start": "middle"}, "start"), ({"filter": {"tag": "a ||"}}, None),
        ({"filter": {"sql": "a"}}, "filter.sql"), ({"unknown": 1}, "unknown"),
    ]  # fmt: skip
    for body, field in receive:
        problem = (await http.receive_answer(topic, "g", **body)).refused(
            400, "unknown_field" if field in {"unknown", "filter.sql"} else "invalid_request"
        )
        assert field is None or problem["errors"][0]["field"] == field, (body, problem)
    (await http.get(f"/v1/topics/{topic}/groups/g")).refused(404, "group_not_found")
    queries = [
        ("", "offset"), ("offset=0&tail=1", "offset"), ("offset=-1", "offset"), ("offset=x", "offset"),
        ("offset=99999999999999999999999", "offset"), ("tail=0", "tail"), ("tail=10001", "tail"), ("time=-1", "time"),
        ("time=253402300800000", "time"), ("offset=0&limit=0", "limit"), ("offset=0&limit=10001", "limit"),
        ("offset=0&max_bytes=0", "max_bytes"), ("offset=0&wait_ms=30001", "wait_ms"), ("offset=0&clock=born", "clock"),
        ("time=0&clock=moon", "clock"), ("offset=0&offset=1", "offset"), ("offset=0&filter=%7C%7C", None),
    ]  # fmt: skip
    for query, field in queries:
        problem = (await http.read(topic, query)).refused(400, "invalid_request")
        assert field is None or problem["errors"][0]["field"] == field, (query, problem)
    (await http.read(topic, "offset=0&more=1")).refused(400, "unknown_field", "more")
    [one] = leases(await http.leased(topic, "g", max_messages=1))
    settles: list[tuple[dict[str, Any], str]] = [
        ({"nacks": [{"lease_id": one, "delay_ms": -1}]}, "nacks[0].delay_ms"),
        ({"nacks": [{"lease_id": one, "delay_ms": 10**18}]}, "nacks[0].delay_ms"),
        ({"extends": [{"lease_id": one, "lease_ms": 0}]}, "extends[0].lease_ms"),
        ({"acks": [one], "nacks": [{"delay_ms": 5}]}, "nacks[0]"),
        ({"acks": [one, {"receipt": one, "rows": "5-1"}]}, "item 1: rows"),
        ({"acks": [one, {"receipt": one, "rows": "0-99999999999999999999"}]}, "item 1: rows"),
        ({"acks": [one, {"receipt": one, "rows": "-1"}]}, "item 1: rows"),
        ({"acks": [one] * 10_001}, "acks"),
    ]  # fmt: skip
    for body, field in settles:
        (await http.settle(topic, "g", **body)).refused(400, "invalid_request", field)
    assert (await http.lag(topic, "g"))["queues"][0]["in_flight"] == 1
    for to, field in (
        ({"time": -1}, "to.time"),
        ({"time": 10**18}, "to.time"),
        ({}, "to"),
        ({"offsets": {}}, "to.offsets"),
    ):
        (await http.seek(topic, "g", to)).refused(400, "invalid_request", field)
    (await http.seek(topic, "g", "sideways")).refused(400, "invalid_request")
    assert await http.settled(topic, "g", acks=[one]) == ["ok"]


async def test_bodies_over_the_limit(http: Http, topic: str) -> None:
    """Declared and chunked: 413 while it is sent, nothing appended, and others are served meanwhile."""
    chunk = b" " * (1 << 20)

    async def endless() -> Any:
        for _ in range(64):
            yield chunk

    declared = await http.post(topic, b'{"messages":[' + b" " * (17 << 20), JSON)
    assert declared.refused(413, "body_too_large")["limit_bytes"] == 16 << 20
    chunked = await http.call(
        "POST", f"/v1/topics/{topic}/messages", data=endless(), headers={"Content-Type": "application/json"}
    )
    chunked.refused(413, "body_too_large")
    for path in (f"/v1/topics/{topic}/groups/g/messages/receive", f"/v1/topics/{topic}/groups/g/seek"):
        answer = await http.call("POST", path, data=b" " * ((1 << 20) + 1), headers={"Content-Type": JSON})
        answer.refused(413, "body_too_large")
    assert await http.ends(topic) == [0]


async def test_batches_over_the_limit(http: Http, topic: str) -> None:
    """10,001 messages are too many in every codec; 10,000 are not."""
    many = [{"body": ""}] * 10_001
    (await http.send(topic, *many)).refused(413, "batch_too_large")
    packed = msgspec.msgpack.encode({"messages": [{"body": b""}] * 10_001})
    (await http.post(topic, packed, MSGPACK)).refused(413, "batch_too_large")
    (await http.post(topic, stream({"body": pa.array([b""] * 10_001)}), ARROW)).refused(413, "batch_too_large")
    assert await http.ends(topic) == [0]
    (await http.send(topic, *many[1:], headers={"Prefer": "return=minimal"})).ok()
    assert await http.ends(topic) == [10_000]


async def test_encodings_and_types_that_are_not_taken(http: Http, topic: str) -> None:
    """Compressed bodies are never inflated; what nobody makes is 406; JSON calls want JSON."""
    body = b'{"messages":[{"body":"a"}]}'
    for encoding in ("gzip", "deflate", "br", "zstd"):
        headers = {"Content-Type": JSON, "Content-Encoding": encoding}
        answer = await http.call("POST", f"/v1/topics/{topic}/messages", data=body, headers=headers)
        answer.refused(415, "unsupported_media_type")
    (await http.send(topic, "a", headers={"Accept": "text/html"})).refused(406, "not_acceptable")
    (await http.read(topic, accept="image/png")).refused(406, "not_acceptable")
    path = f"/v1/topics/{topic}/groups/g/messages/receive"
    (await http.call("POST", path, data=b"{}", headers={"Content-Type": "text/xml"})).refused(
        415, "unsupported_media_type"
    )
    (await http.post(topic, b"x", "application/cloudevents+json")).refused(415, "unsupported_media_type")
    assert await http.ends(topic) == [0]


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"queues": 0}, "invalid_request", "queues"),
        ({"queues": 1_025}, "invalid_request", "queues"),
        ({"queues": 10**40}, "invalid_request", "queues"),
        ({"durability": "never"}, "invalid_request", "durability"),
        ({"retention": {"ms": -1}}, "invalid_request", "retention.ms"),
        ({"retention": {"days": 1}}, "unknown_field", "retention.days"),
        ({"max_message_bytes": (4 << 20) + 1}, "invalid_request", "max_message_bytes"),
        ({"dedup_window_ms": 10**12}, "invalid_request", "dedup_window_ms"),
        ({"queue": 4}, "unknown_field", "queue"),
        ([], "invalid_request", "body"),
        ("x", "invalid_request", "body"),
    ],
)
async def test_topics_that_cannot_be(http: Http, body: Any, code: str, field: str) -> None:
    """The field is named and no topic is made."""
    name = fresh()
    (await http.call("PUT", f"/v1/topics/{name}", body)).refused(400, code, field)
    (await http.get(f"/v1/topics/{name}")).refused(404, "topic_not_found")
