"""POST .../messages/receive: what is leased is delivered, or handed back."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpond.core.errors import Unavailable
from millpond.core.http.call import decode_json
from millpond.core.http.prompt import PromptCall
from millpond.core.limits import RECEIPT_RANGES, RECEIVE_ROWS
from millpond.metadata.client import GroupInfo, Principal
from millpond.proxy.codec import answers
from millpond.proxy.routes import receive
from millpond.store.client import Claim, ReceiveResult

TAGGED = GroupInfo(31, 7, "g", "earliest", "even", 1, 1000, 0)


def offsets(settle: Any) -> list[int]:
    found: list[int] = np.frombuffer(settle.offsets, np.int64).tolist()
    return found


async def test_messages_come_with_leases_and_one_receipt_a_grant(world: Any, frame: Any, granted: Any) -> None:
    """Each message names its lease; the grant's receipt names all its rows; the token is the grant's."""
    frames = [frame(10, [b"a", b"b", b"c"])]
    world.store.answers = [ReceiveResult([granted([10, 12], frames=frames, attempts=[1, 3])])]
    status, body = await world.receive(max_messages=10)
    assert status == 200
    [receipt] = body["receipts"]
    assert (receipt["queue"], receipt["rows"]) == (0, "0,2")
    assert [(m["offset"], m["body"], m["delivery_attempt"], m["message_id"]) for m in body["messages"]] == [
        (10, "a", 1, "a-11-10"), (12, "c", 3, "a-11-12"),
    ]  # fmt: skip
    assert [m["lease_id"] for m in body["messages"]] == [f"{receipt['receipt']}.0", f"{receipt['receipt']}.2"]
    [lease] = await world.tokens.read([receipt["receipt"]])
    assert lease == (1, 7, 31, 11, 2, 5, 10)
    assert set(body) == {"messages", "receipts"}


async def test_what_was_asked_reaches_the_store(world: Any) -> None:
    """Limits, waits and the attempt id are passed on; all queues of the topic are named."""
    status, body = await world.receive(max_messages=7, lease_ms=5000, max_bytes=99, attempt_id="x")
    assert (status, body) == (200, {"messages": [], "receipts": []})
    [request] = world.store.receives
    assert [queue.queue_id for queue in request.queues] == [11, 12]
    assert (request.max_messages, request.lease_ms, request.max_bytes, request.attempt_id) == (7, 5000, 99, "x")
    assert (request.start, request.max_in_flight, request.tag_hashes) == ("earliest", 1000, None)


async def test_arrow_and_msgpack(world: Any, frame: Any, granted: Any) -> None:
    """The same delivery in the other two forms."""
    for media in (answers.ARROW, answers.MSGPACK):
        world.store.answers = [ReceiveResult([granted([0], frames=[frame(0, [b"\xff"])])])]
        _, body = await world.call("POST", "/groups/g/messages/receive", json={}, headers={"Accept": media})
        if media == answers.ARROW:
            table = pa.ipc.open_stream(body).read_all()
            assert (table["body"].to_pylist(), table["delivery_attempt"].to_pylist()) == ([b"\xff"], [1])
            assert json.loads(table.schema.metadata[b"millpond"])["receipts"][0]["rows"] == "0"
        else:
            assert msgspec.msgpack.decode(body)["messages"][0]["body"] == b"\xff"


async def test_a_group_made_by_receiving_starts_at_latest_and_says_so(world: Any) -> None:
    """Its creator may say otherwise; a group that is there is not created again."""
    path = "/groups/{}/messages/receive"
    _, body = await world.call("POST", path.format("new"), json={})
    assert (body["created"], body["start"]) == (True, "latest")
    _, body = await world.call("POST", path.format("other"), json={"start": "earliest", "filter": {"tag": "b||a"}})
    assert (body["created"], body["start"]) == (True, "earliest")
    assert world.groups["other"].filter_tag == "a || b"
    _, body = await world.call("POST", path.format("new"), json={"start": "earliest"})
    assert "created" not in body


async def test_the_filter_belongs_to_the_group(world: Any) -> None:
    """The same filter in other words is fine, none named is fine, another one is 409 filter_differs."""
    world.groups["g"] = TAGGED
    for named in ({}, {"filter": {"tag": " even||even "}}):
        status, _ = await world.receive(**named)
        assert status == 200
        assert len(world.store.receives[-1].tag_hashes) == 1
    for other in ("odd", "*"):
        status, body = await world.receive(filter={"tag": other})
        assert (status, body["code"]) == (409, "filter_differs")
    world.groups["g"] = msgspec.structs.replace(TAGGED, filter_tag=None)
    status, body = await world.receive(filter={"tag": "even"})
    assert (status, body["code"]) == (409, "filter_differs")


async def test_a_hash_collision_is_skipped_and_never_shown(world: Any, frame: Any, granted: Any) -> None:
    """The index matched, the text does not: settled with `skip`, and only the others are in the receipt."""
    world.groups["g"] = TAGGED
    stored = frame(0, [b"0", b"1", b"2"], tags=["even", "odd", "even"])
    world.store.answers = [ReceiveResult([granted([0, 1, 2], frames=[stored])])]
    _, body = await world.receive(max_messages=3)
    assert [m["body"] for m in body["messages"]] == ["0", "2"]
    assert body["receipts"][0]["rows"] == "0,2"
    [[settle]] = [request.settles for request in world.store.settled]
    assert (settle.action, offsets(settle)) == ("skip", [1])


async def test_cold_rows_of_a_grant_come_from_the_tier(world: Any, frame: Any, granted: Any) -> None:
    """A retry of a message whose segment was recycled meanwhile is delivered with the others."""
    for number in range(4):
        world.store.add(frame(10 * number, [b"%d" % n for n in range(10 * number, 10 * number + 10)]))
    world.seal("o", 20)
    world.store.local[11] = 20
    grant = granted([5, 6, 25], frames=[world.store.frames[11][2]], local=20, attempts=[2, 2, 1])
    world.store.answers = [ReceiveResult([grant])]
    _, body = await world.receive(max_messages=3)
    assert [(m["body"], m["delivery_attempt"]) for m in body["messages"]] == [("5", 2), ("6", 2), ("25", 1)]
    assert body["receipts"][0]["rows"] == "0-1,20"


async def test_rows_that_cannot_be_had_are_handed_back(world: Any, frame: Any, granted: Any) -> None:
    """The others are delivered, and the answer says why some are missing; with none at all it is the error."""
    stored = frame(0, [b"0"])
    for hot in ([stored], []):
        world.store.add(frame(world.store.end(11), [b"x"] * 10))
        world.store.local[11] = 10
        world.store.settled.clear()
        world.store.answers = [ReceiveResult([granted([0, 5] if hot else [5], frames=hot, local=10)])]
        status, body = await world.receive(max_messages=2)
        [[settle]] = [request.settles for request in world.store.settled]
        assert (settle.action, offsets(settle)) == ("release", [5])
        if hot:
            assert (status, body["reason"]) == (200, "tier_corrupt")
            assert body["receipts"][0]["rows"] == "0"
        else:
            assert (status, body["code"]) == (500, "tier_corrupt")


async def test_a_claim_is_read_filtered_and_leased(world: Any, frame: Any) -> None:
    """Cold and filtered: only what matches is leased, up to where the proxy has looked."""
    world.groups["g"] = TAGGED
    bodies = [b"%d" % n for n in range(20)]
    world.store.add(frame(0, bodies, tags=["even" if n % 2 == 0 else "odd" for n in range(20)]))
    world.seal("o", 20)
    world.store.local[11] = 20
    world.store.answers = [ReceiveResult([], [Claim(11, 2, 9, 0, 12)])]
    _, body = await world.receive(max_messages=100)
    assert [m["body"] for m in body["messages"]] == ["0", "2", "4", "6", "8", "10"]
    [request] = world.store.leased
    assert (np.frombuffer(request.take, np.int64).tolist(), request.end) == ([0, 2, 4, 6, 8, 10], 12)
    world.store.answers = [ReceiveResult([], [Claim(11, 2, 9, 0, 12)])]
    await world.receive(max_messages=2)
    assert (np.frombuffer(world.store.leased[1].take, np.int64).tolist(), world.store.leased[1].end) == ([0, 2], 4)


async def test_a_claim_that_has_run_out_is_nobodys_error(world: Any, frame: Any) -> None:
    """Conflict on leasing it: the receive asks again and is empty at last."""
    world.groups["g"] = TAGGED
    world.store.add(frame(0, [b"0"], tags=["even"]))
    world.seal("o", 1)
    world.store.local[11] = 1
    world.store.answers = [ReceiveResult([], [Claim(11, 2, -1, 0, 1)])]
    assert await world.receive() == (200, {"messages": [], "receipts": []})


async def test_the_stores_reason_is_passed_on(world: Any) -> None:
    """An empty answer says why."""
    world.store.answers = [ReceiveResult([], reason="in_flight_full")]
    _, body = await world.receive(wait_ms=30_000)
    assert body["reason"] == "in_flight_full"


async def test_a_client_that_leaves_ends_the_stores_wait(world: Any) -> None:
    """A long poll whose connection closes is cancelled down to the store."""
    task = asyncio.create_task(world.receive(wait_ms=30_000))
    await world.store.waiting.wait()
    task.cancel()
    await asyncio.wait_for(world.store.cancelled.wait(), 5)


async def test_a_client_that_leaves_after_the_grant_gives_it_back(world: Any, frame: Any, granted: Any) -> None:
    """Granted, its data still being fetched: the rows are handed back at once."""
    world.store.add(frame(0, [b"x"] * 3))
    reading, settled = asyncio.Event(), asyncio.Event()

    async def read(request: Any) -> Any:
        reading.set()
        await asyncio.Event().wait()

    settle = world.store.settle

    async def noticed(request: Any) -> Any:
        answer = await settle(request)
        settled.set()
        return answer

    world.store.read, world.store.settle = read, noticed
    world.store.answers = [ReceiveResult([granted([0, 1])])]
    task = asyncio.create_task(world.receive())
    await reading.wait()
    task.cancel()
    await asyncio.wait_for(settled.wait(), 5)
    [[one]] = [request.settles for request in world.store.settled]
    assert (one.action, offsets(one)) == ("release", [0, 1])


async def test_several_stores_share_one_receive(split_world: Any, frame: Any, granted: Any) -> None:
    """Grants of both are in one answer, within what was asked for; one that is away does not stop the other."""
    world = split_world
    one = frame(0, [b"one"])
    two = frame(0, [b"two"], queue_id=12)
    world.store.answers = [ReceiveResult([granted([0], frames=[one])])]
    world.other.answers = [ReceiveResult([granted([0], frames=[two], queue_id=12)])]
    _, body = await world.receive(max_messages=5)
    assert sorted(m["body"] for m in body["messages"]) == ["one", "two"]
    world.store.answers = [Unavailable("store_unavailable", "away")]
    world.other.answers = [ReceiveResult([granted([0], frames=[two], queue_id=12)])]
    _, body = await world.receive(max_messages=5)
    assert [m["message_id"] for m in body["messages"]] == ["b-12-0"]
    away = [Unavailable("store_unavailable", "away")]
    world.store.answers, world.other.answers = list(away), list(away)
    status, body = await world.receive()
    assert (status, body["code"]) == (503, "store_unavailable")


async def test_waiting_on_several_stores_ends_with_the_first(split_world: Any, frame: Any, granted: Any) -> None:
    """The other store's wait is cancelled, so it cannot grant to nobody."""
    world = split_world
    world.other.answers = [
        ReceiveResult([]),
        ReceiveResult([granted([0], frames=[frame(0, [b"two"], queue_id=12)], queue_id=12)]),
    ]
    _, body = await world.receive(max_messages=5, wait_ms=30_000)
    assert [m["body"] for m in body["messages"]] == ["two"]
    assert world.store.cancelled.is_set()


