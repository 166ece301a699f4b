"""The producer against a service that keeps sessions as a store does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from aiohttp import web

from millpond.client.connection import Connection
from millpond.client.errors import BufferFull, Closed, Unreachable
from millpond.client.message import Message
from millpond.client.outbox import Delivery
from millpond.client.producer import Producer
from millpond.core import limits
from millpond.core.errors import BadRequest, MillpondError, NotFound, TooLarge, Unavailable
from millpond.core.hashing import hash_bytes
from millpond.core.schema import columns_of, message_schema

from .conftest import FakeService, problem


def bodies(service: FakeService) -> list[bytes]:
    return sorted(row["body"] for rows in service.rows.values() for row in rows)


async def test_send_answers_place(service: FakeService, connection: Connection) -> None:
    """A sent message stands where its answer says, with all its values."""
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        sent = await producer.send("hällo", key="k", tag="red", properties={"a": "b"}, born_ts=1234)
    row = service.rows[sent.queue][sent.offset]
    assert sent.message_id == f"a-{sent.queue + 10}-{sent.offset}"
    assert row["body"] == "hällo".encode()
    assert (row["key"], row["tag"], row["properties"]) == (b"k", "red", [("a", "b")])
    assert row["born_ts"].timestamp() == 1.234


async def test_keys_choose_queues(service: FakeService, connection: Connection) -> None:
    """A key's messages go to queue murmur3(key) mod n, in the order of their sending, also mixed with keyless ones."""
    async with Producer("t", connection=connection) as producer:
        for i in range(500):
            producer.send_nowait(b"%d" % i, key=b"key-%d" % (i % 17) if i % 5 else None)
        await producer.flush()
    for queue, rows in service.rows.items():
        keyed = [row for row in rows if row["key"] is not None]
        assert all(hash_bytes(row["key"]) % 4 == queue for row in keyed)
        for key in {row["key"] for row in keyed}:
            numbers = [int(row["body"]) for row in keyed if row["key"] == key]
            assert numbers == sorted(numbers)
    assert len(bodies(service)) == 500


@pytest.mark.parametrize("keyed", ["kkkk", "k-k-", "--kk", "kk--", "-k", "kts", "tkk", "s"])
async def test_each_message_has_its_own_columns(service: FakeService, connection: Connection, keyed: str) -> None:
    """Messages with a key, a tag, text or a body alone arrive as they were sent, in whatever order they come."""
    values: dict[str, dict[str, Any]] = {
        "k": {"key": b"a key"}, "-": {}, "t": {"tag": "red", "key": b"another"}, "s": {"key": "text"},
    }  # fmt: skip
    async with Producer("t", connection=connection) as producer:
        for number, kind in enumerate(keyed):
            producer.send_nowait(b"%d" % number, **values[kind])
    came = sorted((row for rows in service.rows.values() for row in rows), key=lambda row: int(row["body"]))
    keys = {"k": b"a key", "-": None, "t": b"another", "s": b"text"}
    assert [row.get("key") for row in came] == [keys[kind] for kind in keyed]
    assert [row.get("tag") for row in came] == ["red" if kind == "t" else None for kind in keyed]


async def test_keys_fill_batches(service: FakeService, connection: Connection) -> None:
    """A key's bytes count as its body's do: a batch of small bodies with large keys is no larger than others."""
    async with Producer("t", connection=connection, batch_bytes=10_000, linger_ms=600_000) as producer:
        for _ in range(200):
            producer.send_nowait(b"x", b"k" * 1000)
        await producer.flush()
    assert len(bodies(service)) == 200
    assert max(request["bytes"] for request in service.produced) < 45_000


async def test_every_delivery_names_its_own_place(service: FakeService, connection: Connection) -> None:
    """Each of many deliveries, split over queues and batches, resolves to the offset its body stands at."""
    async with Producer("t", connection=connection, batch_messages=64) as producer:
        deliveries = [producer.send_nowait(b"%d" % i, key=b"key-%d" % (i % 7)) for i in range(1000)]
        for i, delivery in enumerate(deliveries):
            sent = await delivery
            assert service.rows[sent.queue][sent.offset]["body"] == b"%d" % i
        assert all(delivery.done() for delivery in deliveries)
        assert deliveries[3].result() == await deliveries[3]


async def test_exact_schema(service: FakeService, connection: Connection) -> None:
    """Batches travel in the log's exact schema, so that they pass through, and only with columns in use."""
    async with Producer("t", connection=connection) as producer:
        await producer.send(b"plain")
        await producer.send(b"tagged", tag="x")
    schemas = [request["schema"] for request in service.produced]
    assert schemas == [message_schema(0), message_schema(columns_of({"tag"}))]


