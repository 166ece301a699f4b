"""Produce: every content type means the same messages, results stand in order, batches are whole."""

from __future__ import annotations

import asyncio
import base64
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from integration.behaviour.world import ARROW, JSON, MSGPACK, Answer, Http, bodies, fresh, stream

MESSAGES: list[dict[str, Any]] = [
    {
        "body": f"body {number} \u00fc",
        "key": f"key {number % 7}",
        "tag": None if number % 5 == 0 else f"tag{number % 3}",
        "properties": {} if number % 4 == 0 else {"number": str(number), "name \u00e4": "\u20ac"},
        "born_ts": None if number % 6 == 0 else 1_700_000_000_000 + number,
    }
    for number in range(40)
]
FIELDS = ("body", "key", "tag", "properties", "born_ts")


def as_json(messages: list[dict[str, Any]]) -> bytes:
    return msgspec.json.encode({"messages": messages})


def as_msgpack(messages: list[dict[str, Any]]) -> bytes:
    coded = [{**one, "body": one["body"].encode(), "key": one["key"].encode()} for one in messages]
    return msgspec.msgpack.encode({"messages": coded})


def as_arrow(messages: list[dict[str, Any]], compression: str | None = None) -> bytes:
    types = {
        "key": pa.binary(),
        "tag": pa.string(),
        "properties": pa.map_(pa.string(), pa.string()),
        "born_ts": pa.timestamp("ms"),
        "body": pa.binary(),
    }
    columns = {name: [one[name] for one in messages] for name in types}
    columns["properties"] = [list(one.items()) for one in columns["properties"]]
    return stream({name: pa.array(columns[name], kind) for name, kind in types.items()}, compression)


CODECS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], bytes]]] = {
    "json": (JSON, as_json),
    "msgpack": (MSGPACK, as_msgpack),
    "arrow": (ARROW, as_arrow),
    "lz4": (ARROW, lambda messages: as_arrow(messages, "lz4")),
    "zstd": (ARROW, lambda messages: as_arrow(messages, "zstd")),
}


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("codec", CODECS)
async def test_every_content_type_means_the_same(http: Http, topic: str, codec: str, count: int) -> None:
    """All fields arrive as they were sent, alone and in a batch, whatever carried them."""
    content_type, encode = CODECS[codec]
    wanted = MESSAGES[-count:]
    answer = await http.post(topic, encode(wanted), content_type, Accept=JSON)
    results = answer.ok()["results"]
    assert [one["offset"] for one in results] == list(range(count))
    found = await http.messages(topic)
    assert [{name: one[name] for name in FIELDS} for one in found] == wanted
    assert [one["message_id"] for one in found] == [one["message_id"] for one in results]
    assert [one["store_ts"] for one in found] == [one["store_ts"] for one in results]
    assert {(one["topic"], one["queue"]) for one in found} == {(topic, 0)}


async def test_any_other_type_is_one_raw_body(http: Http, topic: str) -> None:
    """Bytes as they are; key, tag, properties and time stand in headers."""
    body = bytes(range(256))
    answer = await http.post(
        topic, body, "image/png", millpond_key="k", millpond_tag="t", millpond_property_Origin="JFK",
        millpond_born_ts="1700000000000",
    )  # fmt: skip
    assert answer.ok()["results"][0]["offset"] == 0
    (await http.post(topic, b"", "text/plain")).ok()
    first, second = await http.messages(topic)
    assert "body" not in first
    assert base64.b64decode(first["body_base64"]) == body
    assert (first["key"], first["tag"], first["properties"]) == ("k", "t", {"origin": "JFK"})
    assert first["born_ts"] == 1_700_000_000_000
    assert (second["body"], second["key"], second["tag"], second["properties"]) == ("", None, None, {})


