"""What `millpond bench` measures, by the same works: this service through the SDK, a Kafka through its own client."""

from __future__ import annotations

import asyncio
import os
from typing import Literal, NamedTuple, Protocol

from millpond.client.command.bench_table import Figure
from millpond.client.connection import Connection, path_of
from millpond.client.load import batched, kafka
from millpond.client.load.batched import Report
from millpond.client.load.figures import Rate
from millpond.client.load.single import in_own_process
from millpond.client.topics import Topics

BATCHED, SINGLE, LATENCY = "batched", "single", "latency"
READ, READ_EACH = "read", "read one by one"
CONSUME, CONSUME_EACH = "consume", "consume one by one"
READS, CONSUMES = (READ, READ_EACH), (CONSUME, CONSUME_EACH)
Durability = Literal["flush", "memory"]


class Plan(NamedTuple):
    """What is measured. `works`: in this order; `rate`: messages per second when latency is measured."""

    works: list[str]
    seconds: float
    message_bytes: int
    queues: int
    durability: Durability
    rate: int


class System(Protocol):
    """What is measured, in a topic of its own."""

    name: str

    async def prepare(self) -> None: ...

    async def measure(self, work: str, plan: Plan, report: Report) -> Figure: ...

    async def clean(self) -> None: ...


class Millpond:
    """This service, through the SDK; single messages from a process of its own."""

    name = "Millpond"

    def __init__(self, connection: Connection, topic: str, plan: Plan, api_key: str | None, keep: bool) -> None:
        self._connection = connection
        self._topics = Topics(connection)
        self._topic = topic
        self._plan = plan
        self._api_key = api_key or os.environ.get("MILLPOND_KEY") or ""
        self._keep = keep
        self._produced = self._groups = 0

    async def prepare(self) -> None:
        await self._topics.create(self._topic, queues=self._plan.queues, durability=self._plan.durability)

    async def measure(self, work: str, plan: Plan, report: Report) -> Figure:
        connection, topic, size = self._connection, self._topic, plan.message_bytes
        if work == BATCHED:
            made = await batched.produce(connection, topic, size, seconds=plan.seconds, report=report)
            self._produced = made.count
            return made
        if work in READS:
            return await batched.read(
                connection, topic, plan.queues, size, as_messages=work == READ_EACH, report=report
            )
        self._groups += 1
        group = f"bench-{self._groups}"
        if work in CONSUMES:
            return await batched.consume(
                connection, topic, group, self._produced, size, as_messages=work == CONSUME_EACH, report=report
            )
        if work == SINGLE:
            path = path_of("topics", topic, "messages")
            return await in_own_process(connection.url, path, size, plan.seconds, self._api_key)
        return await batched.latency(
            connection, topic, group, size, seconds=plan.seconds, per_second=plan.rate, report=report
        )

    async def clean(self) -> None:
        if not self._keep:
            await self._topics.delete(self._topic)


class OtherKafka:
    """A Kafka, through confluent-kafka."""

    name = "Kafka"

    def __init__(self, peer: kafka.Kafka, topic: str, plan: Plan, keep: bool) -> None:
        self._peer = peer
        self._topic = topic
        self._plan = plan
        self._keep = keep
        self._produced = self._groups = 0
        self._consumed: Rate | None = None

    @classmethod
    async def found(cls, address: str, topic: str, plan: Plan, connection: Connection, keep: bool) -> OtherKafka:
        """Raises StartupError when it cannot be had."""
        peer = await asyncio.to_thread(kafka.Kafka, address, connection.clock)
        await asyncio.to_thread(peer.check)
        return cls(peer, topic, plan, keep)

    async def prepare(self) -> None:
        flushed = self._plan.durability == "flush"
        await asyncio.to_thread(self._peer.create, self._topic, self._plan.queues, flushed)

    async def measure(self, work: str, plan: Plan, report: Report) -> Figure:
        topic, size = self._topic, plan.message_bytes
        if work == BATCHED:
            made = await asyncio.to_thread(lambda: self._peer.produce(topic, size, plan.seconds, report))
            self._produced, self._consumed = made.count, None
            return made
        self._groups += 1
        group = f"{topic}-{self._groups}"
        if work in {*READS, *CONSUMES}:  # its client has one way: measured once, shown beside all of ours
            if self._consumed is None:
                self._consumed = await asyncio.to_thread(
                    lambda: self._peer.consume(topic, group, self._produced, size, report)
                )
            return self._consumed
        if work == SINGLE:
            return await asyncio.to_thread(lambda: self._peer.single(topic, size, plan.seconds, report))
        return await asyncio.to_thread(lambda: self._peer.latency(topic, group, size, plan.seconds, plan.rate, report))

    async def clean(self) -> None:
        self._peer.end()
        if not self._keep:
            await asyncio.to_thread(self._peer.delete, self._topic)
