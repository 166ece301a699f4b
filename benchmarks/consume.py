"""Consume: leased, received and acked; as Arrow batches, and as Python objects."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import harness
from benchmarks.harness import Line, Setup, interleaved
from benchmarks.produce import fresh
from millpond.client.connection import Connection
from millpond.client.load import batched

MESSAGES_PER_SECOND = 100_000  # how many are there to be consumed, for each second of the setup


async def measure(setup: Setup, tell: Callable[[str], None]) -> list[Line]:
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        topic = await fresh(connection, setup, "flush")
        total = int(MESSAGES_PER_SECOND * setup.seconds)
        tell(f"{total:,} messages to consume")
        await batched.produce(connection, topic, setup.message_bytes, count=total)
        groups = iter(range(1_000_000))

        async def consume(as_messages: bool) -> float:
            group = f"g{next(groups)}"
            rate = await batched.consume(connection, topic, group, total, setup.message_bytes, as_messages=as_messages)
            assert rate.count == total, f"{rate.count} of {total} messages came"
            return rate.per_second

        runs = {"consume, Arrow batches": lambda: consume(False), "consume, messages": lambda: consume(True)}
        found = await interleaved(setup.rounds, runs, tell, lambda: harness.settled(service.pid), True)
    return [Line(name, "messages/s", values) for name, values in found.items()]
