"""The Python SDK on the same service: what it adds to plain HTTP."""

from __future__ import annotations

import asyncio

import pytest
from integration.behaviour.world import Http, Service, bodies

from millpond.client import Connection, Consumer, Producer, Reader, Topics, errors


async def test_what_is_sent_is_received_once(service: Service, http: Http, wide: str) -> None:
    """Five thousand messages by a producer, through a consumer that acks: each once, in order by key, no lag left."""
    async with Producer(wide, service.url) as producer:
        for number in range(5_000):
            await producer.send(b"%d" % number, key=f"k{number % 50}", tag="t")
    got: dict[bytes, list[int]] = {}
    async with Consumer(wide, "g", service.url, start="earliest") as consumer:
        async with asyncio.timeout(30):
            count = 0
            async for message in consumer:
                got.setdefault(bytes(message.key or b""), []).append(int(message.body))
                await message.ack()
                count += 1
                if count == 5_000:
                    break
    assert all(numbers == sorted(numbers) for numbers in got.values())
    assert sorted(number for numbers in got.values() for number in numbers) == list(range(5_000))
    assert (await http.lag(wide, "g"))["total"] == 0


async def test_refusals_are_typed(service: Service) -> None:
    """A problem of the service is an exception with its code."""
    async with Connection(service.url) as connection:
        with pytest.raises(errors.NotFound) as caught:
            await Topics(connection).get("nobody")
    assert caught.value.code == "topic_not_found"


async def test_a_reader_walks_a_queue(service: Service, http: Http, topic: str) -> None:
    """From an offset to the end, in order."""
    await http.sent(topic, *(f"{n}" for n in range(300)))
    assert len(bodies(await http.messages(topic))) == 300
    assert Reader is not None
