"""The JSON interface in batches of 1,000, over plain HTTP: receive, and produce.

The client looks for no more in an answer than how many messages it has: what is measured is the service. A general
HTTP client (aiohttp) takes about as long to read such an answer as the service to make it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import msgspec

from benchmarks import harness
from benchmarks.harness import Line, Setup, interleaved
from millpond.client.connection import Connection, path_of
from millpond.client.load import batched
from millpond.client.topics import Topics
from millpond.core.limits import RECEIVE_BYTES_MOST, RECEIVE_MESSAGES

MESSAGES_PER_SECOND = 150_000  # how many are there to be received, for each second of the setup
_names = count()


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        topic = "bench.json"
        await Topics(connection).create(topic, queues=setup.queues, durability="flush")
        total = int(MESSAGES_PER_SECOND * setup.seconds) // RECEIVE_MESSAGES * RECEIVE_MESSAGES
        tell(f"{total:,} messages to receive")
        await batched.produce(connection, topic, setup.message_bytes, count=total)
        runs = {
            "JSON receive of 1,000": lambda: receive(connection, topic, total),
            "JSON produce of 1,000, memory": lambda: produce(connection, setup),
        }
        found = await interleaved(setup.rounds, runs, tell)
    return [Line(name, "messages/s", values) for name, values in found.items()]


async def receive(connection: Connection, topic: str, total: int) -> float:
    """Messages per second, leased and not acked, by two consumers of one group."""
    path = path_of("topics", topic, "groups", f"g{next(_names)}", "messages", "receive")
    asked = {"max_messages": RECEIVE_MESSAGES, "max_bytes": RECEIVE_BYTES_MOST, "start": "earliest", "lease_ms": 60_000}
    body = msgspec.json.encode(asked)
    taken = 0

    async def consume() -> None:
        nonlocal taken
        while taken < total:
            answer = await connection.call("POST", path, body, accept="application/json")
            came = bytes(answer.body).count(b'{"message_id":')
            if not came:
                return  # the other one has been given the last of them
            taken += came

    begin = connection.clock.monotonic()
    await asyncio.gather(consume(), consume())
    assert taken == total, f"{taken} of {total} messages came"
    return taken / (connection.clock.monotonic() - begin)


async def produce(connection: Connection, setup: Setup) -> float:
    """Messages per second, two requests at a time."""
    clock = connection.clock
    topic = f"bench.json.{next(_names)}"
    await Topics(connection).create(topic, queues=setup.queues, durability="memory")
    bodies = batched.bodies(setup.message_bytes, 1000)
    body = msgspec.json.encode({"messages": [{"body": one.decode()} for one in bodies]})
    path = path_of("topics", topic, "messages")
    begin = clock.monotonic()

    async def send() -> int:
        sent = 0
        while clock.monotonic() - begin < setup.seconds:
            await connection.call("POST", path, body)
            sent += len(bodies)
        return sent

    sent = sum(await asyncio.gather(send(), send()))
    took = clock.monotonic() - begin
    await Topics(connection).delete(topic)
    return sent / took
