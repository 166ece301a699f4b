"""The consumer against a service that hands out prepared receives and notes what is settled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from millpond.client import consumer as consumer_module
from millpond.client.connection import Connection
from millpond.client.consumer import MANY_BYTES, Ahead, Consumer
from millpond.client.errors import Closed, UnknownProblem
from millpond.client.received import LARGE_BYTES, numbers
from millpond.client.settler import joined, ranges
from millpond.core import limits
from millpond.core.errors import BadRequest, Conflict, NotFound

from .conftest import FakeService, arrow_answer, problem

TWO, THREE = 2 * limits.RECEIVE_ROWS, 3 * limits.RECEIVE_ROWS  # prefetches: room for so many receives


def rows(first: int, count: int, queue: int = 0) -> list[dict[str, Any]]:
    return [{"queue": queue, "offset": first + i, "body": b"%d" % (first + i)} for i in range(count)]


def one_receipt(token: str, first: int, count: int) -> Any:
    return arrow_answer(rows(first, count), {"receipts": [{"receipt": token, "queue": 0, "rows": f"0-{count - 1}"}]})


async def test_loop_acks_what_it_has_finished(service: FakeService, connection: Connection) -> None:
    """Each message is acked when the next is asked for; the one in hand at break is handed back at close."""
    service.receives.append(one_receipt("T", 100, 5))
    seen = []
    async with Consumer("t", "g", connection=connection) as consumer:
        async for message in consumer:
            seen.append((message.offset, message.body, message.delivery_attempt))
            if len(seen) == 3:
                break
    assert seen == [(100, b"100", 1), (101, b"101", 1), (102, b"102", 1)]
    assert service.settled_rows("acks") == ["T.0", "T.1"]
    assert service.settled_rows("nacks") == ["T.2", "T.3", "T.4"]


async def test_explicit_settles_answer_their_status(service: FakeService, connection: Connection) -> None:
    """ack, nack and extend answer what the service said of that message, and are not acked again by the loop."""
    service.receives.append(one_receipt("T", 0, 4))
    service.statuses = {"T.0": "redelivered", "T.1": "already"}
    async with Consumer("t", "g", connection=connection) as consumer:
        messages = [await anext(consumer)]
        assert await messages[0].ack() == "redelivered"
        messages.append(await anext(consumer))
        assert await messages[1].nack(delay_ms=500) == "already"
        messages.append(await anext(consumer))
        assert await messages[2].extend(60_000) == "ok"
        await anext(consumer)
    assert service.settled_rows("acks") == ["T.0", "T.2"]
    assert service.settled_rows("nacks") == ["T.1", "T.3"]
    assert {"lease_id": "T.1", "delay_ms": 500} in service.settled[1]["nacks"]
    assert service.settled_rows("extends") == ["T.2"]


async def test_batches(service: FakeService, connection: Connection) -> None:
    """Batches are one for each receipt, know their rows, and are acked as a range."""
    answer = arrow_answer(
        [*rows(10, 2), *rows(14, 1), *rows(7, 2, queue=3)],
        {"receipts": [{"receipt": "A", "queue": 0, "rows": "0-1,4"}, {"receipt": "B", "queue": 3, "rows": "0-1"}]},
    )
    service.receives.append(answer)
    found = []
    async with Consumer("t", "g", connection=connection) as consumer:
        async for batch in consumer.batches():
            found.append((batch.queue, batch.batch.column("offset").to_pylist()))
            if batch.queue == 3:
                assert await batch.ack() == "ok"
                break
    assert found == [(0, [10, 11, 14]), (3, [7, 8])]
    acks = [item for call in service.settled for item in call.get("acks", [])]
    assert {"receipt": "A", "rows": "0-1,4"} in acks
    assert {"receipt": "B", "rows": "0-1"} in acks
    assert service.settled_rows("nacks") == []


async def test_acks_travel_together(service: FakeService, connection: Connection) -> None:
    """A thousand automatic acks are few calls and few ranges."""
    service.receives.append(one_receipt("T", 0, 1000))
    async with Consumer("t", "g", connection=connection) as consumer:
        count = 0
        async for _ in consumer:
            count += 1
            if count == 1000:
                break
    assert service.settled_rows("acks") == sorted(f"T.{row}" for row in range(999))
    assert len(service.settled) <= 5


async def test_prefetch_is_bounded(service: FakeService, connection: Connection) -> None:
    """It asks for no more than the prefetch leaves room for, and stops when that is full."""
    service.receives += [one_receipt("A", 0, 10), one_receipt("B", 10, 5)]
    async with Consumer("t", "g", connection=connection, prefetch=15) as consumer:
        await anext(consumer)
        for _ in range(14):
            await anext(consumer)
    asked = [request for request in service.requests if request.path.endswith("/receive")]
    assert len(asked) >= 2
    assert {json.loads(request.body)["max_messages"] for request in asked} <= {15, 5, 10}


@pytest.fixture
def steps(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a consumer does: `ask` and `decode` of each receive, in order."""
    done: list[str] = []
    call, decode = connection.call, consumer_module.decode_receive

    async def asked(method: str, path: str, *given: Any, **named: Any) -> Any:
        if path.endswith("/receive"):
            done.append("ask")
        return await call(method, path, *given, **named)

    def decoded(*given: Any) -> Any:
        done.append("decode")
        return decode(*given)

    monkeypatch.setattr(connection, "call", asked)
    monkeypatch.setattr(consumer_module, "decode_receive", decoded)
    return done


