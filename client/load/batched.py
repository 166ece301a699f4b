"""Messages through the SDK: produce in batches, read, consume, and the time from send to receipt, at a steady rate or
one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import shake_256
from itertools import cycle, islice

from millpond.client.connection import Connection
from millpond.client.consumer import Consumer
from millpond.client.load.figures import Rate, Times
from millpond.client.load.pace import paced
from millpond.client.producer import Producer
from millpond.client.reader import Reader

SLICE = 500  # messages between two looks at the clock and the buffer
LETTERS = bytes(ord("A") + i % 26 for i in range(256))
Report = Callable[[int], None]
IDLE_SECONDS = 30.0


def bodies(message_bytes: int, different: int = 1000) -> list[bytes]:
    """Random uppercase letters, the same at every call: they compress as little as those of Kafka's own tool, and
    nothing along the way can profit from their being equal."""
    letters = shake_256(b"bodies").digest(message_bytes * different).translate(LETTERS)
    return [letters[at : at + message_bytes] for at in range(0, len(letters), message_bytes)]


async def produce(
    connection: Connection,
    topic: str,
    message_bytes: int,
    *,
    seconds: float | None = None,
    count: int | None = None,
    keys: int = 0,
    compression: str = "none",
    report: Report | None = None,
) -> Rate:
    """`send_nowait` for `seconds` or `count` messages, then flush; the rate includes the flush. `keys`: so many
    different keys, in turn."""
    clock = connection.clock
    source = cycle(bodies(message_bytes))
    names = cycle([b"key-%d" % i for i in range(keys)] or [None])
    sent = 0
    async with Producer(topic, connection=connection, compression=compression) as producer:
        begin = clock.monotonic()
        while clock.monotonic() - begin < seconds if seconds is not None else sent < (count or 0):
            take = SLICE if count is None else min(SLICE, count - sent)
            for body, key in zip(islice(source, take), names, strict=False):
                producer.send_nowait(body, key)
            sent += take
            if producer.has_room:
                await asyncio.sleep(0)
            else:
                await producer.ready()
            if report is not None:
                report(sent)
        await producer.flush()
        return Rate(sent, message_bytes, clock.monotonic() - begin)


async def consume(
    connection: Connection,
    topic: str,
    group: str,
    count: int,
    message_bytes: int,
    *,
    as_messages: bool = False,
    report: Report | None = None,
) -> Rate:
    """Receive and ack `count` messages from the beginning; by Arrow batch, or as Python objects one by one.

    Ends early when nothing arrives for 30 s.
    """
    clock = connection.clock
    taken = 0
    async with Consumer(topic, group, connection=connection, start="earliest") as consumer:
        begin = last = clock.monotonic()
        while taken < count:
            batch = await consumer.receive(IDLE_SECONDS)
            if batch is None:
                break
            if as_messages:
                for message in batch.messages():
                    message.ack_soon()
            else:
                batch.ack_soon()
            taken += len(batch)
            last = clock.monotonic()
            if report is not None:
                report(taken)
    return Rate(taken, message_bytes, last - begin)


async def read(
    connection: Connection,
    topic: str,
    queues: int,
    message_bytes: int,
    *,
    as_messages: bool = False,
    report: Report | None = None,
) -> Rate:
    """Everything in the topic, all queues at once, without a group; by Arrow batch, or as Python objects one by one,
    the body of each looked at."""
    clock = connection.clock
    taken = size = 0

    async def messages(reader: Reader) -> None:
        nonlocal taken, size
        async for message in reader.messages(offset=0):
            taken += 1
            size += len(message.body)
            if report is not None and not taken % SLICE:
                report(taken)

    async def batches(reader: Reader) -> None:
        nonlocal taken
        async for page in reader.pages(offset=0):
            taken += page.messages.num_rows
            if report is not None:
                report(taken)

    begin = clock.monotonic()
    one = messages if as_messages else batches
    await asyncio.gather(*(one(Reader(connection, topic, queue)) for queue in range(queues)))
    return Rate(taken, message_bytes, clock.monotonic() - begin)


async def latency(
    connection: Connection,
    topic: str,
    group: str,
    message_bytes: int,
    *,
    seconds: float,
    per_second: int,
    report: Report | None = None,
) -> Times:
    """From just before `send` to the message in a consumer's hand, at a steady rate.

    A message is due at a fixed time whatever became of the others, and its time counts from when it was due, so that
    a stall is not left out.
    """
    clock = connection.clock
    total = int(seconds * per_second)
    took: list[float] = []
    due: dict[bytes, float] = {}

    async def receive() -> None:
        async for message in consumer:
            began = due.pop(message.body[:8], None)
            if began is not None:
                took.append(clock.monotonic() - began)
                if report is not None:
                    report(len(took))
            if len(took) == total:
                return

    async with (
        Consumer(topic, group, connection=connection, start="latest", wait_ms=10_000) as consumer,
        Producer(topic, connection=connection, linger_ms=0) as producer,
    ):
        await _first_round(producer, consumer)
        receiving = asyncio.create_task(receive())

        def send(number: int, at: float) -> None:
            name = b"%08d" % number
            due[name] = at
            producer.send_nowait(name.ljust(message_bytes, b"x"))

        await paced(clock, total, per_second, send)
        await producer.flush()
        await asyncio.wait([receiving], timeout=IDLE_SECONDS)
        receiving.cancel()
        await asyncio.wait([receiving])
    return Times.of(took)


async def one_at_a_time(connection: Connection, topic: str, group: str, message_bytes: int, count: int) -> Times:
    """From just before `send` to the message in a consumer's hand; the next one is sent then, so a stall is one
    message's. Ends early when one does not arrive within 30 s."""
    clock = connection.clock
    body = b"x" * message_bytes
    took: list[float] = []
    async with (
        Consumer(topic, group, connection=connection, start="latest", wait_ms=10_000) as consumer,
        Producer(topic, connection=connection, linger_ms=0) as producer,
    ):
        await _first_round(producer, consumer)
        for _ in range(count):
            begin = clock.monotonic()
            await producer.send(body)
            batch = await consumer.receive(IDLE_SECONDS)
            if batch is None:
                break
            took.append(clock.monotonic() - begin)
            batch.ack_soon()
    return Times.of(took)


async def _first_round(producer: Producer, consumer: Consumer) -> None:
    """Send until something is received: from then on the group stands at the end and connections are open."""
    for _ in range(100):
        await producer.send(b"warm")
        batch = await consumer.receive(0.2)
        if batch is not None:
            await batch.ack()
            return
