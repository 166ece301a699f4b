"""Reading without a group: by offset, time and tail, by id and by key."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from millpond.core.http.bulk import Bulk
from millpond.core.limits import TURN_ROWS
from millpond.proxy.codec import answers


def fill(world: Any, frame: Any) -> None:
    """Queue 0: 100 messages in tens, a frame a second from 1,000 ms on; every tenth has the key `k`."""
    for number in range(10):
        first = 10 * number
        bodies = [b"%d" % offset for offset in range(first, first + 10)]
        keys = [b"k", *([b"other"] * 9)]
        tags = ["even" if n % 2 == 0 else "odd" for n in range(10)]
        world.store.add(frame(first, bodies, keys=keys, tags=tags, store_ts=1000 * (number + 1)))


def cool(world: Any, local: int) -> None:
    for first in range(0, local, 20):
        world.seal(f"o{first}", 20, first=first)
    world.store.local[11] = local


async def read(world: Any, **query: Any) -> tuple[int, Any]:
    found: tuple[int, Any] = await world.call("GET", "/queues/0/messages", params=query)
    return found


def offsets(body: Any) -> list[int]:
    return [message["offset"] for message in body["messages"]]


@pytest.mark.parametrize("local", [0, 40, 100])
async def test_by_offset_time_and_tail(world: Any, frame: Any, local: int) -> None:
    """The same answers whether the messages are local, in the tier, or both."""
    fill(world, frame)
    cool(world, local)
    _, body = await read(world, offset=35, limit=10)
    assert offsets(body) == list(range(35, 45))
    assert (body["start_offset"], body["next_offset"], body["end_offset"]) == (0, 45, 100)
    for time, first in ((0, 0), (1000, 0), (1001, 10), (3500, 30), (10_000, 90), (10_001, None)):
        _, body = await read(world, time=time, limit=1)
        assert offsets(body) == ([] if first is None else [first])
    _, body = await read(world, tail=70)
    assert offsets(body) == list(range(30, 100))
    _, body = await read(world, tail=5000, limit=3)
    assert offsets(body) == [0, 1, 2]
    _, body = await read(world, offset=0, limit=4, filter="odd")
    assert offsets(body) == [1, 3, 5, 7]
    assert body["next_offset"] == 9


async def test_beyond_both_ends(world: Any, frame: Any) -> None:
    """410 and 416 with the numbers that help; at the end an empty page."""
    fill(world, frame)
    world.store.start[11] = 20
    status, body = await read(world, offset=19)
    assert (status, body["code"], body["start_offset"]) == (410, "offset_expired", 20)
    status, body = await read(world, offset=101)
    assert (status, body["code"], body["end_offset"]) == (416, "offset_out_of_range", 100)
    status, body = await read(world, offset=100)
    assert (status, offsets(body), body["next_offset"]) == (200, [], 100)


async def test_forms(world: Any, frame: Any) -> None:
    """Arrow has the tier's columns and the ends in its metadata; what nobody makes is 406."""
    fill(world, frame)
    _, body = await world.call("GET", "/queues/0/messages?offset=5&limit=20", headers={"Accept": answers.ARROW})
    table = pa.ipc.open_stream(body).read_all()
    assert table["offset"].to_pylist() == list(range(5, 25))
    assert json.loads(table.schema.metadata[b"millpond"]) == {
        "topic": "t", "start_offset": 0, "next_offset": 25, "end_offset": 100,
    }  # fmt: skip
    _, body = await world.call("GET", "/queues/0/messages?tail=1", headers={"Accept": answers.MSGPACK})
    assert msgspec.msgpack.decode(body)["messages"][0]["body"] == b"99"
    status, _ = await world.call("GET", "/queues/0/messages?tail=1", headers={"Accept": "text/html"})
    assert status == 406