async def test_batches_are_bounded_by_bytes_and_count(service: FakeService, connection: Connection) -> None:
    """A request holds at most four batches' bytes, and no more messages than a batch."""
    async with Producer("t", connection=connection, batch_bytes=10_000, batch_messages=50, linger_ms=1000) as producer:
        for _ in range(100):
            producer.send_nowait(b"x" * 1000)
        for _ in range(200):
            producer.send_nowait(b"x")
        await producer.flush()
    assert sum(request["count"] for request in service.produced) == 300
    assert max(request["count"] for request in service.produced) <= 50
    assert max(request["bytes"] for request in service.produced) <= 4 * 10_000
    assert len(service.produced) >= 300 // 50


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_lost_answers_never_duplicate(service: FakeService, connection: Connection, lost: int) -> None:
    """When answers are lost the part is repeated with the same boundaries, and stands once."""
    service.lose_answers = lost
    async with Producer("t", connection=connection, batch_messages=10) as producer:
        deliveries = [producer.send_nowait(b"%03d" % i) for i in range(100)]
        places = [await delivery for delivery in deliveries]
    assert bodies(service) == [b"%03d" % i for i in range(100)]
    assert all(service.rows[place.queue][place.offset]["body"] == b"%03d" % i for i, place in enumerate(places))


async def test_retryable_problem_is_retried(service: FakeService, connection: Connection) -> None:
    """503 and 429 are tried again; the message stands once."""
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        service.faults += [
            lambda _: problem(503, "flush_behind", "behind"),
            lambda _: problem(429, "dedup_window_full", "full"),
        ]
        await producer.send(b"a")
    assert bodies(service) == [b"a"]


async def test_refusal_fails_its_messages_only(service: FakeService, connection: Connection) -> None:
    """A refused batch raises for its messages; later ones go on in the same session."""
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        await producer.send(b"a", key="k")
        service.faults.append(lambda _: problem(413, "batch_too_large", "no"))
        with pytest.raises(TooLarge):
            await producer.send(b"b", key="k")
        await producer.send(b"c", key="k")
    assert bodies(service) == [b"a", b"c"]
    assert len({request["id"] for request in service.produced}) == 1


async def test_forgotten_session_begins_anew(service: FakeService, connection: Connection) -> None:
    """A service that lost the session's state gets a new session, and the message."""
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        await producer.send(b"a", key="k")
        service.sessions.clear()
        await producer.send(b"b", key="k")
    assert bodies(service) == [b"a", b"b"]


async def test_numbers_of_a_given_up_part_are_not_used_again(service: FakeService, connection: Connection) -> None:
    """After a part is given up, the next one is another one, behind the same previous one: were the lost one there, or
    to come yet, the service could tell."""
    async with Producer("t", connection=connection, linger_ms=0, send_ms=0) as producer:
        await producer.send(b"a", key="k")
        service.faults.append(lambda _: problem(503, "deadline_exceeded", "late"))
        with pytest.raises(Unavailable):
            await producer.send(b"b", key="k")
        await producer.send(b"c", key="k")
    parts = [(request["previous"], request["first"], request["last"]) for request in service.produced]
    assert parts == [(None, 0, 0), (0, 2, 2)]
    assert bodies(service) == [b"a", b"c"]


async def test_part_that_arrived_and_is_refused_when_tried_again(service: FakeService, connection: Connection) -> None:
    """Its answer was lost, the topic takes less by then: what follows is no repeat of it."""
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        await producer.send(b"a", key="k")
        service.lose_answers = 1
        service.faults += [lambda _: None, lambda _: problem(413, "message_too_large", "no")]
        with pytest.raises(TooLarge):
            await producer.send(b"b", key="k")
        await producer.send(b"c", key="k")
    assert bodies(service) == [b"a", b"b", b"c"]


async def test_part_that_arrived_in_a_new_session_and_was_given_up(
    service: FakeService, connection: Connection
) -> None:
    """The session was forgotten, and no answer came of the first part of the next one: what follows is no repeat."""
    async with Producer("t", connection=connection, linger_ms=0, send_ms=0) as producer:
        await producer.send(b"a", key="k")
        service.sessions.clear()
        service.faults += [lambda _: None, _two_answers_lost(service)]
        with pytest.raises(Unreachable):
            await producer.send(b"b", key="k")
        await producer.send(b"c", key="k")
    assert bodies(service) == [b"a", b"b", b"c"]


