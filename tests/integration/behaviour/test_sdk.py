"""The Python SDK on the same service: a topic and a group are all that it is given."""

from __future__ import annotations

import asyncio

import pytest
from integration.behaviour.world import PATIENCE_SECONDS, Http, Service, until

from millpond.client import Connection, Consumer, Groups, MillpondError, Producer, Reader, Topics
from millpond.core.errors import NotFound


@pytest.mark.parametrize("compression", ["none", "zstd"])
async def test_what_is_sent_is_received_once(service: Service, http: Http, wide: str, compression: str) -> None:
    """Five thousand messages, each received once, in order by key; all acked, so that no lag is left."""
    async with Producer(wide, url=service.url, compression=compression) as producer:
        for number in range(5_000):
            producer.send_nowait(b"%d" % number, key=f"k{number % 50}", tag="t")
        await producer.flush()
    got: dict[bytes, list[int]] = {}
    async with Consumer(wide, "g", url=service.url, start="earliest") as consumer, asyncio.timeout(30):
        for _ in range(5_000):
            message = await anext(consumer)
            got.setdefault(bytes(message.key or b""), []).append(int(message.body))
            message.ack_soon()
    assert all(numbers == sorted(numbers) for numbers in got.values())
    assert sorted(number for numbers in got.values() for number in numbers) == list(range(5_000))
    assert (await http.lag(wide, "g"))["total"] == 0


async def test_a_consumer_that_closes_gives_back(service: Service, http: Http, topic: str) -> None:
    """What it fetched and did not finish is there for the next one at once."""
    await http.sent(topic, *(f"{n}" for n in range(20)))
    async with Consumer(topic, "g", url=service.url, start="earliest") as consumer:
        first = await anext(consumer)
        assert await first.ack() == "ok"
    rest = await http.leased(topic, "g", wait_ms=5_000)
    assert sorted(one["offset"] for one in rest) == list(range(1, 20))


async def test_a_consumer_whose_group_is_deleted_ends(service: Service, http: Http, topic: str) -> None:
    """Also between two receives; it does not make the group anew, without its filter and behind what was sent."""
    async with Consumer(topic, "g", url=service.url, start="earliest", tag="a", prefetch=1) as consumer:
        await http.sent(topic, {"body": "1", "tag": "a"}, {"body": "2", "tag": "a"}, {"body": "3", "tag": "a"})
        async with asyncio.timeout(PATIENCE_SECONDS):
            await anext(consumer)

            async def asks_for_no_more() -> bool:  # one is in hand, the next is fetched
                return bool((await http.lag(topic, "g"))["queues"][0]["in_flight"] == 2)

            await until(asks_for_no_more)
            (await http.call("DELETE", f"/v1/topics/{topic}/groups/g")).ok(204)
            await anext(consumer)
            with pytest.raises(NotFound) as caught:
                await anext(consumer)
    assert caught.value.code == "group_not_found"
    (await http.get(f"/v1/topics/{topic}/groups/g")).refused(404, "group_not_found")


async def test_a_reader_walks_a_queue(service: Service, http: Http, topic: str) -> None:
    """Page after page to the end, each message once."""
    await http.sent(topic, *(f"{n}" for n in range(300)))
    found: list[bytes] = []
    async with Connection(service.url) as connection:
        async for page in Reader(connection, topic, 0).pages(offset=10, limit=64):
            found += page.messages.column("body").to_pylist()
    assert found == [b"%d" % n for n in range(10, 300)]


async def test_a_reader_begins_at_the_start(service: Service, http: Http, topic: str) -> None:
    """Told nothing, it gives what is kept from the first message on; of an empty queue, nothing."""
    async with Connection(service.url) as connection:
        reader = Reader(connection, topic, 0)
        assert (await reader.read()).messages.num_rows == 0
        await http.sent(topic, "a", "b")
        assert (await reader.read()).messages.column("body").to_pylist() == [b"a", b"b"]


async def test_refusals_are_typed(service: Service, topic: str) -> None:
    """A problem of the service is an exception of its class, with its code."""
    async with Connection(service.url) as connection:
        with pytest.raises(NotFound) as caught:
            await Topics(connection).get("nobody")
        assert caught.value.code == "topic_not_found"
        with pytest.raises(MillpondError) as other:
            await Groups(connection, topic).lag("nobody")
        assert other.value.code == "group_not_found"
