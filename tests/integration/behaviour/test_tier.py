"""The tier: what was flushed is there, and reads the same when the store no longer holds it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from integration.behaviour.world import (
    ARROW,
    JSON,
    MSGPACK,
    SEGMENT_BYTES,
    Http,
    Service,
    bodies,
    fresh,
    leases,
    stream,
    until,
)

FILLER = stream({"body": pa.array([b"\xa5" * (256 << 10)] * 8)})  # 2 MiB
FIRST = 'millpond_store_first_position_bytes{group="a"}'
END = 'millpond_store_end_position_bytes{group="a"}'


async def recycled(http: Http) -> None:
    """Until no segment that holds anything of now is left in the store: it gives them back when others are full."""
    end = (await http.metrics())[END]
    name = fresh("filler")
    await http.make(name)
    for _ in range(3 * SEGMENT_BYTES // len(FILLER)):
        (await http.post(name, FILLER, ARROW)).ok()
    (await http.call("POST", f"/v1/topics/{name}/flush")).ok()

    async def gone() -> bool:
        (await http.post(name, b"x", "text/plain")).ok()  # a checkpoint needs something to happen
        return (await http.metrics())[FIRST] >= end

    await until(gone)


async def filled(http: Http, queues: int = 2, count: int = 120) -> str:
    """A topic of messages of every kind."""
    name = fresh()
    await http.make(name, queues=queues)
    messages: list[dict[str, Any]] = [
        {"body": f"{n}", "key": f"k{n % 10}", "tag": "abc"[n % 3], "properties": {"n": f"{n}"}, "born_ts": 10_000 + n,
         "queue": n % queues}
        for n in range(count)
    ]  # fmt: skip
    for at in range(0, count, 40):
        await http.sent(name, *messages[at : at + 40])
    for queue in range(queues):
        (await http.post(name, b"\xff\xfe", "image/png", millpond_queue=f"{queue}")).ok()
        await http.sent(name, {"body": "", "queue": queue})
    return name


READS = (
    "offset=0&limit=1000", "offset=7&limit=13", "tail=5", "time=0&limit=1000", "time=10050&clock=born&limit=1000",
    "offset=0&limit=1000&filter=b%20%7C%7C%20c",
)  # fmt: skip


async def everything(http: Http, topic: str) -> dict[str, Any]:
    """All that can be read without a group, by question. Arrow as rows: where its batches end means nothing."""
    found: dict[str, Any] = {}
    for queue in range(2):
        for query in READS:
            for accept in (JSON, MSGPACK):
                found[f"{queue} {query} {accept}"] = (await http.read(topic, query, queue, accept)).good
            table = pa.ipc.open_stream((await http.read(topic, query, queue, ARROW)).good).read_all()
            found[f"{queue} {query} arrow"] = (table.schema.metadata, table.to_pylist())
    for key in ("k3", "k4", "nobody"):
        found[f"key {key}"] = (await http.get(f"/v1/topics/{topic}/messages?key={key}&limit=1000")).good
    for one in await http.messages(topic, "offset=0&limit=3") + await http.messages(topic, "tail=2"):
        path = f"/v1/topics/{topic}/messages/{one['message_id']}"
        found[path] = (await http.get(path)).good
    return found


class Cold(NamedTuple):
    """Topics whose first messages only the tier still has, and what was seen of them while the store had them, too.

    `read`: all its answers were kept. `taken`: all its messages are leased. `by_tag`: those of tags b and c were
    received. `mixed`: two more messages stand behind the cold ones.
    """

    read: str
    answers: dict[str, Any]
    flushed: dict[str, Any]
    taken: str
    leased: list[Any]
    by_tag: str
    selected: list[str]
    mixed: str


async def prepare(url: str) -> Cold:
    async with aiohttp.ClientSession() as session:
        http = Http(url, session)
        read, taken, by_tag, mixed = [await filled(http) for _ in range(4)]
        answers = await everything(http, read)
        sealed = (await http.call("POST", f"/v1/topics/{read}/flush")).ok()
        assert [one["tiered_to"] for one in sealed["queues"]] == await http.ends(read)
        flushed = await everything(http, read)
        held = await http.leased(taken, "g", max_messages=1_000, lease_ms=3_600_000)
        hot = await http.leased(by_tag, "hot", max_messages=1_000, filter={"tag": "b || c"})
        await recycled(http)
        await http.sent(mixed, {"body": "hot", "queue": 0}, {"body": "hot", "queue": 1})
        return Cold(read, answers, flushed, taken, held, by_tag, bodies(hot), mixed)


@pytest.fixture(scope="session")
def cold(service: Service) -> Cold:
    """Made once: a store takes some seconds to give its segments back."""
    return asyncio.run(prepare(service.url))


async def test_cold_reads_are_the_hot_ones(http: Http, cold: Cold) -> None:
    """Every answer is the same byte for byte: before a flush, after it, and when only the tier has the messages."""
    assert cold.flushed == cold.answers
    now = await everything(http, cold.read)
    assert {question for question in now if now[question] != cold.answers[question]} == set()
    states = (await http.get(f"/v1/topics/{cold.read}/queues")).ok()["queues"]
    assert [(one["start_offset"], one["tiered_to"], one["end_offset"]) for one in states] == [(0, 62, 62)] * 2
    assert (await http.get("/readyz")).ok()["ready"]


async def test_cold_messages_are_received_like_others(http: Http, cold: Cold) -> None:
    """A group at the beginning gets them from the tier, then those behind them from the store, each once."""
    seen: list[tuple[int, int]] = []
    while got := await http.leased(cold.mixed, "g", max_messages=50):
        seen += [(one["queue"], one["offset"]) for one in got]
        assert {one["delivery_attempt"] for one in got} == {1}
        assert set(await http.settled(cold.mixed, "g", acks=leases(got))) == {"ok"}
    assert sorted(seen) == [(queue, offset) for queue in range(2) for offset in range(63)]
    assert (await http.lag(cold.mixed, "g"))["total"] == 0


async def test_cold_messages_by_tag(http: Http, cold: Cold) -> None:
    """A filter gives the same messages in the tier as in the store, and leaves no lag behind."""
    assert sorted(cold.selected) == sorted(f"{n}" for n in range(120) if n % 3 != 0)
    found: list[str] = []
    asked = {"max_messages": 50, "filter": {"tag": "b || c"}, "wait_ms": 200}
    while got := await http.leased(cold.by_tag, "cold", **asked):
        found += bodies(got)
        await http.settled(cold.by_tag, "cold", acks=leases(got))
    assert sorted(found) == sorted(cold.selected)
    assert (await http.lag(cold.by_tag, "cold"))["total"] == 0


async def test_cold_positions(http: Http, cold: Cold) -> None:
    """Lag, nacks and seeks by both clocks of a group whose messages are in the tier."""
    name = cold.taken
    store_ts = next(one["store_ts"] for one in cold.leased if (one["queue"], one["offset"]) == (0, 45))
    first = min(one["offset"] for one in cold.leased if one["queue"] == 0 and one["store_ts"] >= store_ts)
    lag = (await http.lag(name, "g"))["queues"][0]
    assert (lag["committed"], lag["in_flight"], lag["lag"]) == (0, 62, 62)
    assert lag["oldest_age_ms"] > 0
    nacks = [{"lease_id": one} for one in leases(cold.leased)]
    assert set(await http.settled(name, "g", nacks=nacks)) == {"ok"}
    again = await http.leased(name, "g", max_messages=1_000, wait_ms=500)
    assert {one["delivery_attempt"] for one in again} == {2}
    by_store = (await http.seek(name, "g", {"time": store_ts}, dry_run=True)).ok()["queues"]
    assert by_store[0]["to"] == first
    by_born = (await http.seek(name, "g", {"time": 10_051, "clock": "born"})).ok()["queues"]
    assert [one["to"] for one in by_born] == [26, 25]
    assert bodies(await http.leased(name, "g", max_messages=1))[0] in {"51", "52"}


async def test_history_names_every_object(http: Http) -> None:
    """The plan's files hold exactly the topic's messages; times prune them; hashes and sizes are true."""
    name = await filled(http)
    (await http.call("POST", f"/v1/topics/{name}/flush")).ok()
    [late] = await http.sent(name, {"body": "late", "queue": 0})
    plan = (await http.get(f"/v1/topics/{name}/history")).ok()
    rows = []
    for one in plan["objects"]:
        content = Path(one["url"].removeprefix("file://")).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (one["bytes"], one["sha256"])
        table = pq.read_table(pa.BufferReader(content))
        rows += [(row["queue"], row["offset"], row["body"]) for row in table.to_pylist()]
        assert table.num_rows == sum(each["rows"] for each in one["ranges"])
    served = [
        (one["queue"], one["offset"], one["body"])
        for queue in range(2)
        for one in msgspec.msgpack.decode((await http.read(name, "offset=0&limit=1000", queue, MSGPACK)).good)[
            "messages"
        ]
        if one["offset"] < 62
    ]
    assert sorted(rows) == sorted(served)
    assert [(one["tiered_to"], one["end_offset"]) for one in plan["queues"]] == [(62, 63), (62, 62)]
    assert (await http.get(f"/v1/topics/{name}/history?from={late['store_ts'] + 60_000}")).ok()["objects"] == []
    assert (await http.get(f"/v1/topics/{name}/history?to=10000&clock=born")).ok()["objects"] == []
    assert len((await http.get(f"/v1/topics/{name}/history?from=10000&to=10001&clock=born")).ok()["objects"]) == 1