async def test_grants_of_the_same_moment_stay_within_the_limit(split_world: Any, frame: Any, granted: Any) -> None:
    """Two waiting stores answer at once with more than was asked for together: one grant goes back."""
    world = split_world
    grants = {
        queue_id: ReceiveResult([granted([0, 1], frames=[frame(0, [b"x"] * 2, queue_id=queue_id)], queue_id=queue_id)])
        for queue_id in (11, 12)
    }
    world.store.answers = [ReceiveResult([]), grants[11]]
    world.other.answers = [ReceiveResult([]), grants[12]]
    _, body = await world.receive(max_messages=3, wait_ms=30_000)
    assert len(body["messages"]) == 2
    [[one]] = [request.settles for request in [*world.store.settled, *world.other.settled]]
    assert (one.action, offsets(one)) == ("release", [0, 1])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_messages": 0}, "max_messages"),
        ({"max_messages": 1001}, "max_messages"),
        ({"wait_ms": -1}, "wait_ms"),
        ({"wait_ms": 30_001}, "wait_ms"),
        ({"lease_ms": 999}, "lease_ms"),
        ({"lease_ms": 10**12}, "lease_ms"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": 1 << 30}, "max_bytes"),
        ({"attempt_id": ""}, "attempt_id"),
        ({"attempt_id": "x" * 128}, "attempt_id"),
        ({"filter": {"tag": ""}}, "filter.tag"),
        ({"start": "x"}, "start"),
        ({"filter": {"sql": "a=1"}}, "filter.sql"),
        ({"max_messages": "3"}, "max_messages"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_messages": 10**30}, "max_messages"),
        ({"wait_ms": 1.5}, "wait_ms"),
        ({"attempt_id": None, "x": 0}, "x"),
    ],
)
async def test_bad_input_names_its_field(world: Any, body: dict[str, Any], field: str) -> None:
    """400 that names the field; nothing was asked of the store and no group was made."""
    status, problem = await world.call("POST", "/groups/new/messages/receive", json=body)
    assert status == 400
    assert problem["errors"][0]["field"] == field
    assert not world.store.receives
    assert "new" not in world.groups