async def test_it_makes_way_while_it_is_put_together(world: Any, frame: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause behind each large batch that is taken, and again behind each that is encoded."""
    pauses = 0

    async def pause(_: Bulk) -> None:
        nonlocal pauses
        pauses += 1

    monkeypatch.setattr(Bulk, "pause", pause)
    for at in range(2):
        world.store.add(frame(TURN_ROWS * at, [b"x" * 100] * TURN_ROWS))
    _, body = await world.call("GET", "/queues/0/messages?offset=0&limit=1000", headers={"Accept": answers.ARROW})
    assert pa.ipc.open_stream(body).read_all().num_rows == 2 * TURN_ROWS
    assert pauses == 4


async def test_an_empty_queue(world: Any) -> None:
    """Nothing there is an empty page, by every way to ask."""
    for query in ({"offset": 0}, {"tail": 5}, {"time": 0}):
        status, body = await read(world, **query)
        assert (status, offsets(body), body["end_offset"]) == (200, [], 0)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "offset"), ("offset=1&tail=1", "offset"), ("offset=-1", "offset"), ("offset=x", "offset"),
        ("offset=99999999999999999999", "offset"), ("time=-1", "time"), ("time=99999999999999999", "time"),
        ("tail=0", "tail"), ("tail=10001", "tail"), ("offset=0&limit=0", "limit"), ("offset=0&limit=10001", "limit"),
        ("offset=0&wait_ms=30001", "wait_ms"), ("offset=0&filter=", "filter"), ("offset=0&clock=born", "clock"),
        ("time=0&clock=moon", "clock"), ("offset=0&max_bytes=0", "max_bytes"), ("offset=0&x=1", "x"),
    ],
)  # fmt: skip
async def test_bad_queries_name_their_field(world: Any, query: str, field: str) -> None:
    """400 that names the parameter."""
    status, body = await world.call("GET", f"/queues/0/messages?{query}")
    assert status == 400
    assert body["errors"][0]["field"] == field


@pytest.mark.parametrize(
    ("queue", "status"), [("2", 404), ("-1", 400), ("x", 400), ("9" * 30, 400), ("%00", 400), ("\u0663", 400)]
)
async def test_queues_that_are_not_there(world: Any, queue: str, status: int) -> None:
    """A number that is no queue is 404, what is no number 400."""
    found, _ = await world.call("GET", f"/queues/{queue}/messages?offset=0")
    assert found == status


@pytest.mark.parametrize("local", [0, 100])
async def test_by_id(world: Any, frame: Any, local: int) -> None:
    """One message, hot or cold."""
    fill(world, frame)
    cool(world, local)
    status, body = await world.call("GET", "/messages/a-11-42")
    assert (status, body["offset"], body["body"], body["message_id"]) == (200, 42, "42", "a-11-42")


@pytest.mark.parametrize("text", ["a-11-100", "a-11-101", "a-99-1", "b-11-1", "nonsense", "a-11-x", "%00", "a-11-042"])
async def test_ids_that_are_not_there(world: Any, frame: Any, text: str) -> None:
    """404 message_not_found, whatever it is that does not fit."""
    fill(world, frame)
    status, body = await world.call("GET", f"/messages/{text}")
    assert (status, body["code"]) == (404, "message_not_found")


async def find(world: Any, **query: Any) -> list[int]:
    """Offsets of all pages."""
    found: list[int] = []
    token: str | None = None
    for _ in range(100):
        more = {} if token is None else {"page_token": token}
        status, body = await world.call("GET", "/messages", params={"key": "k", **query, **more})
        assert status == 200, body
        found += offsets(body)
        token = body["next_page_token"]
        if token is None:
            return found
    raise AssertionError("the pages do not end")


@pytest.mark.parametrize("local", [0, 40, 100])
@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_by_key_newest_first(world: Any, frame: Any, local: int, limit: int) -> None:
    """Every message of the key once, over store and tier (also what is in both) and over pages of any size."""
    fill(world, frame)
    cool(world, local)
    assert await find(world, limit=limit) == list(range(90, -1, -10))
    assert await find(world, limit=limit, **{"from": 3000, "to": 6000}) == [40, 30, 20]
    assert await find(world, key="nobody") == []
    world.store.start[11] = 30
    assert await find(world, limit=limit) == list(range(90, 20, -10))


async def test_many_messages_of_one_key_in_one_millisecond(world: Any, frame: Any) -> None:
    """Pages go on inside of a millisecond, in both queues."""
    world.store.add(frame(0, [b"x"] * 25, keys=[b"k"] * 25))
    world.store.add(frame(0, [b"x"] * 25, keys=[b"k"] * 25, queue_id=12))
    assert await find(world, limit=7) == [*range(25), *range(25)]


async def test_a_search_that_had_to_stop_goes_on(world: Any, frame: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bounds of one frame and one object a call, pages together still miss nothing."""
    monkeypatch.setattr("millpond.proxy.searching.FIND_FRAMES", 2)
    monkeypatch.setattr("millpond.proxy.searching.FIND_OBJECTS", 1)
    fill(world, frame)
    cool(world, 60)
    assert await find(world, limit=100) == list(range(90, -1, -10))


@pytest.mark.parametrize("bound", [1, 1000])
async def test_cold_messages_may_be_newer_than_hot_ones(
    world: Any, frame: Any, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    """Queues are recycled at their own pace: the order over all of them is by time, on pages of every size."""
    monkeypatch.setattr("millpond.proxy.searching.FIND_OBJECTS", bound)
    monkeypatch.setattr("millpond.proxy.searching.FIND_FRAMES", max(2, bound))
    for number in range(6):
        world.store.add(frame(number, [b"x"], keys=[b"k"], store_ts=1000 + 2 * number))
        world.store.add(frame(number, [b"x"], keys=[b"k"], queue_id=12, store_ts=1001 + 2 * number))
        world.seal(f"o{number}", 1, first=number, queue=1)
    world.store.local[12] = 6
    newest_first = [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
    for limit in (1, 2, 5, 12):
        assert await find(world, limit=limit) == newest_first


async def test_objects_that_reach_beyond_the_time_searched(
    world: Any, frame: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More objects around the end of the time than one search opens: the pages still come to an end."""
    monkeypatch.setattr("millpond.proxy.searching.FIND_OBJECTS", 1)
    for queue, queue_id in enumerate((11, 12)):
        for number in range(4):
            world.store.add(frame(number, [b"x"], keys=[b"k"], queue_id=queue_id, store_ts=1000 + number))
        world.seal(f"o{queue}", 4, queue=queue)
        world.store.local[queue_id] = 4
    assert await find(world, to=1002) == [1, 1, 0, 0]


async def test_a_hash_is_not_a_key(world: Any, frame: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that the index names for another key of the same hash shows nothing."""
    fill(world, frame)
    monkeypatch.setattr("millpond.proxy.searching.hash_bytes", lambda key: 1)
    frames = world.store.frames[11]

    async def all_frames(request: Any) -> list[Any]:
        return list(reversed(frames))

    world.store.find = all_frames
    assert await find(world, key="z") == []
    assert await find(world) == list(range(90, -1, -10))


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "key"),
        ("key=", "key"),
        ("key=" + "x" * 1025, "key"),
        ("key=k&limit=0", "limit"),
        ("key=k&from=-1", "from"),
        ("key=k&from=5&to=4", "to"),
        ("key=k&page_token=x", "page_token"),
        ("key=k&from_=1", "from_"),
        ("key=k&limit=1001", "limit"),
    ],
)
async def test_bad_searches_name_their_field(world: Any, query: str, field: str) -> None:
    """400 that names the parameter."""
    status, body = await world.call("GET", f"/messages?{query}")
    assert status == 400
    assert body["errors"][0]["field"] == field
