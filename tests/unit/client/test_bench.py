"""`millpond bench`: what is measured in which order, what is said, and a Kafka that is not there or fails."""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from millpond.client.command import bench, bench_table
from millpond.client.command.bench_systems import BATCHED, CONSUME, LATENCY, READ, SINGLE, Millpond, OtherKafka, Plan
from millpond.client.connection import Connection
from millpond.client.load import kafka
from millpond.client.load.figures import Rate, Single, Times
from millpond.core.clock import SystemClock
from millpond.core.errors import StartupError

from .test_command import invoke

PLAN = Plan([BATCHED, LATENCY], 0.01, 100, 2, "flush", 1000)


class Message:
    def __init__(self, body: bytes, error: Any = None) -> None:
        self._body, self._error = body, error

    def value(self) -> bytes:
        return self._body

    def error(self) -> Any:
        return self._error


class Refusal:
    def str(self) -> str:
        return "it is full"


class _AdminClient:
    def __init__(self, fake: FakeKafka, settings: dict[str, Any]) -> None:
        self._fake = fake

    def list_topics(self, timeout: float) -> None:
        if not self._fake.up:
            raise self._fake.KafkaException("down")

    def create_topics(self, asked: list[tuple[str, int, dict[str, str]]]) -> dict[str, Any]:
        for name, partitions, config in asked:
            self._fake.topics[name] = (partitions, config)
        return {name: SimpleNamespace(result=lambda seconds: None) for name, _, _ in asked}

    def delete_topics(self, names: list[str]) -> dict[str, Any]:
        for name in names:
            del self._fake.topics[name]
        return {name: SimpleNamespace(result=lambda seconds: None) for name in names}


class _Producer:
    def __init__(self, fake: FakeKafka, settings: dict[str, Any]) -> None:
        self._fake = fake
        self._fake.settings.append(settings)
        self._waiting: deque[tuple[bytes, Any]] = deque()
        self._lock = threading.Lock()

    def produce(self, topic: str, body: bytes, on_delivery: Any) -> None:
        if len(self._waiting) >= 10_000:
            raise BufferError
        self._waiting.append((body, on_delivery))
        self._fake.most_under_way = max(self._fake.most_under_way, len(self._waiting))

    def poll(self, seconds: float) -> None:
        while self._waiting:
            body, on_delivery = self._waiting.popleft()
            self._fake.log.append(body)
            on_delivery(Refusal() if self._fake.refuse else None, None)

    def flush(self, seconds: float) -> int:
        self.poll(0)
        return 0


class _Consumer:
    def __init__(self, fake: FakeKafka, settings: dict[str, Any]) -> None:
        self._fake = fake
        self._fake.settings.append(settings)
        self._at = 0 if settings["auto.offset.reset"] == "earliest" else len(self._fake.log)

    def subscribe(self, topics: list[str]) -> None:
        pass

    def consume(self, count: int, seconds: float) -> list[Message]:
        found = self._fake.log[self._at : self._at + count]
        self._at += len(found)
        return [Message(body) for body in found]

    def poll(self, seconds: float) -> Message | None:
        found = self.consume(1, seconds)
        return found[0] if found else None

    def commit(self, asynchronous: bool) -> None:
        pass

    def close(self) -> None:
        pass