async def test_unknown_names(world: Any) -> None:
    """An unknown topic is 404, an illegal group name 400."""
    async with world.session.post(f"{world.server.address}/v1/topics/no/groups/g/messages/receive") as response:
        assert (response.status, (await response.json())["code"]) == (404, "topic_not_found")
    for name in ("a..b", "a%2Fb", "%00", "x" * 128):
        status, body = await world.call("POST", f"/groups/{name}/messages/receive", json={})
        assert (status, body["code"]) == (400, "invalid_name")


async def test_only_arrow_receives_may_have_very_many(world: Any) -> None:
    """As Arrow up to RECEIVE_ROWS; as JSON and msgpack RECEIVE_MESSAGES, more is 400 naming the field."""
    path = "/groups/g/messages/receive"
    for media, most in ((answers.ARROW, RECEIVE_ROWS), (answers.JSON, 1_000), (answers.MSGPACK, 1_000)):
        headers = {"Accept": media}
        status, _ = await world.call("POST", path, json={"max_messages": most}, headers=headers)
        assert (status, world.store.receives[-1].max_messages) == (200, most)
        status, body = await world.call("POST", path, json={"max_messages": most + 1}, headers=headers)
        problem = json.loads(body) if isinstance(body, bytes) else body
        assert (status, problem["errors"][0]["field"]) == (400, "max_messages")


