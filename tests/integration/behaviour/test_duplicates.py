"""What is sent twice stands once: idempotency keys, dedup ids, producer sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pyarrow as pa
from integration.behaviour.world import ARROW, Answer, Http, bodies, fresh, stream


def places(results: list[Any]) -> list[tuple[str, int]]:
    return [(one["message_id"], one["store_ts"]) for one in results]


async def test_an_idempotency_key_is_answered_the_same(http: Http, wide: str) -> None:
    """A repeat has the first answer's places; keyless messages stay together; nothing is appended."""
    sent = [{"body": "a"}, {"body": "b", "key": "k"}, {"body": "c"}]
    headers = {"Idempotency-Key": "order 7"}
    first = await http.sent(wide, *sent, headers=headers)
    ends = await http.ends(wide)
    again = await http.sent(wide, *sent, headers=headers)
    assert places(again) == places(first)
    assert [one.get("duplicate") for one in again] == [True] * 3
    assert first[0]["queue"] == first[2]["queue"]
    assert await http.ends(wide) == ends
    assert sum(ends) == 3


async def test_an_idempotency_key_is_for_one_request(http: Http, topic: str) -> None:
    """Another body under the same key is 422, and nothing of it is appended."""
    await http.sent(topic, "a", "b", headers={"Idempotency-Key": "k"})
    (await http.send(topic, "a", "x", headers={"Idempotency-Key": "k"})).refused(422, "dedup_mismatch")
    (await http.send(topic, "x", headers={"Idempotency-Key": "k"})).refused(422, "dedup_mismatch")
    assert await http.ends(topic) == [2]


async def test_a_dedup_id_stands_once(http: Http, wide: str) -> None:
    """A repeat answers the first one's place, alone, in a batch, and twice within a batch."""
    [first] = await http.sent(wide, {"body": "a", "dedup_id": "1"})
    [again] = await http.sent(wide, {"body": "a", "dedup_id": "1"})
    assert (places([again]), again["duplicate"]) == (places([first]), True)
    batch = [{"body": "b", "dedup_id": "2"}, {"body": "a", "dedup_id": "1"}, {"body": "b", "dedup_id": "2"}]
    new, old, within = await http.sent(wide, *batch)
    assert places([old]) == places([first])
    assert "duplicate" not in new
    assert (places([within]), within["duplicate"]) == (places([new]), True)
    assert sum(await http.ends(wide)) == 2


async def test_a_dedup_id_with_another_body(http: Http, topic: str) -> None:
    """422 for it alone, its own error in a batch; its neighbours are appended."""
    await http.sent(topic, {"body": "a", "dedup_id": "1"})
    (await http.send(topic, {"body": "x", "dedup_id": "1"})).refused(422, "dedup_mismatch")
    mixed = (await http.send(topic, {"body": "x", "dedup_id": "1"}, {"body": "b", "dedup_id": "2"})).ok()["results"]
    assert mixed[0]["error"]["code"] == "dedup_mismatch"
    assert bodies(await http.messages(topic)) == ["a", "b"]


async def test_repeats_at_the_same_moment(http: Http, topic: str) -> None:
    """Thirty requests with one id at once: one message, thirty equal answers."""
    answers: list[Answer] = await asyncio.gather(*(http.send(topic, {"body": "a", "dedup_id": "1"}) for _ in range(30)))
    assert len({places(answer.ok()["results"])[0] for answer in answers}) == 1
    assert await http.ends(topic) == [1]


def part(previous: int | None, first: int, last: int, name: str = "p") -> dict[str, Any]:
    return {"id": name, "queue": 0, "previous": previous, "first": first, "last": last}


async def test_a_session_takes_its_parts_in_order_once(http: Http, topic: str) -> None:
    """A repeated part has its first answer, a part out of its turn is 409 and retryable in order."""
    first = await http.sent(topic, "0", "1", producer=part(None, 0, 1))
    second = await http.sent(topic, "2", producer=part(1, 2, 2))
    again = await http.sent(topic, "0", "1", producer=part(None, 0, 1))
    assert places(again) == places(first)
    assert all(one["duplicate"] for one in again)
    (await http.send(topic, "9", producer=part(8, 9, 9))).refused(409, "out_of_order")
    assert places(await http.sent(topic, "2", producer=part(1, 2, 2))) == places(second)
    await http.sent(topic, "5", producer=part(2, 5, 5))
    assert bodies(await http.messages(topic)) == ["0", "1", "2", "5"]


async def test_a_session_is_known_until_it_is_closed(http: Http, topic: str) -> None:
    """Where it stands can be asked; after its end a part that goes on is `unknown_producer`, appending nothing."""
    path = f"/v1/topics/{topic}/producers/p"
    (await http.send(topic, "7", producer=part(6, 7, 7))).refused(409, "unknown_producer")
    (await http.get(path)).refused(404, "producer_not_found")
    await http.sent(topic, "0", "1", producer=part(None, 0, 1))
    state = (await http.get(path)).ok()
    assert [(one["queue"], one["last"]) for one in state["queues"]] == [(0, 1)]
    (await http.call("DELETE", path)).ok(204)
    (await http.get(path)).refused(404, "producer_not_found")
    (await http.send(topic, "2", producer=part(1, 2, 2))).refused(409, "unknown_producer")
    assert await http.ends(topic) == [2]


async def test_sessions_by_header(http: Http, topic: str) -> None:
    """Arrow and raw bodies carry their part in Millpond-Producer; the numbers go on between them."""
    body = stream({"body": pa.array([b"0", b"1", b"2"])})
    header = msgspec.json.encode(part(None, 10, 12)).decode()
    for _ in range(2):
        table = pa.ipc.open_stream((await http.post(topic, body, ARROW, Accept=ARROW, millpond_producer=header)).good)
        assert table.read_all().to_pylist() == [{"queue": 0, "first_offset": 0, "count": 3}]
    header = msgspec.json.encode(part(12, 13, 13)).decode()
    (await http.post(topic, b"3", "text/plain", millpond_producer=header)).ok()
    assert bodies(await http.messages(topic)) == ["0", "1", "2", "3"]


async def test_a_session_belongs_to_its_queue(http: Http) -> None:
    """One id is another session in another queue; a part goes whole to the queue it names."""
    name = fresh()
    await http.make(name, queues=2)
    for queue in range(2):
        results = await http.sent(name, "a", {"body": "b", "key": "k"}, producer={**part(None, 0, 1), "queue": queue})
        assert [(one["queue"], one["offset"]) for one in results] == [(queue, 0), (queue, 1)]
    assert len((await http.get(f"/v1/topics/{name}/producers/p")).ok()["queues"]) == 2


async def test_repeats_of_a_part_at_the_same_moment(http: Http, topic: str) -> None:
    """Two proxies' worth of retries of one part: its messages stand once."""
    answers = await asyncio.gather(*(http.send(topic, "0", "1", producer=part(None, 0, 1)) for _ in range(10)))
    assert len({tuple(places(answer.ok()["results"])) for answer in answers}) == 1
    assert await http.ends(topic) == [2]