class FakeKafka:
    """confluent_kafka in memory: one topic, whose messages are there as soon as they are polled for."""

    def __init__(self) -> None:
        self.up = True
        self.refuse = False
        self.log: list[bytes] = []
        self.topics: dict[str, tuple[int, dict[str, str]]] = {}
        self.under_way = self.most_under_way = 0
        self.settings: list[dict[str, Any]] = []
        self.KafkaException = type("KafkaException", (Exception,), {})
        self.Producer, self.Consumer = partial(_Producer, self), partial(_Consumer, self)
        self.admin = SimpleNamespace(
            AdminClient=partial(_AdminClient, self),
            NewTopic=lambda name, partitions, copies, config: (name, partitions, config),
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeKafka:
    fake = FakeKafka()
    monkeypatch.setattr(kafka, "_library", lambda: fake)
    return fake


@pytest.fixture
def peer(library: FakeKafka) -> kafka.Kafka:
    return kafka.Kafka("there:1", SystemClock())


def nothing(_done: int) -> None:
    pass


# -- a Kafka ------------------------------------------------------------------------------------------------------


def test_kafka_produces_and_consumes(library: FakeKafka, peer: kafka.Kafka) -> None:
    """Everything that was produced is acknowledged, and comes back once."""
    told: list[int] = []
    made = peer.produce("t", 100, 0.02, told.append)
    assert made.count == len(library.log) == told[-1] > 0
    assert {len(body) for body in library.log} == {100}
    taken = peer.consume("t", "g", made.count, 100, told.append)
    assert (taken.count, taken.message_bytes, told[-1]) == (made.count, 100, made.count)


def test_kafka_single_is_a_message_a_request(library: FakeKafka, peer: kafka.Kafka) -> None:
    """As many requests are under way as other systems have connections, each with one message."""
    found = peer.single("t", 100, 0.02, nothing)
    assert library.most_under_way == kafka.UNDER_WAY == found.connections
    assert library.settings[-1]["batch.num.messages"] == 1
    assert found.rate.count == found.times.count == len(library.log)


def test_kafka_latency_counts_each_message_once(peer: kafka.Kafka) -> None:
    """As many times as messages were due, not those that only open the connections."""
    assert peer.latency("t", "g", 100, 0.05, 1000, nothing).count == 50


def test_kafka_that_refuses(library: FakeKafka, peer: kafka.Kafka) -> None:
    """A message that is not taken is no result, but an error that says why."""
    library.refuse = True
    with pytest.raises(StartupError, match="it is full"):
        peer.produce("t", 100, 0.01, nothing)


def test_kafka_flushes_where_the_topic_does(library: FakeKafka, peer: kafka.Kafka) -> None:
    """Durability `flush` is compared with a topic that fsyncs each message, `memory` with Kafka's own default."""
    peer.create("a", 3, flushed=True)
    peer.create("b", 3, flushed=False)
    assert library.topics == {"a": (3, {"flush.messages": "1"}), "b": (3, {})}


def test_ended_work_returns(peer: kafka.Kafka) -> None:
    """After Ctrl-C what runs in a thread comes to its end, however long it was to take."""
    peer.end()
    assert peer.produce("t", 100, 3600.0, nothing).count == 0
    assert peer.latency("t", "g", 100, 3600.0, 1, nothing).count == 0


# -- the command --------------------------------------------------------------------------------------------------


async def test_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, service: Any) -> None:
    """--compare without confluent-kafka says what to install, before anything is measured."""
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    result = await invoke("bench", "--compare", "kafka", "--url", service.url, "--json")
    assert result.exit_code == 1
    assert "pip install 'millpond[kafka]'" in json.loads(result.stdout)["remedy"]
    assert not service.requests


async def test_kafka_that_is_not_there(library: FakeKafka, service: Any) -> None:
    """--compare with an address where nothing answers names it, and how to name another."""
    library.up = False
    result = await invoke("bench", "--compare", "kafka=127.0.0.1:9", "--url", service.url)
    assert result.exit_code == 1
    assert "127.0.0.1:9" in result.stderr
    assert "kafka=HOST:PORT" in result.stderr
    assert not service.requests


@pytest.mark.parametrize("text", ["rabbit", "kafka=", "kafka=host", "kafka=host:", "kafka=:9092", "kafka=host:port"])
async def test_compare_with_what_cannot_be(text: str) -> None:
    """A wrong --compare is a usage error, but for an address that is left out."""
    if text == "kafka=":
        assert bench.peer_address(text) == kafka.ADDRESS
        return
    with pytest.raises(typer.BadParameter):
        bench.peer_address(text)


def test_what_is_read_is_produced_first() -> None:
    """Kinds that need messages come after the one that makes them, in an order of their own."""
    assert bench.works_of([SINGLE]) == [SINGLE]
    assert bench.works_of([LATENCY, READ])[:2] == [BATCHED, READ]
    assert bench.works_of([CONSUME])[0] == BATCHED


