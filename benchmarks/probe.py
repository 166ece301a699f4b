"""What one ordinary producer and consumer notice of everything else: a steady rate, from a process of its own.

`python -m benchmarks.probe URL TOPIC SECONDS PER_SECOND MESSAGE_BYTES` prints a `Probe` as JSON. A message is due at a
fixed time whatever became of the others, and its times count from then: to its acknowledgement, and to a consumer
that reads the end of the topic.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop

from millpond.client.connection import Connection
from millpond.client.consumer import Consumer
from millpond.client.load.figures import Times
from millpond.client.outbox import Delivery
from millpond.client.producer import Producer

MARGIN_SECONDS = 60.0
WARM_MESSAGES = 200


class Probe(msgspec.Struct, frozen=True):
    """From when a message was due to its acknowledgement, and to the consumer's hand."""

    produce: Times
    consume: Times


async def steady(
    url: str, topic: str, seconds: float, per_second: int, message_bytes: int, group: str = "probe"
) -> Probe:
    """`measure` in a process of its own, so that whatever else its caller does delays no message here."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.probe", url, topic, str(seconds), str(per_second), str(message_bytes), group,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(seconds + MARGIN_SECONDS):
        out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError("the probe failed: see above")
    return msgspec.json.decode(out, type=Probe)


async def measure(url: str, topic: str, seconds: float, per_second: int, message_bytes: int, group: str) -> Probe:
    async with (
        Connection(url) as connection,
        Consumer(topic, group, connection=connection, start="latest", wait_ms=10_000) as consumer,
        Producer(topic, connection=connection, linger_ms=0) as producer,
    ):
        await _warm(producer, consumer)
        clock = connection.clock
        total = int(seconds * per_second)
        produced: list[float] = []
        consumed: list[float] = []
        due: dict[bytes, float] = {}

        async def receive() -> None:
            async for message in consumer:
                at = due.pop(message.body[:8], None)
                if at is not None:
                    consumed.append(clock.monotonic() - at)
                if len(consumed) == total:
                    return

        async def acknowledged(delivery: Delivery, at: float) -> None:
            await delivery
            produced.append(clock.monotonic() - at)

        receiving = asyncio.create_task(receive())
        answers = []
        begin = clock.monotonic()
        for number in range(total):
            at = begin + number / per_second
            wait = at - clock.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            name = b"%08d" % number
            due[name] = at
            delivery = producer.send_nowait(name.ljust(message_bytes, b"x"))
            answers.append(asyncio.create_task(acknowledged(delivery, at)))
        await asyncio.gather(*answers)
        async with asyncio.timeout(MARGIN_SECONDS / 2):
            await receiving
    return Probe(Times.of(produced), Times.of(consumed))


async def _warm(producer: Producer, consumer: Consumer) -> None:
    """Until a few hundred messages went through: connections are open, and code has run before."""
    for _ in range(WARM_MESSAGES):
        await producer.send(b"warm-up.")
    got = 0
    async with asyncio.timeout(MARGIN_SECONDS / 2):
        while got < WARM_MESSAGES:
            taken = await consumer.receive(1.0)
            if taken is not None:
                got += len(taken)
                await taken.ack()


def main() -> None:
    url, topic, seconds, per_second, message_bytes, group = sys.argv[1:]
    found = uvloop.run(measure(url, topic, float(seconds), int(per_second), int(message_bytes), group))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
