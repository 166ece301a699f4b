"""Our side of each work that is compared with peers: one round, figures in the unit of the work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from benchmarks import produce
from benchmarks.harness import Setup
from millpond.client.connection import Connection
from millpond.client.load import batched
from millpond.client.producer import Producer
from millpond.client.reader import Reader
from millpond.client.topics import Durability, Topics

STORED_PER_SECOND = {"read": 400_000, "lease": 100_000}  # messages there, for each second of the setup
ONE_AT_A_TIME_PER_SECOND = 800  # about: what a round of so many seconds has room for
TOPICS, TOPIC_QUEUES = 256, 8


async def _batches(reader: Reader) -> int:
    got = 0
    async for page in reader.pages(offset=0):
        got += page.messages.num_rows
    return got


async def _messages(reader: Reader) -> int:
    got = 0
    async for message in reader.messages(offset=0):
        got += bool(message.body)
    return got


class Compared(NamedTuple):
    """A work by name: its unit, and one round of it by our own client. `told` is what is compared with what."""

    unit: str
    run: Callable[[Ours], Awaitable[Mapping[str, float]]]
    told: str


class Ours:
    """A running service and what was stored there for reads."""

    def __init__(self, url: str, connection: Connection, setup: Setup) -> None:
        self.url, self.connection, self.setup = url, connection, setup
        self._stored: dict[str, tuple[str, int]] = {}
        self._groups = iter(range(1_000_000))

    async def stored(self, kind: str) -> tuple[str, int]:
        """A topic with the messages that `kind` reads again and again, made at the first use; and how many."""
        count = int(STORED_PER_SECOND[kind] * self.setup.seconds)
        topic, there = self._stored.get(kind, ("", 0))
        if there != count:  # the round that is not counted is shorter
            topic = await produce.fresh(self.connection, self.setup, "memory")
            await batched.produce(self.connection, topic, self.setup.message_bytes, count=count)
            # sealing is measured by itself, and no peer has it to do meanwhile; what is read is local all the same
            await Topics(self.connection).flush(topic)
            self._stored[kind] = topic, count
        return topic, count

    async def batches(self, durability: Durability) -> dict[str, float]:
        return {"": await produce.by_sdk(self.connection, self.setup, durability)}

    async def singles(self, durability: Durability) -> dict[str, float]:
        return {"": await produce.by_requests(self.url, self.connection, self.setup, durability)}

    async def read(self, each: bool) -> dict[str, float]:
        """All queues at once, as who reads a topic does; `each`: every message as a Python object."""
        topic, count = await self.stored("read")
        clock = self.connection.clock
        begin = clock.monotonic()
        readers = [Reader(self.connection, topic, queue) for queue in range(self.setup.queues)]
        got = sum(await asyncio.gather(*((_messages if each else _batches)(reader) for reader in readers)))
        took = clock.monotonic() - begin
        assert got == count, f"{got} of {count} messages came"
        return {"": got / took}

    async def lease(self) -> dict[str, float]:
        topic, count = await self.stored("lease")
        group = f"g{next(self._groups)}"
        rate = await batched.consume(self.connection, topic, group, count, self.setup.message_bytes)
        assert rate.count == count, f"{rate.count} of {count} messages came"
        return {"": rate.per_second}

    async def latency(self, durability: Durability) -> dict[str, float]:
        async with produce.temporary(self.connection, self.setup, durability) as topic:
            times = await batched.latency(
                self.connection, topic, "latency", self.setup.message_bytes, seconds=self.setup.seconds,
                per_second=self.setup.per_second,
            )  # fmt: skip
        return {"p50": times.p50_ms, "p99": times.p99_ms}

    async def one_at_a_time(self, durability: Durability) -> dict[str, float]:
        async with produce.temporary(self.connection, self.setup, durability) as topic:
            count = int(ONE_AT_A_TIME_PER_SECOND * self.setup.seconds)
            times = await batched.one_at_a_time(self.connection, topic, "latency", self.setup.message_bytes, count)
        assert times.count == count, f"{times.count} of {count} messages came"
        return {"p50": times.p50_ms, "p99": times.p99_ms}

    async def topics(self) -> dict[str, float]:
        """Rates into one topic and into many, and what of the first is left with many."""
        one = await self._spread(1)
        many = await self._spread(TOPICS)
        return {"1 topic": one, f"{TOPICS} topics": many, "share": many / one}

    async def _spread(self, topics: int) -> float:
        """Messages a second of one process into so many topics in turn."""
        names = [f"spread.{topics}.{next(self._groups)}.{number}" for number in range(topics)]
        making = Topics(self.connection)
        for name in names:
            await making.create(name, queues=TOPIC_QUEUES, durability="memory")
        producers = [Producer(name, connection=self.connection) for name in names]
        for producer in producers:
            await producer.start()
        rate = await spread(producers, self.setup, self.connection)
        for producer in producers:
            await producer.close()
        for name in names:
            await making.delete(name)
        return rate


async def spread(producers: list[Producer], setup: Setup, connection: Connection) -> float:
    """One message to each producer in turn, as fast as they take them, until all are answered."""
    clock = connection.clock
    bodies = batched.bodies(setup.message_bytes)
    begin, sent = clock.monotonic(), 0
    while clock.monotonic() - begin < setup.seconds:
        for number in range(batched.SLICE):
            producer = producers[(sent + number) % len(producers)]
            if not producer.has_room:
                await producer.ready()
            producer.send_nowait(bodies[number])
        sent += batched.SLICE
        await asyncio.sleep(0)
    for producer in producers:
        await producer.flush()
    return sent / (clock.monotonic() - begin)


WORKS: dict[str, Compared] = {
    "batched produce, memory": Compared("messages/s", lambda ours: ours.batches("memory"), "one call a message"),
    "batched produce, memory, bodies made": Compared(
        "messages/s",
        lambda ours: ours.batches("memory"),
        "the peer's tool makes each body, ours takes them from a list",
    ),
    "batched produce, flush": Compared("messages/s", lambda ours: ours.batches("flush"), "fsync before the answer"),
    "single requests, memory": Compared("requests/s", lambda ours: ours.singles("memory"), "HTTP, 64 connections"),
    "single requests, flush": Compared("requests/s", lambda ours: ours.singles("flush"), "HTTP, 64 connections"),
    "direct read, batches": Compared("messages/s", lambda ours: ours.read(False), "Arrow batches"),
    "direct read, messages": Compared("messages/s", lambda ours: ours.read(True), "a Python object a message"),
    "lease + ack": Compared("messages/s", lambda ours: ours.lease(), "a group, acked by receipt"),
    "latency, memory": Compared("ms", lambda ours: ours.latency("memory"), "send to the consumer's hand, 1,000/s"),
    "latency, flush": Compared("ms", lambda ours: ours.latency("flush"), "send to the consumer's hand, 1,000/s"),
    "latency, one at a time, memory": Compared(
        "ms", lambda ours: ours.one_at_a_time("memory"), "send to the consumer's hand, then the next one"
    ),
    "latency, one at a time, flush": Compared(
        "ms", lambda ours: ours.one_at_a_time("flush"), "send to the consumer's hand, then the next one"
    ),
    "many topics": Compared("messages/s", lambda ours: ours.topics(), f"1 and {TOPICS} topics x {TOPIC_QUEUES}"),
}
