"""The work of `batched.py` and `single.py` at a Kafka, through confluent-kafka: what `millpond bench --compare` runs.

Its client is librdkafka, whose threads are C; calls block, so whoever has an event loop runs them in a thread.
Settings are those that its documentation names for throughput, or for latency where that is measured.

    produce   acks=1, batches of 1 MB, linger 5 ms
    consume   a group; `consume(1000)`, the position committed after each, without waiting
    single    a message a request, 64 of them under way
    latency   no linger; from when a message was due to when the consumer has it
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

from millpond.client.load.batched import SLICE, Report, bodies
from millpond.client.load.figures import Rate, Single, Times
from millpond.core.clock import Clock
from millpond.core.errors import StartupError

ADDRESS = "127.0.0.1:9092"
ANSWER_SECONDS = 5.0  # until it says what it is
IDLE_SECONDS = 30.0  # nothing arrives for so long: something is wrong
UNDER_WAY = 64
FETCH = 1000
POLL_SECONDS = 0.1
PRODUCE = {"acks": 1, "linger.ms": 5, "batch.size": 1_000_000, "queue.buffering.max.messages": 500_000}
ONE_EACH = {
    "acks": 1,
    "linger.ms": 0,
    "batch.num.messages": 1,
    "sticky.partitioning.linger.ms": 0,
    "max.in.flight.requests.per.connection": UNDER_WAY,
}
AT_ONCE = {"acks": 1, "linger.ms": 0}
CONSUME = {"auto.offset.reset": "earliest", "enable.auto.commit": False, "queued.min.messages": 500_000}


class Kafka:
    """A Kafka at `address` (host:port). Every method blocks, and raises StartupError with a remedy when it fails;
    `end` makes those that run return soon."""

    def __init__(self, address: str, clock: Clock) -> None:
        self.address = address
        self._clock = clock
        self._ended = threading.Event()
        self._refused: list[str] = []
        self._library = _library()
        self._common: dict[str, Any] = {
            "bootstrap.servers": address,
            "logger": logging.getLogger("millpond.load.kafka"),
            "error_cb": lambda error: None,  # it tries again by itself; what fails for good is raised
            "socket.timeout.ms": 10_000,
        }
        self._admin = self._library.admin.AdminClient({"bootstrap.servers": address, "log_level": 0})

    def check(self) -> None:
        """Raises StartupError when nothing that speaks Kafka's protocol answers there."""
        try:
            self._admin.list_topics(timeout=ANSWER_SECONDS)
        except self._library.KafkaException as error:
            raise StartupError(
                f"no Kafka answers at {self.address}", "start it there, or name another with --compare kafka=HOST:PORT"
            ) from error

    def create(self, topic: str, partitions: int, flushed: bool) -> None:
        """`flushed`: every message is fsynced before it is answered, as in a topic of durability `flush`."""
        config = {"flush.messages": "1"} if flushed else {}
        self._managed(self._admin.create_topics([self._library.admin.NewTopic(topic, partitions, 1, config=config)]))

    def delete(self, topic: str) -> None:
        self._managed(self._admin.delete_topics([topic]))

    def _managed(self, asked: dict[str, Any]) -> None:
        for future in asked.values():
            try:
                future.result(IDLE_SECONDS)
            except self._library.KafkaException as error:
                raise self._failed(error.args[0].str()) from error

    def end(self) -> None:
        self._ended.set()

    # -- work --------------------------------------------------------------------------------------------------

    def produce(self, topic: str, message_bytes: int, seconds: float, report: Report) -> Rate:
        """As fast as it goes; until all are acknowledged."""
        producer = self._producer(PRODUCE)
        source = cycle(bodies(message_bytes))
        begin, sent = self._clock.monotonic(), 0
        while self._clock.monotonic() - begin < seconds and not self._ended.is_set():
            for body in islice(source, SLICE):
                self._send(producer, topic, body)
            sent += SLICE
            producer.poll(0)
            report(sent)
        self._flush(producer)
        return Rate(sent, message_bytes, self._clock.monotonic() - begin)

    def consume(self, topic: str, group: str, count: int, message_bytes: int, report: Report) -> Rate:
        """`count` messages from the beginning, each body looked at; from when the first ones have come: joining a
        group takes seconds."""
        consumer = self._consumer(group, CONSUME)
        consumer.subscribe([topic])
        taken = size = 0
        begin = last = self._clock.monotonic()
        try:
            while taken < count and not self._ended.is_set():
                messages = consumer.consume(FETCH, POLL_SECONDS)
                now = self._clock.monotonic()
                if not messages:
                    if now - last > IDLE_SECONDS:
                        break
                    continue
                begin = now if not taken else begin
                for message in messages:
                    size += len(self._body(message))
                consumer.commit(asynchronous=True)
                taken, last = taken + len(messages), self._clock.monotonic()
                report(taken)
        finally:
            consumer.close()
        return Rate(taken, size // max(1, taken), last - begin)

    def single(self, topic: str, message_bytes: int, seconds: float, report: Report) -> Single:
        """A message a request, UNDER_WAY at a time; each answer is followed by the next request."""
        producer = self._producer(ONE_EACH)
        body = bodies(message_bytes, 1)[0]
        times: list[float] = []
        under_way = 0

        def answered(began: float) -> Callable[[Any, Any], None]:
            def note(error: Any, _message: Any) -> None:
                nonlocal under_way
                under_way -= 1
                self._note(error)
                times.append(self._clock.monotonic() - began)

            return note

        begin = self._clock.monotonic()
        while self._clock.monotonic() - begin < seconds and not self._ended.is_set():
            while under_way < UNDER_WAY:
                producer.produce(topic, body, on_delivery=answered(self._clock.monotonic()))
                under_way += 1
            producer.poll(POLL_SECONDS)
            report(len(times))
        self._flush(producer)
        took = self._clock.monotonic() - begin
        return Single(Rate(len(times), message_bytes, took), Times.of(times), 0, UNDER_WAY)

    def latency(
        self, topic: str, group: str, message_bytes: int, seconds: float, per_second: int, report: Report
    ) -> Times:
        """As `batched.latency`: a message is due at a fixed time, and its time counts from then."""
        total = int(seconds * per_second)
        producer = self._producer(AT_ONCE)
        consumer = self._consumer(group, {**CONSUME, "auto.offset.reset": "latest"})
        consumer.subscribe([topic])
        due: dict[bytes, float] = {}
        took: list[float] = []
        over = threading.Event()

        def receive() -> None:
            while len(took) < total and not over.is_set():
                message = consumer.poll(POLL_SECONDS)
                began = due.pop(self._body(message)[:8], None) if message is not None else None
                if began is not None:
                    took.append(self._clock.monotonic() - began)
                    report(len(took))

        self._first_round(producer, consumer, topic)
        receiving = threading.Thread(target=receive, name="consumer", daemon=True)
        receiving.start()
        begin = self._clock.monotonic()
        for number in range(total):
            at = begin + number / per_second
            if self._ended.wait(max(0.0, at - self._clock.monotonic())):
                break
            name = b"%08d" % number
            due[name] = at
            self._send(producer, topic, name.ljust(message_bytes, b"x"))
            producer.poll(0)
        self._flush(producer)
        receiving.join(0.0 if self._ended.is_set() else IDLE_SECONDS)
        over.set()
        receiving.join()
        consumer.close()
        return Times.of(took)

    def _first_round(self, producer: Any, consumer: Any, topic: str) -> None:
        """Send until something is received: from then on the group stands at the end."""
        begin = self._clock.monotonic()
        while self._clock.monotonic() - begin < IDLE_SECONDS and not self._ended.is_set():
            self._send(producer, topic, b"warm")
            producer.poll(0)
            if consumer.poll(POLL_SECONDS) is not None:
                return
        if not self._ended.is_set():
            raise self._failed("its consumer receives nothing")

    # -- client ------------------------------------------------------------------------------------------------

    def _producer(self, settings: dict[str, Any]) -> Any:
        self._refused.clear()
        return self._library.Producer({**self._common, **settings})

    def _consumer(self, group: str, settings: dict[str, Any]) -> Any:
        return self._library.Consumer({**self._common, "group.id": group, **settings})

    def _send(self, producer: Any, topic: str, body: bytes) -> None:
        while not self._ended.is_set():
            try:
                producer.produce(topic, body, on_delivery=self._on_delivery)
                return
            except BufferError:  # its queue is full
                producer.poll(POLL_SECONDS)

    def _on_delivery(self, error: Any, _message: Any) -> None:
        self._note(error)

    def _note(self, error: Any) -> None:
        if error is not None and not self._refused:
            self._refused.append(error.str())

    def _flush(self, producer: Any) -> None:
        left = producer.flush(0.0 if self._ended.is_set() else IDLE_SECONDS)
        if self._ended.is_set():
            return
        if left:
            raise self._failed(f"{left} messages were not acknowledged within {IDLE_SECONDS:.0f} s")
        if self._refused:
            raise self._failed(self._refused[0])

    def _body(self, message: Any) -> bytes:
        if message.error() is not None:
            raise self._failed(message.error().str())
        body: bytes = message.value()
        return body

    def _failed(self, why: str) -> StartupError:
        return StartupError(f"Kafka at {self.address}: {why}", "see its log")


def _library() -> Any:
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise StartupError(
            "comparing with Kafka needs the package confluent-kafka, which is not installed",
            "pip install 'millpond[kafka]'",
        ) from error
    return confluent_kafka
