"""Receive: leases, long polls, filters, attempts."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pyarrow as pa
from integration.behaviour.world import ARROW, MSGPACK, Http, bodies, fresh, leases

SOON_SECONDS = 10.0  # far below the 30 s that these polls would wait


async def test_a_lease_keeps_a_message_from_others(http: Http, topic: str) -> None:
    """What one consumer holds no other gets; each message says how often it was handed out."""
    await http.sent(topic, "a", "b", "c")
    first = await http.receive(topic, "g", max_messages=2)
    assert [(one["body"], one["delivery_attempt"]) for one in first["messages"]] == [("a", 1), ("b", 1)]
    assert [(one["queue"], one["rows"]) for one in first["receipts"]] == [(0, "0-1")]
    assert bodies(await http.leased(topic, "g")) == ["c"]
    assert await http.leased(topic, "g") == []
    assert bodies(await http.leased(topic, "other")) == ["a", "b", "c"]


async def test_many_consumers_share_a_group(http: Http, wide: str) -> None:
    """Twenty receives at once over four queues: every message goes to exactly one of them."""
    await http.sent(wide, *({"body": f"{n}", "key": f"{n}"} for n in range(400)))
    parts = await asyncio.gather(*(http.leased(wide, "g", max_messages=25) for _ in range(20)))
    got = Counter(body for part in parts for body in bodies(part))
    assert set(got.values()) == {1}
    rest = bodies(await http.leased(wide, "g", max_messages=1_000))
    assert sorted([*got, *rest], key=int) == [f"{n}" for n in range(400)]


async def test_a_new_group_says_where_it_starts(http: Http, topic: str) -> None:
    """Its creator says which; `latest` unless told otherwise; later receives do not move it."""
    await http.sent(topic, "old")
    path = f"/v1/topics/{topic}/groups/fresh/messages/receive"
    latest = (await http.call("POST", path, {"max_messages": 10})).ok()
    assert (latest["created"], latest["start"], latest["messages"]) == (True, "latest", [])
    await http.sent(topic, "new")
    again = await http.receive(topic, "fresh", start="earliest")
    assert bodies(again["messages"]) == ["new"]
    assert "created" not in again
    earliest = await http.receive(topic, "all", start="earliest")
    assert (earliest["created"], earliest["start"], bodies(earliest["messages"])) == (True, "earliest", ["old", "new"])


async def test_a_long_poll_wakes_when_a_message_arrives(http: Http, wide: str) -> None:
    """It is answered at once, whatever queue the message came to; one message wakes one of those who wait."""
    await http.leased(wide, "g")
    polls = [asyncio.ensure_future(http.leased(wide, "g", wait_ms=30_000, max_messages=1)) for _ in range(3)]
    for number in range(3):
        await http.sent(wide, {"body": f"{number}", "queue": number})
        async with asyncio.timeout(SOON_SECONDS):
            done, pending = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        assert [bodies(one.result()) for one in done] == [[f"{number}"]]
        polls = list(pending)


async def test_a_long_poll_ends_empty(http: Http, topic: str) -> None:
    """Nothing arrives: an empty answer, not before its time."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    assert await http.leased(topic, "g", wait_ms=300) == []
    assert loop.time() - begin >= 0.29


async def test_bytes_bound_a_receive(http: Http, topic: str) -> None:
    """`max_bytes` holds, but one message always comes; what did not fit comes next."""
    await http.sent(topic, *("x" * 1_000 for _ in range(5)))
    got = await http.leased(topic, "g", max_bytes=2_500)
    assert [one["offset"] for one in got] == [0, 1]
    got = await http.leased(topic, "g", max_bytes=1)
    assert [one["offset"] for one in got] == [2]
    assert [(one["offset"], one["delivery_attempt"]) for one in await http.leased(topic, "g")] == [(3, 1), (4, 1)]


async def test_a_group_sees_only_its_tags(http: Http, wide: str) -> None:
    """The others are passed over: never handed out, and no lag once the wanted ones are acked."""
    await http.sent(wide, *({"body": f"{n}", "key": f"{n}", "tag": "abc"[n % 3]} for n in range(90)), {"body": "none"})
    got = await http.leased(wide, "g", max_messages=1_000, filter={"tag": "a || c"})
    assert sorted(bodies(got), key=int) == [f"{n}" for n in range(90) if n % 3 != 1]
    await http.settled(wide, "g", acks=leases(got))
    assert await http.leased(wide, "g") == []
    assert (await http.lag(wide, "g"))["total"] == 0


async def test_a_group_that_is_not_to_be_made(http: Http, topic: str) -> None:
    """`create` false: it is not there afterwards either; one that is there serves as ever."""
    await http.sent(topic, "1")
    for wait_ms in (0, 1_000):
        (await http.receive_answer(topic, "g", create=False, wait_ms=wait_ms)).refused(404, "group_not_found")
    (await http.get(f"/v1/topics/{topic}/groups/g")).refused(404, "group_not_found")
    (await http.call("PUT", f"/v1/topics/{topic}/groups/g", {"start": "earliest"})).ok(201)
    assert bodies(await http.leased(topic, "g", create=False)) == ["1"]


