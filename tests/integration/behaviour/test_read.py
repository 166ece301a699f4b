"""Direct reads by offset, time and tail, in three forms; messages found by id and by key."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from integration.behaviour.world import ARROW, JSON, MSGPACK, Http, bodies

SOON_SECONDS = 10.0


async def apart_in_time(http: Http, topic: str, *messages: Any) -> list[int]:
    """Messages, each in a millisecond of its own; their store times."""
    times: list[int] = []
    for one in messages:
        [result] = await http.sent(topic, one)
        times.append(result["store_ts"])
        await asyncio.sleep(0.003)
    assert len(set(times)) == len(times)
    return times


async def test_by_offset(http: Http, topic: str) -> None:
    """Pages meet exactly; the answer says where to go on and where the ends are."""
    await http.sent(topic, *(f"{n}" for n in range(50)))
    await http.sent(topic, *(f"{n}" for n in range(50, 95)))
    offset, found = 0, []
    while True:
        page = (await http.read(topic, f"offset={offset}&limit=20")).ok()
        assert (page["start_offset"], page["end_offset"]) == (0, 95)
        if not page["messages"]:
            break
        found += bodies(page["messages"])
        assert page["next_offset"] == offset + len(page["messages"])
        offset = page["next_offset"]
    assert found == [f"{n}" for n in range(95)]


async def test_by_tail(http: Http, topic: str) -> None:
    """The last so many, or all there are."""
    await http.sent(topic, "a", "b", "c")
    assert bodies(await http.messages(topic, "tail=2")) == ["b", "c"]
    assert bodies(await http.messages(topic, "tail=10000")) == ["a", "b", "c"]
    assert bodies(await http.messages(topic, "tail=3&limit=1")) == ["a"]


async def test_by_the_stores_time(http: Http, topic: str) -> None:
    """The first message at or after the millisecond; all of them for the beginning, none for the future."""
    times = await apart_in_time(http, topic, "a", "b", "c")
    for number, ts in enumerate(times):
        assert bodies(await http.messages(topic, f"time={ts}")) == ["a", "b", "c"][number:]
        assert bodies(await http.messages(topic, f"time={ts + 1}")) == ["a", "b", "c"][number + 1 :]
    assert bodies(await http.messages(topic, "time=0")) == ["a", "b", "c"]
    assert await http.messages(topic, "time=253402300799999") == []


async def test_by_the_producers_time(http: Http, topic: str) -> None:
    """`clock=born`: the first offset that is not older, whatever follows it."""
    await http.sent(topic, {"body": "a", "born_ts": 1_000}, "none", {"body": "c", "born_ts": 3_000})
    await http.sent(topic, {"body": "d", "born_ts": 2_000})
    read = [bodies(await http.messages(topic, f"time={ts}&clock=born")) for ts in (0, 1_000, 1_001, 3_000, 3_001)]
    assert read == [["a", "none", "c", "d"], ["a", "none", "c", "d"], ["c", "d"], ["c", "d"], []]


async def test_a_read_waits_for_the_next_message(http: Http, topic: str) -> None:
    """At the end, up to `wait_ms`, and not a moment longer than it must."""
    await http.sent(topic, "a")
    waiting = asyncio.ensure_future(http.messages(topic, "offset=1&wait_ms=30000"))
    await http.sent(topic, "b")
    async with asyncio.timeout(SOON_SECONDS):
        assert bodies(await waiting) == ["b"]
    page = (await http.read(topic, "offset=2&wait_ms=50")).ok()
    assert (page["messages"], page["next_offset"], page["end_offset"]) == ([], 2, 2)


async def test_by_tag(http: Http, topic: str) -> None:
    """`filter` keeps what it names; offsets stay what they are, and pages go on behind what was passed over."""
    await http.sent(topic, *({"body": f"{n}", "tag": "ab"[n % 2]} for n in range(100)), "none")
    page = (await http.read(topic, "offset=10&limit=5&filter=b")).ok()
    assert [one["offset"] for one in page["messages"]] == [11, 13, 15, 17, 19]
    page = (await http.read(topic, f"offset={page['next_offset']}&limit=1000&filter=b%20%7C%7C%20c")).ok()
    assert [one["offset"] for one in page["messages"]] == list(range(21, 100, 2))
    assert page["next_offset"] == 101


async def test_three_forms_of_one_read(http: Http, topic: str) -> None:
    """JSON, msgpack and Arrow hold the same messages and the same ends."""
    full = {"body": "a", "key": "k", "tag": "t", "properties": {"p": "q"}, "born_ts": 5}
    await http.sent(topic, full, {"body_base64": base64.b64encode(b"\xff").decode()}, "c")
    plain = (await http.read(topic, accept=JSON)).ok()
    packed = msgspec.msgpack.decode((await http.read(topic, accept=MSGPACK)).good)
    table = pa.ipc.open_stream((await http.read(topic, accept=ARROW)).good).read_all()
    beside = msgspec.json.decode(table.schema.metadata[b"millpond"])
    ends = {name: plain[name] for name in ("start_offset", "next_offset", "end_offset")}
    assert {name: packed[name] for name in ends} == ends
    assert beside == {"topic": topic, **ends}
    wanted = [
        base64.b64decode(m["body_base64"]) if "body_base64" in m else m["body"].encode() for m in plain["messages"]
    ]
    assert [one["body"] for one in packed["messages"]] == table["body"].to_pylist() == wanted
    for name in ("queue", "offset", "tag"):
        assert [one[name] for one in packed["messages"]] == [one[name] for one in plain["messages"]]
        assert table[name].to_pylist() == [one[name] for one in plain["messages"]]
    assert table["store_ts"].cast(pa.int64()).to_pylist() == [one["store_ts"] for one in plain["messages"]]
    assert [dict(one or ()) for one in table["properties"].to_pylist()] == [m["properties"] for m in plain["messages"]]


async def test_beyond_the_ends(http: Http, topic: str) -> None:
    """At the end an empty page, beyond it 416 with the end."""
    await http.sent(topic, "a")
    assert await http.messages(topic, "offset=1") == []
    for offset in (2, 2**40, 2**62):
        problem = (await http.read(topic, f"offset={offset}")).refused(416, "offset_out_of_range")
        assert problem["end_offset"] == 1


async def test_by_id(http: Http, wide: str, topic: str) -> None:
    """Every id finds its message; ids of other topics, of no message or of no kind find none."""
    results = await http.sent(wide, *({"body": f"{n}", "key": f"{n}"} for n in range(20)))
    for number, result in enumerate(results):
        found = (await http.get(f"/v1/topics/{wide}/messages/{result['message_id']}")).ok()
        assert (found["body"], found["message_id"]) == (f"{number}", result["message_id"])
    prefix = results[0]["message_id"].rpartition("-")[0]
    foreign = results[0]["message_id"]
    for where, name in ((topic, foreign), (wide, f"{prefix}-99999"), (wide, "nonsense"), (wide, f"{prefix}-00")):
        (await http.get(f"/v1/topics/{where}/messages/{name}")).refused(404, "message_not_found")


async def test_by_key(http: Http, topic: str) -> None:
    """Newest first, within the times asked, in pages that meet."""
    times = await apart_in_time(http, topic, *({"body": f"{n}", "key": "wanted"} for n in range(6)))
    await http.sent(topic, {"body": "other", "key": "other"}, "none")
    path = f"/v1/topics/{topic}/messages?key=wanted"
    assert bodies((await http.get(path)).ok()["messages"]) == ["5", "4", "3", "2", "1", "0"]
    some = await http.get(f"{path}&from={times[2]}&to={times[4]}")
    assert bodies(some.ok()["messages"]) == ["3", "2"]
    found, token = [], ""
    while True:
        page = (await http.get(f"{path}&limit=4{token}")).ok()
        found += bodies(page["messages"])
        if page["next_page_token"] is None:
            break
        token = f"&page_token={page['next_page_token']}"
    assert found == ["5", "4", "3", "2", "1", "0"]
    assert (await http.get(f"/v1/topics/{topic}/messages?key=nobody")).ok()["messages"] == []


@pytest.mark.parametrize("accept", [MSGPACK, ARROW])
async def test_by_key_in_other_forms(http: Http, topic: str, accept: str) -> None:
    """A search answers in msgpack and Arrow, too."""
    await http.sent(topic, {"body": "a", "key": "k"})
    body = (await http.get(f"/v1/topics/{topic}/messages?key=k", accept)).good
    if accept == ARROW:
        assert pa.ipc.open_stream(body).read_all()["body"].to_pylist() == [b"a"]
    else:
        assert [one["body"] for one in msgspec.msgpack.decode(body)["messages"]] == [b"a"]
