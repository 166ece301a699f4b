"""The JSON interface in batches of 1,000, over plain HTTP: receive, and produce.

The client looks for no more in an answer than how many messages it has: what is measured is the service. A general
HTTP client (aiohttp) takes about as long to read such an answer as the service to make it. The limit beside each: the
same requests to a handler that only decodes, or answers the same bytes (`json_least`).

What the service can do is what it does for eight requests at a time; with two, also measured, it waits for the client
between them.
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
from millpond.client.groups import Groups
from millpond.client.load import batched
from millpond.client.topics import Topics
from millpond.core.limits import RECEIVE_BYTES_MOST, RECEIVE_MESSAGES, UNSETTLED_ROWS

MESSAGES_PER_SECOND = 150_000  # how many are there to be received, for each second of the setup
_names = count()
ASKED = msgspec.json.encode(
    {"max_messages": RECEIVE_MESSAGES, "max_bytes": RECEIVE_BYTES_MOST, "start": "earliest", "lease_ms": 60_000}
)
FEW, MANY = 2, 8  # requests at a time
RECEIVE, PRODUCE = "JSON receive of 1,000", "JSON produce of 1,000, memory"
MANY_RECEIVE, MANY_PRODUCE = (f"{name}, {MANY} at a time" for name in (RECEIVE, PRODUCE))
RECEIVE_LEAST, PRODUCE_LEAST = (
    f"handler that {does} the same JSON, {MANY} at a time" for does in ("answers", "decodes")
)
TOPIC = "bench.json"


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        total = int(MESSAGES_PER_SECOND * setup.seconds) // RECEIVE_MESSAGES * RECEIVE_MESSAGES
        queues = max(setup.queues, 2 * total // UNSETTLED_ROWS)  # all are leased at once
        await Topics(connection).create(TOPIC, queues=queues, durability="flush")
        tell(f"{total:,} messages to receive")
        await batched.produce(connection, TOPIC, setup.message_bytes, count=total)
        async with least(connection, TOPIC) as handler:
            receives = {
                RECEIVE: lambda: _received(connection, total, FEW),
                MANY_RECEIVE: lambda: _received(connection, total, MANY),
                RECEIVE_LEAST: lambda: receive(handler, "any", total, MANY),
            }
            produces = {
                PRODUCE: lambda: _produced(connection, setup, FEW),
                MANY_PRODUCE: lambda: _produced(connection, setup, MANY),
                PRODUCE_LEAST: lambda: produce(handler, "any", setup, MANY),
            }
            found = await interleaved(setup.rounds, receives, tell)  # first: more produced than `local_bytes` makes old
            found |= await interleaved(setup.rounds, produces, tell)  # messages leave the log, for the tier
    beside = {MANY_RECEIVE: RECEIVE_LEAST, MANY_PRODUCE: PRODUCE_LEAST}
    aims = {name: Aim(at_least=least, of="value") for name, least in ((MANY_RECEIVE, 300_000), (MANY_PRODUCE, 400_000))}
    return [
        Line(name, "messages/s", values, beside.get(name, ""), aim=aims.get(name)) for name, values in found.items()
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


async def _received(connection: Connection, total: int, consumers: int) -> float:
    group = f"g{next(_names)}"
    rate = await receive(connection, group, total, consumers)
    await Groups(connection, TOPIC).delete(group)  # and with it the lease of each message
    return rate


async def receive(connection: Connection, group: str, total: int, consumers: int) -> float:
    """Messages per second, leased and not acked, by the consumers of the group."""
    path = path_of("topics", TOPIC, "groups", group, "messages", "receive")
    taken = 0

    async def consume() -> None:
        nonlocal taken
        while taken < total:
            answer = await connection.call("POST", path, ASKED, accept="application/json")
            came = bytes(answer.body).count(b'{"message_id":')
            if not came:
                return  # the others have been given the last of them
            taken += came

    begin = connection.clock.monotonic()
    await asyncio.gather(*(consume() for _ in range(consumers)))
    assert taken >= total, f"{taken} of {total} messages came"
    return taken / (connection.clock.monotonic() - begin)


async def _produced(connection: Connection, setup: Setup, producers: int) -> float:
    topic = f"{TOPIC}.{next(_names)}"
    await Topics(connection).create(topic, queues=setup.queues, durability="memory")
    rate = await produce(connection, topic, setup, producers)
    await Topics(connection).delete(topic)
    return rate


async def produce(connection: Connection, topic: str, setup: Setup, producers: int) -> float:
    """Messages per second, each producer with one request at a time."""
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

    sent = sum(await asyncio.gather(*(send() for _ in range(producers))))
    return sent / (clock.monotonic() - begin)