# -- turns --------------------------------------------------------------------------------------------------------


class FakeSystem:
    """Notes what is asked of it; its rates are given."""

    def __init__(self, name: str, asked: list[str], rates: list[float], fails: bool = False) -> None:
        self.name, self._asked, self._rates, self._fails = name, asked, rates, fails

    async def prepare(self) -> None:
        self._asked.append(f"{self.name} prepare")
        if self._fails:
            raise StartupError("no", "none")

    async def measure(self, work: str, plan: Plan, report: Any) -> Any:
        self._asked.append(f"{self.name} {work}")
        report(1)
        rate = self._rates.pop(0)
        return Rate(int(rate), 100, 1.0) if work == BATCHED else Times(1, rate, rate, rate, rate)

    async def clean(self) -> None:
        self._asked.append(f"{self.name} clean")


async def test_systems_take_turns() -> None:
    """Each is warmed; then every work of every round goes from one system to the other; the middle round counts."""
    asked: list[str] = []
    one = FakeSystem("a", asked, [0, 10, 1, 30, 3, 20, 2])
    other = FakeSystem("b", asked, [0, 5, 7, 5, 7, 5, 7])
    async with Connection() as connection:
        with bench.shown_steps(connection, True) as steps:
            found = await bench.measured([one, other], PLAN, 3, steps)
    turn = ["a batched", "b batched", "a latency", "b latency"]
    warm = ["a prepare", "a batched", "b prepare", "b batched"]
    assert asked == [*warm, *turn * 3, "a clean", "b clean"]
    assert found["a"] == {BATCHED: Rate(20, 100, 1.0), LATENCY: Times(1, 2, 2, 2, 2)}


async def test_clean_after_a_failure() -> None:
    """Topics go also when something fails on the way."""
    asked: list[str] = []
    systems = [FakeSystem("a", asked, [0]), FakeSystem("b", asked, [], fails=True)]
    async with Connection() as connection:
        with bench.shown_steps(connection, True) as steps, pytest.raises(StartupError):
            await bench.measured(systems, PLAN, 1, steps)
    assert asked[-2:] == ["a clean", "b clean"]


# -- what is said -------------------------------------------------------------------------------------------------

OURS: bench_table.Figures = {
    BATCHED: Rate(1000, 100, 1.0),
    SINGLE: Single(Rate(500, 100, 1.0), Times(500, 1.0, 2.0, 3.0, 4.0), 0, 64),
    LATENCY: Times(10, 1.0, 2.0, 3.0, 4.0),
}
THEIRS: bench_table.Figures = {
    BATCHED: Rate(250, 100, 1.0),
    SINGLE: Single(Rate(1000, 100, 1.0), Times(500, 2.0, 8.0, 9.0, 9.0), 0, 64),
    LATENCY: Times(10, 0.5, 4.0, 5.0, 6.0),
}


def test_json_of_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of both with what follows from them, ratios of ours to theirs, and what is unfair."""
    bench.tell({Millpond.name: OURS, OtherKafka.name: THEIRS}, PLAN, True, "http://here", "there:1")
    told = json.loads(capsys.readouterr().out)
    assert told["batched"]["per_second"] == 1000
    assert told["kafka"]["address"] == "there:1"
    assert told["kafka"]["latency"]["p99_ms"] == 4.0
    assert told["ratios"] == {
        BATCHED: {"per_second": 4.0},
        SINGLE: {"per_second": 0.5, "p50_ms": 0.5, "p99_ms": 0.25},
        LATENCY: {"p50_ms": 2.0, "p99_ms": 0.5},
    }
    assert len(told["unfair"]) > 3


def test_table_of_a_comparison() -> None:
    """Each measure of each work in a row of its own, with the ratio and which way is better."""
    rows = bench_table.side_by_side(OURS, THEIRS)
    assert [BATCHED, "messages/s", 1000, 250.0, "4.00 x", "more is better"] in rows
    assert [LATENCY, "p99 ms", 2.0, 4.0, "0.50 x", "less is better"] in rows
    assert len(rows) == 6