async def test_a_group_has_one_filter(http: Http, topic: str) -> None:
    """A receive that names another one is told so and takes nothing; the same in other words is the same."""
    await http.sent(topic, {"body": "1", "tag": "a"})
    await http.leased(topic, "g", filter={"tag": "b||a"}, max_messages=1, start="latest")
    await http.sent(topic, {"body": "2", "tag": "a"})
    for other in ("a", "*", "a || b || c"):
        answer = await http.receive_answer(topic, "g", filter={"tag": other})
        assert "a || b" in answer.refused(409, "filter_differs")["detail"]
    assert bodies(await http.leased(topic, "g", filter={"tag": "a||b"})) == ["2"]


async def test_an_attempt_id_repeats_an_answer(http: Http, topic: str) -> None:
    """A lost reply strands nothing: the same leases, the same attempt; without what was settled since."""
    await http.sent(topic, "a", "b", "c")
    first = await http.leased(topic, "g", max_messages=2, attempt_id="x")
    again = await http.leased(topic, "g", max_messages=2, attempt_id="x")
    assert again == first
    await http.settled(topic, "g", acks=[first[0]["lease_id"]])
    rest = await http.leased(topic, "g", max_messages=2, attempt_id="x")
    assert [(one["body"], one["delivery_attempt"]) for one in rest] == [("b", 1)]
    assert await http.settled(topic, "g", acks=[first[1]["lease_id"], rest[0]["lease_id"]]) == ["ok", "already"]
    assert bodies(await http.leased(topic, "g", attempt_id="y")) == ["c"]


async def test_three_forms_of_one_receive(http: Http, topic: str) -> None:
    """JSON, msgpack and Arrow say the same of the same leases."""
    await http.sent(topic, {"body": "a", "key": "k", "tag": "t", "properties": {"p": "q"}, "born_ts": 5}, "b")
    asked = {"attempt_id": "x"}
    plain = await http.receive(topic, "g", **asked)
    packed = msgspec.msgpack.decode((await http.receive_answer(topic, "g", accept=MSGPACK, **asked)).good)
    coded = [{**one, "body": one["body"].encode()} for one in plain["messages"]]
    assert packed["messages"] == coded
    assert packed["receipts"] == plain["receipts"]
    table = pa.ipc.open_stream((await http.receive_answer(topic, "g", accept=ARROW, **asked)).good).read_all()
    beside = msgspec.json.decode(table.schema.metadata[b"millpond"])
    assert beside["receipts"] == plain["receipts"]
    assert table["body"].to_pylist() == [b"a", b"b"]
    assert table["delivery_attempt"].to_pylist() == [1, 1]
    assert table["key"].to_pylist() == [b"k", None]
    assert table["offset"].to_pylist() == [0, 1]


async def test_too_many_in_flight(http: Http, topic: str) -> None:
    """At its bound a group gets nothing and is told why; an ack makes room."""
    (await http.call("PUT", f"/v1/topics/{topic}/groups/g", {"start": "earliest", "max_in_flight": 3})).ok(201)
    await http.sent(topic, "a", "b", "c", "d")
    held = await http.leased(topic, "g")
    assert bodies(held) == ["a", "b", "c"]
    full = await http.receive(topic, "g")
    assert (full["messages"], full["reason"]) == ([], "in_flight_full")
    await http.settled(topic, "g", acks=[held[1]["lease_id"]])
    assert bodies(await http.leased(topic, "g")) == ["d"]


async def test_an_ended_lease_hands_out_again(http: Http) -> None:
    """After `lease_ms`, unasked, with the next attempt, in place; a waiting receive is woken by it."""
    name = fresh()
    await http.make(name)
    await http.sent(name, "a", "b")
    first = await http.leased(name, "g", lease_ms=1_000)
    await http.settled(name, "g", acks=[first[0]["lease_id"]])
    async with asyncio.timeout(SOON_SECONDS):
        again = await http.leased(name, "g", wait_ms=30_000)
    assert [(one["body"], one["offset"], one["delivery_attempt"]) for one in again] == [("b", 1, 2)]
    assert await http.settled(name, "g", acks=[first[1]["lease_id"]]) == ["redelivered"]
    assert await http.settled(name, "g", acks=[again[0]["lease_id"]]) == ["ok"]


async def test_a_batch_is_received_whole(http: Http, topic: str) -> None:
    """A thousand messages in one receive, in order, from frames of any kind."""
    (await http.send(topic, *(f"{n}" for n in range(700)))).ok()
    for number in range(10):
        (await http.post(topic, b"%d" % (700 + number), "text/plain")).ok()
    (await http.send(topic, *(f"{n}" for n in range(710, 1_000)))).ok()
    got = await http.leased(topic, "g", max_messages=1_000)
    assert [one["offset"] for one in got] == list(range(1_000))
    assert bodies(got) == [f"{n}" for n in range(1_000)]