def _two_answers_lost(service: FakeService) -> Callable[[str], web.Response | None]:
    """From the next request on: one over a kept connection goes again at once, over a new one."""

    def lose(_path: str) -> None:
        service.lose_answers = 2

    return lose


async def test_flush_raises_what_nobody_awaited(service: FakeService, connection: Connection) -> None:
    """A failure of a dropped delivery comes out of flush, once."""
    async with Producer("t", connection=connection) as producer:
        service.faults.append(lambda _: problem(404, "topic_not_found", "gone"))
        producer.send_nowait(b"a")
        with pytest.raises(NotFound):
            await producer.flush()
        await producer.flush()


async def test_awaited_failure_is_not_raised_again(service: FakeService, connection: Connection) -> None:
    """A failure that was awaited does not come again at close."""
    async with Producer("t", connection=connection) as producer:
        service.faults.append(lambda _: problem(404, "topic_not_found", "gone"))
        with pytest.raises(NotFound):
            await producer.send(b"a")


async def test_buffer_is_bounded(service: FakeService, connection: Connection) -> None:
    """send_nowait refuses beyond the buffer, ready waits for room, and nothing refused was taken."""
    async with Producer("t", connection=connection, buffer_bytes=10_000, linger_ms=600_000) as producer:
        taken = 0
        with pytest.raises(BufferFull):
            for _ in range(1000):
                producer.send_nowait(b"x" * 100)
                taken += 1
        assert not producer.has_room
        await producer.ready()
        producer.send_nowait(b"x" * 100)
    assert len(bodies(service)) == taken + 1


async def test_bad_values_are_refused_at_once(service: FakeService, connection: Connection) -> None:
    """A message that cannot be is refused when it is sent, and the others of its batch are untouched."""
    bad: list[tuple[Any, dict[str, Any]]] = [
        (1, {}), ("\ud800", {}), (b"", {"key": 1}), (b"", {"tag": b"x"}), (b"", {"properties": {"a": 1}}),
        (b"", {"born_ts": -1}), (b"", {"born_ts": "now"}),
    ]  # fmt: skip
    big: list[tuple[Any, dict[str, Any]]] = [
        (b"x" * (limits.MESSAGE_BYTES + 1), {}), (b"", {"key": b"k" * 1025}), (b"", {"tag": "t" * 128}),
        (b"", {"properties": {"a": "b" * limits.PROPERTIES_BYTES}}),
    ]  # fmt: skip
    async with Producer("t", connection=connection) as producer:
        producer.send_nowait(b"good", key="k", tag="t")
        for body, values in bad:
            with pytest.raises((BadRequest, TypeError)):
                producer.send_nowait(body, **values)
        for body, values in big:
            with pytest.raises(TooLarge):
                producer.send_nowait(body, **values)
        producer.send_nowait(b"good too", key="k", born_ts=5)
    assert bodies(service) == [b"good", b"good too"]
    assert [row["tag"] for rows in service.rows.values() for row in rows] == ["t", None]