async def test_no_receipt_has_more_ranges_than_may_be_settled(world: Any, frame: Any, granted: Any) -> None:
    """A grant of many scattered rows has several receipts, in the order of the rows, each good for an ack."""
    rows = list(range(0, 2 * (RECEIPT_RANGES + 10), 2))
    stored = frame(0, [b"x"] * (rows[-1] + 1))
    world.store.answers = [ReceiveResult([granted(rows, frames=[stored])])]
    headers = {"Accept": answers.ARROW}
    _, body = await world.call("POST", "/groups/g/messages/receive", json={"max_messages": 5000}, headers=headers)
    table = pa.ipc.open_stream(body).read_all()
    receipts = json.loads(table.schema.metadata[b"millpond"])["receipts"]
    assert [row for one in receipts for row in map(int, one["rows"].split(","))] == rows
    assert [one["rows"].count(",") + 1 for one in receipts] == [RECEIPT_RANGES, 10]
    assert len({one["receipt"] for one in receipts}) == 1
    acks = [{"receipt": one["receipt"], "rows": one["rows"]} for one in receipts]
    status, _ = await world.call("POST", "/groups/g/messages/ack", json={"acks": acks})
    assert status == 200


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize(
    ("offsets", "frames"),
    [
        ([2], [(0, 4)]),
        ([1, 2, 3, 4], [(0, 3), (3, 6)]),
        ([0, 1, 2], [(0, 3)]),
        ([0, 1], [(0, 4)]),
        ([1, 2, 3, 4, 5], [(0, 2), (2, 4), (4, 8)]),
        ([2, 3], [(0, 1), (1, 2), (2, 6)]),
        ([0, 1], [(0, 2), (2, 4)]),
        ([1, 2, 3], [(0, 2)]),
        ([1, 2, 3], [(2, 4)]),
        ([1, 2, 3], [(0, 2), (3, 6)]),
        ([1, 3], [(0, 2), (2, 4)]),
    ],
)
async def test_rows_are_cut_out_of_the_frames_that_came_along(
    world: Any, frame: Any, granted: Any, offsets: list[int], frames: list[tuple[int, int]], codec: str | None
) -> None:
    """Whatever part of them was granted; what they do not hold is read."""
    bounds = sorted({0, 8, *(bound for pair in frames for bound in pair)})
    for first, end in pairwise(bounds):
        world.store.add(frame(first, [b"%d" % n for n in range(first, end)], codec=codec))
    along = [one for one in world.store.frames[11] if (one.first_offset, one.first_offset + one.count) in frames]
    world.store.answers = [ReceiveResult([granted(offsets, frames=along)])]
    headers = {"Accept": answers.ARROW}
    _, body = await world.call("POST", "/groups/g/messages/receive", json={"max_messages": 10}, headers=headers)
    table = pa.ipc.open_stream(body).read_all()
    assert table["offset"].to_pylist() == offsets
    assert table["body"].to_pylist() == [b"%d" % n for n in offsets]


