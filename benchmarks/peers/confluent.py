"""confluent-kafka from Python, in a process of its own; prints figures as JSON. `python -m benchmarks.peers.confluent
WORK ADDRESS SECONDS BYTES TOPIC MESSAGES PARTITIONS`.

produce   `produce()` a message, the queue polled when it is full; until all are acknowledged
consume   `consume(1000)`, each message's body taken
topics    `produce` in turn into one topic of 8 partitions, then into 256 of them; of what is not acknowledged a minute
          after the last, the minute is counted and the messages are not
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import cycle
from typing import Any

import msgspec
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.ours import TOPIC_QUEUES, TOPICS
from millpond.client.load import batched
from millpond.core.clock import SystemClock

SLICE = 500
WAIT_SECONDS = 60.0
TUNED = {"acks": 1, "linger.ms": 5, "batch.size": 1_000_000, "queue.buffering.max.messages": 500_000}
_clock = SystemClock()


def produce(address: str, topics: list[str], seconds: float, message_bytes: int) -> float:
    """Acknowledged messages a second into `topics` in turn, until the last is."""
    producer = Producer({"bootstrap.servers": address, **TUNED})
    bodies = cycle(batched.bodies(message_bytes))
    names = cycle(topics)
    begin, sent = _clock.monotonic(), 0
    while _clock.monotonic() - begin < seconds:
        for name, body, _ in zip(names, bodies, range(SLICE), strict=False):
            while not _took(producer, name, body):
                if _clock.monotonic() - begin > seconds + WAIT_SECONDS:
                    break
            else:
                sent += 1
        producer.poll(0)
    left: int = producer.flush(WAIT_SECONDS)
    took = _clock.monotonic() - begin
    if left:
        sys.stderr.write(f"{left} of {sent} messages were not acknowledged after {took:.0f} s\n")
        producer.purge()
    return (sent - left) / took


def _took(producer: Producer, topic: str, body: bytes) -> bool:
    """Whether its queue had room; if not, it was given some time."""
    try:
        producer.produce(topic, body)
    except BufferError:
        producer.poll(0.05)
        return False
    return True


def consume(address: str, topic: str, messages: int) -> float:
    """Messages a second from the first message on."""
    settings = {
        "bootstrap.servers": address, "group.id": f"confluent-{_clock.wall_ms()}", "auto.offset.reset": "earliest",
        "enable.auto.commit": False, "queued.min.messages": 500_000, "fetch.message.max.bytes": 4 << 20,
    }  # fmt: skip
    consumer = Consumer(settings)
    consumer.subscribe([topic])
    got = size = 0
    begin = last = _clock.monotonic()
    while got < messages:
        taken: list[Any] = consumer.consume(1000, WAIT_SECONDS if not got else 10.0)
        if not taken:
            break
        if not got:
            begin = _clock.monotonic()  # joining the group is not what is measured
        for message in taken:
            size += len(message.value())
        got += len(taken)
        last = _clock.monotonic()
    consumer.close()
    assert got >= messages, f"{got} of {messages} messages came"
    return got / (last - begin)


def create(address: str, names: Iterable[str], partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    for future in admin.create_topics([NewTopic(name, partitions, 1) for name in names]).values():
        future.result(WAIT_SECONDS)


def delete(address: str, names: list[str]) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    for future in admin.delete_topics(names).values():
        future.result(WAIT_SECONDS)


def measure(
    work: str, address: str, seconds: float, message_bytes: int, topic: str, messages: int, partitions: int
) -> dict[str, float]:
    if work == "consume":
        return {"": consume(address, topic, messages)}
    if work == "produce":
        create(address, [topic], partitions)
        rate = produce(address, [topic], seconds, message_bytes)
        delete(address, [topic])
        return {"": rate}
    rates = []
    for topics in (1, TOPICS):
        names = [f"{topic}-{topics}-{number}" for number in range(topics)]
        create(address, names, TOPIC_QUEUES)
        rates.append(produce(address, names, seconds, message_bytes))
        delete(address, names)
    return {"1 topic": rates[0], f"{TOPICS} topics": rates[1], "share": rates[1] / rates[0]}


if __name__ == "__main__":
    asked, address, seconds, size, topic, messages, partitions = sys.argv[1:]
    found = measure(asked, address, float(seconds), int(size), topic, int(messages), int(partitions))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
