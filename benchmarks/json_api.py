"""The JSON interface in batches of 1,000, over plain HTTP: receive, and produce.

The client looks for no more in an answer than how many messages it has: what is measured is the service. A general
HTTP client (aiohttp) takes about as long to read such an answer as the service to make it. The limit beside each: the
same requests to a handler that only decodes, or answers the same bytes (`json_least`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import msgspec

from benchmarks import harness, limits
from benchmarks.harness import Aim, Line, Setup, interleaved
from millpond.client.connection import Connection, path_of
from millpond.client.load import batched
from millpond.client.topics import Topics
from millpond.core.limits import RECEIVE_BYTES_MOST, RECEIVE_MESSAGES, UNSETTLED_ROWS

MESSAGES_PER_SECOND = 150_000  # how many are there to be received, for each second of the setup
_names = count()
ASKED = msgspec.json.encode(
    {"max_messages": RECEIVE_MESSAGES, "max_bytes": RECEIVE_BYTES_MOST, "start": "earliest", "lease_ms": 60_000}
)
RECEIVE, RECEIVE_LEAST = "JSON receive of 1,000", "handler that answers the same JSON"
PRODUCE, PRODUCE_LEAST = "JSON produce of 1,000, memory", "handler that decodes the same JSON"
AIMS = {RECEIVE: 300_000, PRODUCE: 400_000}
TOPIC = "bench.json"


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        total = int(MESSAGES_PER_SECOND * setup.seconds) // RECEIVE_MESSAGES * RECEIVE_MESSAGES
        queues = max(setup.queues, 2 * total // UNSETTLED_ROWS)  # all are leased at once
        await Topics(connection).create(TOPIC, queues=queues, durability="flush")
        tell(f"{total:,} messages to receive")
        await batched.produce(connection, TOPIC, setup.message_bytes, count=total)
        async with least(connection, TOPIC) as handler:
            runs = {
                RECEIVE: lambda: receive(connection, total),
                RECEIVE_LEAST: lambda: receive(handler, total),
                PRODUCE: lambda: _produced(connection, setup),
                PRODUCE_LEAST: lambda: produce(handler, "any", setup),
            }
            found = await interleaved(setup.rounds, runs, tell)
    return [
        *(
            Line(name, "messages/s", found[name], limit, aim=Aim(at_least=AIMS[name], of="value"))
            for name, limit in ((RECEIVE, RECEIVE_LEAST), (PRODUCE, PRODUCE_LEAST))
        ),
        *(Line(name, "messages/s", found[name]) for name in (RECEIVE_LEAST, PRODUCE_LEAST)),
    ]


@asynccontextmanager
async def least(connection: Connection, topic: str) -> AsyncIterator[Connection]:
    """A connection to `json_least`, which answers receives as this service does those of the topic."""
    path = path_of("topics", topic, "groups", "least", "messages", "receive")  # of no other's group
    received = await connection.call("POST", path, ASKED, accept="application/json")
    with tempfile.NamedTemporaryFile() as file:
        file.write(received.body)
        file.flush()
        async with limits.answering("benchmarks.json_least", file.name) as handler, Connection(handler.url) as other:
            yield other


async def receive(connection: Connection, total: int) -> float:
    """Messages per second, leased and not acked, by two consumers of one group."""
    path = path_of("topics", TOPIC, "groups", f"g{next(_names)}", "messages", "receive")
    taken = 0

    async def consume() -> None:
        nonlocal taken
        while taken < total:
            answer = await connection.call("POST", path, ASKED, accept="application/json")
            came = bytes(answer.body).count(b'{"message_id":')
            if not came:
                return  # the other one has been given the last of them
            taken += came

    begin = connection.clock.monotonic()
    await asyncio.gather(consume(), consume())
    assert taken >= total, f"{taken} of {total} messages came"
    return taken / (connection.clock.monotonic() - begin)


async def _produced(connection: Connection, setup: Setup) -> float:
    topic = f"{TOPIC}.{next(_names)}"
    await Topics(connection).create(topic, queues=setup.queues, durability="memory")
    rate = await produce(connection, topic, setup)
    await Topics(connection).delete(topic)
    return rate


async def produce(connection: Connection, topic: str, setup: Setup) -> float:
    """Messages per second, two requests at a time."""
    clock = connection.clock
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
    return sent / (clock.monotonic() - begin)