async def test_bodies_of_any_bytes(http: Http, topic: str) -> None:
    """What is no UTF-8 comes back in base64, its neighbours stay text; msgpack has bytes for all."""
    binary = b"\xff\x00\xfe"
    await http.sent(topic, "text", {"body_base64": base64.b64encode(binary).decode()}, {"body": "\u0000"})
    (await http.post(topic, msgspec.msgpack.encode({"messages": [{"body": binary, "key": binary}]}), MSGPACK)).ok()
    found = await http.messages(topic)
    assert [one.get("body") for one in found] == ["text", None, "\u0000", None]
    assert base64.b64decode(found[1]["body_base64"]) == base64.b64decode(found[3]["body_base64"]) == binary
    assert base64.b64decode(found[3]["key_base64"]) == binary
    packed = msgspec.msgpack.decode((await http.read(topic, accept=MSGPACK)).good)["messages"]
    assert [one["body"] for one in packed] == [b"text", binary, b"\0", binary]


async def test_results_stand_in_the_order_of_the_messages(http: Http, wide: str) -> None:
    """Over all queues: where a result points, its message is."""
    results = await http.sent(wide, *({"body": f"{n}", "key": f"{n % 23}"} for n in range(300)))
    by_queue = {queue: bodies(await http.messages(wide, queue=queue)) for queue in range(4)}
    assert [by_queue[one["queue"]][one["offset"]] for one in results] == [f"{n}" for n in range(300)]
    assert sum(map(len, by_queue.values())) == 300
    assert all(by_queue.values()), "twenty-three keys reach all four queues"


async def test_a_key_has_one_queue_and_its_order(http: Http, wide: str) -> None:
    """The same key goes to the same queue through every codec, and its messages stand as they were sent."""
    for content_type, encode in CODECS.values():
        (await http.post(wide, encode(MESSAGES), content_type, Accept=JSON)).ok()
    (await http.post(wide, b"raw", "text/plain", millpond_key="key 3")).ok()
    queues: dict[str, set[int]] = defaultdict(set)
    order: dict[str, list[str]] = defaultdict(list)
    for queue in range(4):
        for one in await http.messages(wide, queue=queue):
            queues[one["key"]].add(queue)
            order[one["key"]].append(one["body"])
    assert {len(found) for found in queues.values()} == {1}
    for key, found in order.items():
        sent = [one["body"] for one in MESSAGES if one["key"] == key]
        assert found == sent * len(CODECS) + (["raw"] if key == "key 3" else [])


async def test_the_queue_may_be_named(http: Http, wide: str) -> None:
    """By message, by column, by header; a queue there is not refuses its own message only."""
    sent = [{"body": "a", "queue": 3, "key": "k"}, {"body": "b", "queue": 4}, {"body": "c", "queue": -1}]
    placed, above, below = (await http.send(wide, *sent)).ok()["results"]
    assert (placed["queue"], placed["offset"]) == (3, 0)
    assert above["error"]["code"] == below["error"]["code"] == "queue_not_found"
    column = stream({"body": pa.array([b"d", b"e"]), "queue": pa.array([1, 2], pa.int32())})
    (await http.post(wide, column, ARROW, Accept=JSON)).ok()
    (await http.post(wide, stream({"body": pa.array([b"f"])}), ARROW, Accept=JSON, millpond_queue="2")).ok()
    (await http.post(wide, b"g", "text/plain", millpond_queue="0")).ok()
    assert [bodies(await http.messages(wide, queue=queue)) for queue in range(4)] == [["g"], ["d"], ["e", "f"], ["a"]]


async def test_answers_by_ranges(http: Http, topic: str) -> None:
    """Minimal JSON and an Arrow table say in a few numbers where ten thousand messages stand."""
    body = stream({"body": pa.array([b"%d" % n for n in range(10_000)])})
    minimal = await http.post(topic, body, ARROW, Accept=JSON, Prefer="return=minimal")
    assert minimal.ok() == {"ranges": [{"queue": 0, "first_offset": 0, "count": 10_000}]}
    one = await http.send(topic, "one", headers={"Prefer": "return=minimal"})
    assert one.ok() == {"ranges": [{"queue": 0, "first_offset": 10_000, "count": 1}]}
    table = pa.ipc.open_stream((await http.post(topic, body, ARROW, Accept=ARROW)).good).read_all()
    assert table.to_pylist() == [{"queue": 0, "first_offset": 10_001, "count": 10_000}]
    packed = await http.send(topic, "two", headers={"Accept": MSGPACK})
    assert msgspec.msgpack.decode(packed.body)["results"][0]["offset"] == 20_001