async def test_a_frame_that_changes_ends_the_receive(world: Any, frame: Any, granted: Any) -> None:
    """What is remembered of it does not hold what is wanted: that is an error, and not looked for again and again."""
    along = frame(0, [b"a", b"b"], codec="zstd")
    world.store.add(frame(0, [b"a", b"b", b"c"], codec="zstd"))
    world.store.answers = [ReceiveResult([granted([1, 2], frames=[along])])]
    async with asyncio.timeout(5):
        status, body = await world.receive(max_messages=10)
    assert (status, body["reason"], [one["body"] for one in body["messages"]]) == (200, "internal", ["b"])
    assert [(one.action, offsets(one)) for one in world.store.settled[0].settles] == [("release", [2])]


async def test_what_is_asked_again_is_read_once_and_something_else_anew(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one connection: a poll as it was, another body of the same length, a wrong one, another form."""
    await world.receive()  # makes the group
    read: list[bytes] = []

    def decode(body: bytes, shape: Any) -> Any:
        read.append(bytes(body))
        return decode_json(body, shape)

    monkeypatch.setattr(receive, "decode_json", decode)
    asked = [(1, answers.JSON), (1, answers.JSON), (2, answers.JSON), (0, answers.JSON), (2, answers.JSON)]
    asked += [(2, answers.MSGPACK), (2, answers.MSGPACK)]
    statuses, kinds = [], []
    for most, accept in asked:
        path, headers = "/groups/g/messages/receive", {"Accept": accept}
        status, body = await world.call("POST", path, json={"max_messages": most}, headers=headers)
        statuses.append(status)
        kinds.append(isinstance(body, bytes))
    assert statuses == [200, 200, 200, 400, 200, 200, 200]
    assert kinds == [False] * 5 + [True] * 2
    assert [request.max_messages for request in world.store.receives[1:]] == [1, 1, 2, 2, 2, 2]
    if world.parts.catalog.prompt:
        assert read.count(b'{"max_messages": 1}') == 1
        assert len(read) < len(asked)


async def test_a_long_body_is_not_kept(world: Any) -> None:
    """Thousands of connections may have one each: what they ask is read each time."""
    await world.receive()
    kept: dict[str, Any] = {}
    principal, named = Principal(1, "default", "", ["consume"]), {"topic": "t", "group": "g"}
    for body in (b'{"max_messages":1}', b'{"max_messages":2}' + b" " * 256):
        call = PromptCall({"Content-Type": answers.JSON}, named, body, world.parts, principal, kept)
        prompt = receive.prompt(call)
        assert (prompt is not None) == world.parts.catalog.prompt
        if prompt is not None:
            await prompt.future
        assert [one.raw for one in kept.values()] == [b'{"max_messages":1}']
