"""Produce: in batches by the SDK, one message at a time and as Arrow; and single messages, one a request.

Each round has a topic of its own that is deleted at its end, and the next begins when the service has nothing left to
do: the batches that one round leaves to be sealed and the pages it leaves to be written are not the next one's bill.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import pyarrow as pa

from benchmarks import harness, limits, relay, single
from benchmarks.harness import Aim, Line, Setup, interleaved
from millpond.client.connection import Connection, path_of
from millpond.client.load import batched
from millpond.client.producer import Producer
from millpond.client.topics import Durability, Topics

KEYS = 1000
ARROW_MESSAGES = 64_000  # in one table of ready batches
_names = count()
DISK, IDLE = "pwrite + fdatasync 16 MiB", "handler that does nothing"
AIMS = {"single produce, memory": Aim(at_least=0.75), "single produce, flush": Aim(at_least=0.55)}


async def fresh(connection: Connection, setup: Setup, durability: Durability) -> str:
    """A new topic, so that no round is served by what another left."""
    topic = f"bench.{next(_names)}"
    await Topics(connection).create(topic, queues=setup.queues, durability=durability)
    return topic


@asynccontextmanager
async def temporary(connection: Connection, setup: Setup, durability: Durability) -> AsyncIterator[str]:
    """A new topic that is deleted at the end."""
    topic = await fresh(connection, setup, durability)
    yield topic
    await Topics(connection).delete(topic)


async def by_sdk(connection: Connection, setup: Setup, durability: Durability, keys: int = 0) -> float:
    """Messages per second of `send_nowait`, one call a message, until all are answered."""
    async with temporary(connection, setup, durability) as topic:
        rate = await batched.produce(connection, topic, setup.message_bytes, seconds=setup.seconds, keys=keys)
    return rate.per_second


async def by_requests(url: str, connection: Connection, setup: Setup, durability: Durability) -> float:
    """Requests per second of one message each."""
    async with temporary(connection, setup, durability) as topic:
        return await single.requests_per_second(url, path_of("topics", topic, "messages"), setup)


async def by_arrow(connection: Connection, setup: Setup, durability: Durability) -> float:
    """Messages per second of ready Arrow batches."""
    batch = pa.RecordBatch.from_pydict({"body": batched.bodies(setup.message_bytes)})
    table = pa.Table.from_batches([batch] * (ARROW_MESSAGES // batch.num_rows))
    clock = connection.clock
    async with (
        temporary(connection, setup, durability) as topic,
        Producer(topic, connection=connection, batch_bytes=4 * 2**20) as producer,
    ):
        begin = clock.monotonic()
        sent = 0
        while clock.monotonic() - begin < setup.seconds:
            await producer.send_batch(table)
            sent += table.num_rows
        return sent / (clock.monotonic() - begin)


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """Batched produce beside a socket into a file and beside pwrite with fdatasync, single beside an idle handler."""
    async with (
        harness.service(setup.folder) as service,
        Connection(service.url) as connection,
        limits.nothing() as idle,
    ):

        async def pwrite() -> float:
            return limits.pwrite(setup.folder)

        async def megabytes(of: Callable[[], Awaitable[float]]) -> float:
            return await of() * setup.message_bytes / 1e6

        through = partial(relay.relay, setup.folder, setup.seconds)
        runs: dict[str, Callable[[], Awaitable[float]]] = {
            relay.NAME: through, relay.BY_CALLS: partial(through, setup.message_bytes), DISK: pwrite,
        }  # fmt: skip
        durabilities: tuple[Durability, ...] = ("memory", "flush")
        for durability in durabilities:
            sdk = partial(by_sdk, connection, setup, durability)
            arrow = partial(by_arrow, connection, setup, durability)
            for how, run in {"send_nowait": sdk, "keyed": partial(sdk, KEYS), "Arrow": arrow}.items():
                runs[f"batched produce, {how}, {durability}"] = partial(megabytes, run)
        runs[IDLE] = partial(single.requests_per_second, idle.url, "/", setup)
        for durability in durabilities:
            runs[f"single produce, {durability}"] = partial(by_requests, service.url, connection, setup, durability)
        found = await interleaved(setup.rounds, runs, tell, lambda: harness.settled(service.pid), True)
    return [_line(name, values) for name, values in found.items()]


def _line(name: str, values: list[float]) -> Line:
    if name == IDLE or "single" in name:
        return Line(name, "requests/s", values, IDLE if name != IDLE else "", aim=AIMS.get(name))
    limit = DISK if name.endswith("flush") else relay.NAME if "Arrow" in name else relay.BY_CALLS
    return Line(name, "MB/s", values, limit if "batched" in name else "")
