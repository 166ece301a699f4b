"""What one ordinary producer and consumer notice of everything else: a steady rate, from a process of its own.

`python -m benchmarks.probe URL TOPIC SECONDS PER_SECOND MESSAGE_BYTES GROUP` prints a `Probe` as JSON. A message is due
at a fixed time whatever became of the others, and its times count from then: to its acknowledgement, and with a group
to the hand of a consumer that reads the end of the topic.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

import msgspec
import uvloop

from benchmarks import children
from millpond.client.connection import Connection
from millpond.client.consumer import Consumer
from millpond.client.load.figures import Times
from millpond.client.outbox import Delivery
from millpond.client.producer import Producer
from millpond.core.clock import Clock

MARGIN_SECONDS = 60.0
WARM_MESSAGES = 200


class Probe(msgspec.Struct, frozen=True):
    """From when a message was due to its acknowledgement, and to the consumer's hand (nothing without a group)."""

    produce: Times
    consume: Times


async def steady(url: str, topic: str, seconds: float, per_second: int, message_bytes: int, group: str = "") -> Probe:
    """`measure` in a process of its own, so that whatever else its caller does delays no message here."""
    asked = [url, topic, str(seconds), str(per_second), str(message_bytes), group]
    async with children.running(sys.executable, "-m", "benchmarks.probe", *asked) as process:
        async with asyncio.timeout(seconds + MARGIN_SECONDS):
            out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError("the probe failed: see above")
    return msgspec.json.decode(out, type=Probe)


class _Consuming:
    """A consumer at the end of the topic, and when what it gets was due."""

    def __init__(self, consumer: Consumer, clock: Clock) -> None:
        self._consumer, self._clock = consumer, clock
        self.due: dict[bytes, float] = {}
        self.took: list[float] = []

    async def warm(self, messages: int) -> None:
        """Until what was sent to warm up has come."""
        deadline = self._clock.monotonic() + MARGIN_SECONDS / 2
        while messages > 0:
            taken = await self._consumer.receive(1.0)
            if taken is not None:
                messages -= len(taken)
                await taken.ack()
            elif self._clock.monotonic() > deadline:
                raise RuntimeError(f"{messages} of the messages that were sent to warm up did not come")

    async def run(self, total: int) -> None:
        async for message in self._consumer:
            at = self.due.pop(message.body[:8], None)
            if at is not None:
                self.took.append(self._clock.monotonic() - at)
            if len(self.took) == total:
                return


async def measure(url: str, topic: str, seconds: float, per_second: int, message_bytes: int, group: str) -> Probe:
    total = int(seconds * per_second)
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(Connection(url))
        clock = connection.clock
        consuming = None
        if group:
            consumer = Consumer(topic, group, connection=connection, start="latest", wait_ms=10_000)
            consuming = _Consuming(await stack.enter_async_context(consumer), clock)
        producer = await stack.enter_async_context(Producer(topic, connection=connection, linger_ms=0))
        for _ in range(WARM_MESSAGES):
            await producer.send(b"warm-up.")
        if consuming is None:
            return Probe(await _produce(producer, clock, per_second, total, message_bytes, {}), Times.of([]))
        await consuming.warm(WARM_MESSAGES)
        receiving = asyncio.create_task(consuming.run(total))
        produced = await _produce(producer, clock, per_second, total, message_bytes, consuming.due)
        async with asyncio.timeout(MARGIN_SECONDS / 2):
            await receiving
        return Probe(produced, Times.of(consuming.took))


async def _produce(
    producer: Producer, clock: Clock, per_second: int, total: int, message_bytes: int, due: dict[bytes, float]
) -> Times:
    took: list[float] = []

    async def acknowledged(delivery: Delivery, at: float) -> None:
        await delivery
        took.append(clock.monotonic() - at)

    begin = clock.monotonic()
    async with asyncio.TaskGroup() as answers:  # keeps no heap of those that are done for a collector of garbage
        for number in range(total):
            at = begin + number / per_second
            wait = at - clock.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            name = b"%08d" % number
            due[name] = at
            answers.create_task(acknowledged(producer.send_nowait(name.ljust(message_bytes, b"x")), at))
    return Times.of(took)


def main() -> None:
    url, topic, seconds, per_second, message_bytes, group = sys.argv[1:]
    found = uvloop.run(measure(url, topic, float(seconds), int(per_second), int(message_bytes), group))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