async def test_a_bad_message_is_its_own_error(http: Http, topic: str) -> None:
    """Its neighbours are appended; asked for ranges, which cannot name it, the whole request is refused."""
    messages = [{"body": "a"}, {"body": "b", "tag": "no space"}, {"body": "c", "key": "k" * 1_025}, {"body": "d"}]
    results = (await http.send(topic, *messages)).ok()["results"]
    assert [one.get("offset") for one in results] == [0, None, None, 1]
    assert {one["error"]["code"] for one in results[1:3]} == {"invalid_request"}
    assert bodies(await http.messages(topic)) == ["a", "d"]
    minimal = await http.send(topic, *messages, headers={"Prefer": "return=minimal"})
    minimal.refused(400, "invalid_request", "messages[1].tag")
    assert await http.ends(topic) == [2]


async def test_the_largest_message(http: Http, topic: str) -> None:
    """4 MiB is a message; a byte more is not, alone or in a batch, and appends nothing of itself."""
    most = b"x" * (4 << 20)
    assert (await http.post(topic, most, "text/plain")).ok()["results"][0]["offset"] == 0
    (await http.post(topic, most + b"x", "text/plain")).refused(413, "message_too_large")
    (await http.post(topic, stream({"body": pa.array([most + b"x"])}), ARROW)).refused(413, "message_too_large")
    results = (await http.send(topic, "a", (most + b"x").decode())).ok()["results"]
    assert [one.get("error", {}).get("code") for one in results] == [None, "message_too_large"]
    found = (await http.read(topic, "offset=0&max_bytes=1", accept=MSGPACK)).good
    assert msgspec.msgpack.decode(found)["messages"][0]["body"] == most
    assert await http.ends(topic) == [2]


async def test_a_topics_own_limit(http: Http) -> None:
    """`max_message_bytes` of the topic holds for every codec."""
    name = fresh()
    await http.make(name, max_message_bytes=10)
    await http.sent(name, "0123456789")
    (await http.send(name, "0123456789x")).refused(413, "message_too_large")
    (await http.post(name, b"0123456789x", "text/plain")).refused(413, "message_too_large")
    assert await http.ends(name) == [1]


@pytest.mark.parametrize("durability", ["flush", "memory"])
async def test_single_messages_of_many_at_once(http: Http, durability: str) -> None:
    """Two hundred requests share appends: each still has its own place, and its place holds its body."""
    name = fresh()
    await http.make(name, queues=2, durability=durability)
    answers: list[Answer] = await asyncio.gather(*(http.post(name, b"%d" % n, "text/plain") for n in range(200)))
    results = [answer.ok()["results"][0] for answer in answers]
    for queue in range(2):  # a `memory` topic answers before its readers may see it
        expected = sum(1 for one in results if one["queue"] == queue)
        while (end := (await http.ends(name))[queue]) < expected:
            (await http.read(name, f"offset={end}&wait_ms=5000", queue=queue)).ok()
    found = {
        (queue, one["offset"]): one["body"] for queue in range(2) for one in await http.messages(name, queue=queue)
    }
    assert [found[one["queue"], one["offset"]] for one in results] == [f"{n}" for n in range(200)]
    assert len(found) == 200


async def test_time_never_goes_back(http: Http, topic: str) -> None:
    """`store_ts` of a queue only rises; `born_ts` is the producer's own and free."""
    for number in range(20):
        await http.sent(topic, {"body": "x", "born_ts": 1_000 - number})
    times = [one["store_ts"] for one in await http.messages(topic)]
    assert times == sorted(times)