async def test_large_batches_take_no_larger_messages(service: FakeService, connection: Connection) -> None:
    """A message is too large however much room its batch has left."""
    async with Producer("t", connection=connection, batch_bytes=limits.BATCH_BYTES // 2, linger_ms=1000) as producer:
        producer.send_nowait(b"first")
        with pytest.raises(TooLarge):
            producer.send_nowait(b"x" * (limits.MESSAGE_BYTES + 1))
    assert bodies(service) == [b"first"]


async def test_send_many(service: FakeService, connection: Connection) -> None:
    """A sequence is answered for each message in order; a queue can be named."""
    async with Producer("t", connection=connection) as producer:
        sent = await producer.send_many([b"a", "b", Message(b"c", key="k")])
        assert [service.rows[s.queue][s.offset]["body"] for s in sent] == [b"a", b"b", b"c"]
        sent = await producer.send_many([b"d", Message(b"e", key="k")], queue=3)
        assert [service.rows[3][s.offset]["body"] for s in sent] == [b"d", b"e"]
        assert await producer.send_many([]) == []


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
async def test_send_batch(service: FakeService, connection: Connection, compression: str) -> None:
    """Arrow goes in slices within the bounds, by key, and is answered as ranges that cover it."""
    table = pa.table({"body": [b"%d" % i for i in range(1000)], "key": [f"k{i % 9}" for i in range(1000)]})
    async with Producer("t", connection=connection, batch_messages=100, compression=compression) as producer:
        ranges = await producer.send_batch(table)
        assert sum(r.count for r in ranges) == 1000
        assert len(bodies(service)) == 1000
        assert max(request["count"] for request in service.produced) <= 100
        ranges = await producer.send_batch(table.slice(0, 10), queue=2)
        assert [(r.queue, r.count) for r in ranges] == [(2, 10)]


SMALL = {"body": b"x", "key": b"k", "tag": "t", "properties": [("a", "b")]}


@pytest.mark.parametrize(
    "large",
    [{"body": b"x" * 30_000}, {"key": b"k" * 1_000}, {"properties": [("a", "b" * 30_000)]}],
    ids=["bodies", "keys", "properties"],
)
async def test_send_batch_by_the_size_of_each_row(
    service: FakeService, connection: Connection, large: dict[str, Any]
) -> None:
    """Large rows beside many small ones fill no request beyond the bounds, wherever they stand."""
    rows = [SMALL] * 5_000 + [SMALL | large] * 200
    schema = message_schema(columns_of(set(SMALL)))
    batch = pa.RecordBatch.from_pylist([SMALL, *rows], schema=schema).slice(1)
    async with Producer("t", connection=connection, batch_bytes=50_000) as producer:
        await producer.send_batch(batch, queue=0)
    assert len(bodies(service)) == len(rows)
    assert max(request["bytes"] for request in service.produced) <= 4 * 50_000


@pytest.mark.parametrize("spread", [False, True], ids=["one queue", "all queues"])
async def test_no_request_is_larger_than_any_may_be(service: FakeService, connection: Connection, spread: bool) -> None:
    """However large batches are: what waits while a request is under way, and what is taken at once for many queues
    (as many as the messages before had) and then goes to one."""
    keys = {hash_bytes(key) % service.queues: key for key in (b"key-%d" % number for number in range(50))}
    service.held = {0: asyncio.Event()}
    async with Producer("t", connection=connection, batch_bytes=limits.BATCH_BYTES // 2) as producer:
        for key in keys.values() if spread else [keys[0]]:
            producer.send_nowait(b"first", key)
        await service.came.acquire()
        for _ in range(40):
            if not producer.has_room:
                service.held[0].set()
                await producer.ready()
            producer.send_nowait(bytes(limits.MIB), keys[0])
        service.held[0].set()
    assert len(service.rows[0]) == 41
    assert max(request["bytes"] for request in service.produced) <= limits.BATCH_BYTES + limits.BATCH_OVERHEAD_BYTES


async def test_send_batch_refuses_foreign_columns(service: FakeService, connection: Connection) -> None:
    """Columns that a message does not have, and a missing body, are named before anything is sent."""
    async with Producer("t", connection=connection) as producer:
        for table in (pa.table({"body": [b"x"], "colour": ["red"]}), pa.table({"key": [b"x"]})):
            with pytest.raises(BadRequest):
                await producer.send_batch(table)
        with pytest.raises(BadRequest):
            await producer.send_batch(pa.table({"body": [b"x"], "born_ts": ["soon"]}))
    assert service.produced == []


async def test_cancelled_waiter_leaves_the_others(service: FakeService, connection: Connection) -> None:
    """Cancelling one send does not disturb another of the same batch."""
    async with Producer("t", connection=connection, linger_ms=20) as producer:
        one = asyncio.create_task(producer.send(b"a"))
        two = asyncio.create_task(producer.send(b"b"))
        await asyncio.sleep(0)
        one.cancel()
        sent = await two
    assert service.rows[sent.queue][sent.offset]["body"] == b"b"


async def test_closed(service: FakeService, connection: Connection) -> None:
    """After close nothing is taken; close again is fine."""
    producer = Producer("t", connection=connection)
    with pytest.raises(Closed):
        producer.send_nowait(b"early")
    await producer.start()
    await producer.close()
    await producer.close()
    with pytest.raises(Closed):
        producer.send_nowait(b"late")


async def test_unknown_topic(service: FakeService, connection: Connection) -> None:
    """An unknown topic is told at start."""
    service.faults.append(lambda _: problem(404, "topic_not_found", "no topic 't'"))
    with pytest.raises(NotFound, match="no topic"):
        async with Producer("t", connection=connection):
            pass


async def test_few_messages_stay_together(service: FakeService, connection: Connection) -> None:
    """What is sent while a request is in flight goes with the next one, not each to a queue of its own."""
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        deliveries = []
        for number in range(10):
            deliveries.append(producer.send_nowait(b"%d" % number))
            await asyncio.sleep(0)
        sent = [await delivery for delivery in deliveries]
    assert len({one.queue for one in sent}) == 1
    assert len(service.produced) < 10


async def test_few_messages_wait_together_for_the_request_before_them(
    service: FakeService, connection: Connection
) -> None:
    """They are cut up and encoded once, not one by one as they come."""
    service.held = dict.fromkeys(range(4), released := asyncio.Event())
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        first = producer.send_nowait(b"first")
        await service.came.acquire()
        producer._turn_until += 60  # however slow this machine is
        deliveries = []
        for number in range(5):
            deliveries.append(producer.send_nowait(b"%d" % number))
            await asyncio.sleep(0)
        assert len(producer._pieces) == 1, "that of the request under way"
        released.set()
        sent = [await delivery for delivery in (first, *deliveries)]
    assert [one.offset for one in sent] == [0, 1, 2, 3, 4, 5]
    assert len(service.produced) == 2


async def _stuck(service: FakeService, producer: Producer) -> tuple[Delivery, int]:
    """A message of which there is no answer, and its queue; of two, the other one answers."""
    service.held = {0: asyncio.Event(), 1: asyncio.Event()}
    stuck = producer.send_nowait(b"stuck")
    await service.came.acquire()
    [queue] = (lane.queue for lane in producer._lanes.values())
    service.held[1 - queue].set()
    return stuck, queue


async def test_a_queue_that_does_not_answer_keeps_few_messages_for_its_turn_only(
    service: FakeService, connection: Connection
) -> None:
    """Then they go to another one."""
    service.queues = 2
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        stuck, queue = await _stuck(service, producer)
        assert (await producer.send_nowait(b"follows")).queue == 1 - queue
        assert not stuck.done()
        service.held[queue].set()


async def test_keyed_messages_wait_for_no_other_queue(service: FakeService, connection: Connection) -> None:
    """A request of keyless ones keeps only those back that go to its queue."""
    service.queues = 2
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        stuck, queue = await _stuck(service, producer)
        producer._turn_until += 60
        assert (await producer.send_nowait(b"keyed", KEYS[1 - queue])).queue == 1 - queue
        assert not stuck.done()
        service.held[queue].set()


async def test_large_batches_take_the_queues_in_turn(service: FakeService, connection: Connection) -> None:
    """Keyless batches spread over all queues when they are large: several requests are under way at once."""
    async with Producer("t", connection=connection, batch_bytes=1000) as producer:
        for _ in range(40):
            producer.send_nowait(b"x" * 1000)
        await producer.flush()
    assert {request["queue"] for request in service.produced} == {0, 1, 2, 3}


KEYS = {0: b"key-1", 1: b"key-0"}  # by the queue of two that they choose


async def test_what_waits_leaves_with_the_first_answer(service: FakeService, connection: Connection) -> None:
    """While each queue has a request under way, keyless messages wait for no certain one of them."""
    service.queues = 2
    service.held = {0: asyncio.Event(), 1: asyncio.Event()}
    assert all(hash_bytes(key) % 2 == queue for queue, key in KEYS.items())
    async with Producer("t", connection=connection, linger_ms=0) as producer:
        busy = [producer.send_nowait(b"busy", key) for key in KEYS.values()]
        await service.came.acquire()
        await service.came.acquire()
        deliveries = []
        for number in range(5):
            deliveries.append(producer.send_nowait(b"%d" % number))
            await asyncio.sleep(0)
        service.held[1].set()
        sent = [await delivery for delivery in deliveries]
        assert {one.queue for one in sent} == {1}
        assert not busy[0].done()
        service.held[0].set()


async def test_what_waits_outlives_a_lane(
    service: FakeService, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that wait for a queue's answer are sent although the sending of those before them came to a bad end."""
    service.queues = 1
    asked, fails = asyncio.Event(), asyncio.Event()
    call = connection.call

    async def dies(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(connection, "call", call)
        asked.set()
        await fails.wait()
        raise RuntimeError("a bug")

    async with Producer("t", connection=connection, linger_ms=0) as producer:
        monkeypatch.setattr(connection, "call", dies)
        first = asyncio.ensure_future(producer.send_nowait(b"first"))
        await asked.wait()
        second = producer.send_nowait(b"second")
        for _ in range(5):  # its linger is over
            await asyncio.sleep(0)
        fails.set()
        assert (await second).offset == 0
        with pytest.raises(MillpondError, match="a bug"):
            await first
