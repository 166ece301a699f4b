"""Produce: in batches by the SDK, one message at a time and as Arrow; and single messages, one a request."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pyarrow as pa

from benchmarks import limits, single
from benchmarks.harness import Line, Setup, interleaved
from millpond.client.connection import Connection, path_of
from millpond.client.load import batched
from millpond.client.producer import Producer
from millpond.client.topics import Durability, Topics

_names = count()


async def fresh(connection: Connection, setup: Setup, durability: Durability) -> str:
    """A new topic, so that no round is served by what another left."""
    topic = f"bench.{next(_names)}"
    await Topics(connection).create(topic, queues=setup.queues, durability=durability)
    return topic


async def measure(url: str, setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    """Batched and single produce, beside pwrite and beside a handler that does nothing."""
    async with Connection(url) as connection, limits.nothing() as idle_url:

        async def by_sdk(keys: int) -> float:
            topic = await fresh(connection, setup, "flush")
            rate = await batched.produce(connection, topic, setup.message_bytes, seconds=setup.seconds, keys=keys)
            await Topics(connection).delete(topic)
            return rate.megabytes_per_second

        async def singles(durability: Durability) -> float:
            topic = await fresh(connection, setup, durability)
            return await single.requests_per_second(url, path_of("topics", topic, "messages"), setup)

        async def pwrite(sync: bool) -> float:
            return limits.pwrite(setup.folder, sync)

        found = await interleaved(
            setup.rounds,
            {
                "pwrite 16 MiB": lambda: pwrite(False),
                "pwrite + fdatasync 16 MiB": lambda: pwrite(True),
                "batched produce, send_nowait": lambda: by_sdk(0),
                "batched produce, keyed": lambda: by_sdk(1000),
                "batched produce, Arrow": lambda: arrow(connection, setup),
                "handler that does nothing": lambda: single.requests_per_second(idle_url, "/", setup),
                "single produce, memory": lambda: singles("memory"),
                "single produce, flush": lambda: singles("flush"),
            },
            tell,
        )
    disk, idle = "pwrite + fdatasync 16 MiB", "handler that does nothing"
    against = {name: disk if "batched" in name else idle if "single" in name else "" for name in found}
    return [
        Line(name, "requests/s" if against[name] == idle or name == idle else "MB/s", values, against[name])
        for name, values in found.items()
    ]


async def arrow(connection: Connection, setup: Setup) -> float:
    """MB/s of bodies of ready Arrow batches."""
    topic = await fresh(connection, setup, "flush")
    batch = pa.RecordBatch.from_pydict({"body": batched.bodies(setup.message_bytes, 4000)})
    clock = connection.clock
    async with Producer(topic, connection=connection, batch_bytes=4 * 2**20) as producer:
        begin = clock.monotonic()
        sent = 0
        while clock.monotonic() - begin < setup.seconds:
            await producer.send_batch(pa.Table.from_batches([batch] * 16))
            sent += 16 * batch.num_rows
        took = clock.monotonic() - begin
    await Topics(connection).delete(topic)
    return sent * setup.message_bytes / 1e6 / took