def large(token: str, first: int) -> Any:
    """An answer of ten messages that is worth asking on before it is decoded."""
    table = [{**row, "body": row["body"].ljust(MANY_BYTES // 10)} for row in rows(first, 10)]
    return arrow_answer(table, {"receipts": [{"receipt": token, "queue": 0, "rows": "0-9"}]})


async def test_the_next_receive_is_sent_before_a_large_answer_is_decoded(
    service: FakeService, connection: Connection, steps: list[str]
) -> None:
    """So the service does not rest meanwhile; messages come in their order, each once."""
    service.receives += [large("A", 0), large("B", 10), one_receipt("C", 20, 5), one_receipt("D", 25, 5)]
    async with Consumer("t", "g", connection=connection, prefetch=TWO) as consumer:
        seen = [(await anext(consumer)).offset for _ in range(30)]
    assert seen == list(range(30))
    assert steps[:8] == ["ask", "ask", "decode", "ask", "decode", "decode", "ask", "decode"]
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "millpond receive"]


@pytest.mark.parametrize(("queues", "asked"), [(4, 3), (1, 2)])
async def test_behind_a_large_answer_two_receives_follow(
    service: FakeService, connection: Connection, steps: list[str], queues: int, asked: int
) -> None:
    """So that one is with the service while the other's answer is taken; of a single queue one, for its rows in flight
    are bounded."""
    service.queues = queues
    service.receives.append(large("A", 0))
    async with Consumer("t", "g", connection=connection, prefetch=THREE) as consumer:
        await anext(consumer)
        assert steps == ["ask"] * asked + ["decode"]
        assert len([task for task in asyncio.all_tasks() if task.get_name() == "millpond receive"]) == asked
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "millpond receive"]


async def test_no_answer_waits_for_one_that_was_asked_for_earlier(
    service: FakeService, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of two receives brings something first, the messages are handed out at once."""
    call = connection.call
    pending: list[asyncio.Future[Any]] = []

    async def asked(method: str, path: str, *given: Any, **named: Any) -> Any:
        if path.endswith("/receive"):
            pending.append(asyncio.get_running_loop().create_future())
            if len(pending) > 1:
                return await pending[-1]
        return await call(method, path, *given, **named)

    monkeypatch.setattr(connection, "call", asked)
    service.receives += [large("A", 0), one_receipt("B", 10, 5)]
    async with Consumer("t", "g", connection=connection, prefetch=THREE) as consumer:
        async with asyncio.timeout(5):
            seen = [(await anext(consumer)).offset for _ in range(10)]
            _, older, newer = pending
            newer.set_result(await call("POST", "/v1/topics/t/groups/g/messages/receive", b"{}"))
            seen += [(await anext(consumer)).offset for _ in range(5)]
        assert not older.done()
    assert seen == list(range(15))


async def test_after_a_small_answer_it_is_sent_when_that_is_decoded(
    service: FakeService, connection: Connection, steps: list[str]
) -> None:
    """Whatever it brings is at hand first."""
    service.receives += [one_receipt("A", 0, 5), one_receipt("B", 5, 5)]
    async with Consumer("t", "g", connection=connection) as consumer:
        for _ in range(10):
            await anext(consumer)
    assert steps[:4] == ["ask", "decode", "ask", "decode"]


async def test_a_large_answer_may_be_all_that_is_wanted(
    service: FakeService, connection: Connection, steps: list[str]
) -> None:
    """No receive is sent ahead that `prefetch` has no room for, should the answer be as large as any."""
    service.receives += [large("A", 0), large("B", 10)]
    async with Consumer("t", "g", connection=connection, prefetch=10) as consumer:
        for _ in range(20):
            await anext(consumer)
    assert steps[:4] == ["ask", "decode", "ask", "decode"]


async def test_a_failure_of_the_next_receive_comes_after_what_was_received(
    service: FakeService, connection: Connection
) -> None:
    """Also when it was sent ahead."""
    service.receives += [large("A", 0), problem(400, "invalid_request", "no")]
    seen = []
    with pytest.raises(BadRequest, match="no"):
        async with Consumer("t", "g", connection=connection, prefetch=TWO) as consumer:
            while True:
                seen.append((await anext(consumer)).offset)
    assert seen == list(range(10))


async def test_an_answer_that_cannot_be_read_ends_the_next_receive(
    service: FakeService, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop says so at once, and does not wait for more."""

    def broken(*_: Any) -> Any:
        raise UnknownProblem("not as expected")

    monkeypatch.setattr(consumer_module, "decode_receive", broken)
    service.receives.append(large("A", 0))
    async with Consumer("t", "g", connection=connection, prefetch=TWO) as consumer:
        with pytest.raises(UnknownProblem, match="not as expected"):
            async with asyncio.timeout(2):  # the service would let it wait for longer
                await anext(consumer)


async def test_group_is_made_once(service: FakeService, connection: Connection) -> None:
    """A group that is not there is made with start and filter; one that is there keeps its start."""
    async with Consumer("t", "g", connection=connection, start="earliest", tag="a || b"):
        pass
    assert service.groups["g"] == {"start": "earliest", "filter": {"tag": "a || b"}}
    async with Consumer("t", "g", connection=connection):
        pass
    assert [request.method for request in service.requests if request.path.endswith("/g")] == ["GET", "PUT", "GET"]


async def test_unknown_topic_and_other_filter(service: FakeService, connection: Connection) -> None:
    """What is wrong with topic or filter is told at start."""
    service.faults.append(lambda _: problem(404, "topic_not_found", "no such topic"))
    with pytest.raises(NotFound):
        async with Consumer("t", "g", connection=connection):
            pass
    service.groups["g"] = {"start": "latest", "filter": {"tag": "x"}}
    service.faults += [lambda _: None, lambda _: problem(409, "filter_differs", "other")]
    with pytest.raises(Conflict):
        async with Consumer("t", "g", connection=connection, tag="y"):
            pass


async def test_receive_failure_reaches_the_loop(service: FakeService, connection: Connection) -> None:
    """When receiving stops for good, whoever waits for a message is told why."""
    service.groups["g"] = {}
    service.faults += [lambda _: None, lambda _: None, lambda _: problem(404, "topic_not_found", "deleted")]
    async with Consumer("t", "g", connection=connection) as consumer:
        with pytest.raises(NotFound, match="deleted"):
            await anext(consumer)


async def test_receive_is_repeated_with_its_attempt_id(service: FakeService, connection: Connection) -> None:
    """A receive whose answer failed is repeated as the same attempt, so that its leases are not stranded."""
    service.groups["g"] = {}
    service.faults += [lambda _: None, lambda _: None, lambda _: problem(503, "store_unavailable", "away")]
    service.receives.append(one_receipt("T", 0, 1))
    async with Consumer("t", "g", connection=connection) as consumer:
        await anext(consumer)
    asked = [json.loads(r.body)["attempt_id"] for r in service.requests if r.path.endswith("/receive")]
    assert asked[0] == asked[1]


async def test_messages_of_a_queue_that_came_later_have_their_ids(service: FakeService, connection: Connection) -> None:
    """The topic has got more queues since the consumer was started."""
    async with Consumer("t", "g", connection=connection) as consumer:
        service.queues += 1
        added = service.queues - 1
        receipt = {"receipt": "T", "queue": added, "rows": "0-1"}
        service.receives.append(arrow_answer(rows(7, 2, added), {"receipts": [receipt]}))
        service.more.set()
        assert [(await anext(consumer)).message_id for _ in range(2)] == [f"a-{added + 10}-7", f"a-{added + 10}-8"]


async def test_leases_are_extended(service: FakeService, connection: Connection) -> None:
    """While a message is in hand its lease is extended, and those of what waits behind it."""
    service.receives.append(one_receipt("T", 0, 2))
    async with Consumer("t", "g", connection=connection, lease_ms=60) as consumer:
        await anext(consumer)
        async with asyncio.timeout(5):
            while not service.settled_rows("extends"):
                service.settles.clear()
                await service.settles.wait()
    assert service.settled_rows("extends")[:2] == ["T.0", "T.1"]


async def test_many_leases_are_extended_together(service: FakeService, connection: Connection) -> None:
    """Those of messages that came one by one share calls: one after another would outlast them."""
    service.receives.extend(one_receipt(f"T{number}", number, 1) for number in range(20))
    async with Consumer("t", "g", connection=connection, lease_ms=300) as consumer:
        await anext(consumer)
        async with asyncio.timeout(5):
            while len(set(service.settled_rows("extends"))) < 20:
                service.settles.clear()
                await service.settles.wait()
    assert max(len(call.get("extends", [])) for call in service.settled) > 10


async def test_close_ends_a_waiting_loop(service: FakeService, connection: Connection) -> None:
    """Closing from elsewhere ends `async for` and `receive` instead of leaving them waiting."""
    consumer = Consumer("t", "g", connection=connection)
    await consumer.start()

    async def loop() -> int:
        return len([message async for message in consumer])

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    await consumer.close()
    assert await task == 0
    assert await consumer.receive(0) is None


def test_ranges_of_rows() -> None:
    """Rows and their text forms are inverse, and a text never has more ranges than the service takes."""
    assert ranges([0, 1, 2, 7, 9, 10]) == ["0-2,7,9-10"]
    assert ranges([]) == []
    odd = list(range(1, 6 * limits.RECEIPT_RANGES, 2))
    texts = ranges(odd)
    assert [row for text in texts for row in numbers(text)] == odd
    assert all(text.count(",") < limits.RECEIPT_RANGES for text in texts)


@pytest.mark.parametrize("runs", [[range(3), range(3, 5)], [range(7, 9), range(2), range(2, 3)], [range(4), range(0)]])
def test_runs_join(runs: list[range]) -> None:
    """Rows known as runs make the same texts as rows one by one."""
    assert joined(list(runs)) == ranges(sorted(row for run in runs for row in run))


async def test_large_batches_are_not_copied(service: FakeService, connection: Connection) -> None:
    """Large record batches of one receipt are handed out each, and acked together as one range; small ones as one."""
    large, small = (1, 2 * LARGE_BYTES), (1, 10)
    for sizes, found in (([large, large], [1, 1]), ([small, small, small], [3])):
        service.receives.append(batches_answer("T", sizes))
        async with Consumer("t", "g", connection=connection) as consumer:
            batches = [await consumer.receive(5) for _ in found]
            assert [len(batch) for batch in batches if batch is not None] == found
            for batch in batches:
                assert batch is not None
                batch.ack_soon()
        acks = [item for call in service.settled for item in call.get("acks", [])]
        assert acks == [{"receipt": "T", "rows": f"0-{sum(found) - 1}"}]
        service.settled.clear()


def batches_answer(token: str, sizes: list[tuple[int, int]]) -> Any:
    """One receipt over several record batches of (rows, bytes of a body)."""
    counts = [count for count, _ in sizes]
    bodies = [b"x" * size for count, size in sizes for _ in range(count)]
    found = [{"queue": 0, "offset": number, "body": body} for number, body in enumerate(bodies)]
    beside = {"receipts": [{"receipt": token, "queue": 0, "rows": f"0-{sum(counts) - 1}"}]}
    return arrow_answer(found, beside, batch_rows=counts[0])


async def test_many_acks_do_not_wait(service: FakeService, connection: Connection, monkeypatch: Any) -> None:
    """So many automatic acks as may be in flight are sent at once, however long acks may gather."""
    monkeypatch.setattr(limits, "CLIENT_SETTLE_MS", 3_600_000)
    monkeypatch.setattr(limits, "CLIENT_SETTLE_ROWS", 4)
    service.receives.append(one_receipt("T", 0, 4))
    async with Consumer("t", "g", connection=connection) as consumer:
        batch = await consumer.receive(5)
        assert batch is not None
        batch.ack_soon()
        async with asyncio.timeout(5):
            await service.settles.wait()
    assert service.settled == [{"acks": [{"receipt": "T", "rows": "0-3"}]}]


async def test_bytes_fetched_ahead_are_bounded(
    service: FakeService, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is asked for while what is buffered has reached its bound in bytes."""
    monkeypatch.setattr(limits, "CLIENT_PREFETCH_BYTES", 1)
    service.receives += [one_receipt("A", 0, 1), one_receipt("B", 1, 1)]
    asked = 0
    async with Consumer("t", "g", connection=connection) as consumer:
        for _ in range(1_000):  # long enough for an answer and the next request
            await asyncio.sleep(0)
        asked = sum(request.path.endswith("/receive") for request in service.requests)
        found = [await consumer.receive(5), await consumer.receive(5)]
    assert asked == 1
    assert [batch.receipt for batch in found if batch is not None] == ["A", "B"]


@pytest.mark.parametrize(
    ("seconds", "messages"), [(0.0001, limits.CLIENT_PREFETCH_MOST), (0.05, 10_000), (10.0, 2_000)]
)
def test_quick_programs_are_fetched_ahead_for(seconds: float, messages: int) -> None:
    """What is handled in CLIENT_PREFETCH_SECONDS, between the least and the most; a fixed number stays."""
    ahead, fixed = Ahead(None), Ahead(7)
    for one in (ahead, fixed):
        one.begins(2_000, 50.0)
        one.handled(50.0 + seconds)
    assert (ahead.messages, fixed.messages) == (messages, 7)


async def test_a_settler_that_dies_leaves_nobody_waiting(
    service: FakeService, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither who waits for the call under way, nor who waits for the next one."""
    service.receives.append(one_receipt("T", 0, 2))
    called, go_on = asyncio.Event(), asyncio.Event()

    async def broken(*_: Any, **__: Any) -> Any:
        called.set()
        await go_on.wait()
        raise RuntimeError("not what a call raises")

    async with Consumer("t", "g", connection=connection, prefetch=2) as consumer, asyncio.timeout(10):
        first, second = (await consumer._next_batch()).messages()
        with monkeypatch.context() as patch:
            patch.setattr(consumer._settler, "_post", broken)
            acks = [asyncio.create_task(first.ack())]
            await called.wait()
            acks.append(asyncio.create_task(second.ack()))
            await asyncio.sleep(0)
            go_on.set()
            assert [type(found) for found in await asyncio.gather(*acks, return_exceptions=True)] == [Closed, Closed]
