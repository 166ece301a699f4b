"""Apache Kafka: one KRaft node, by its own performance tools; and confluent-kafka (librdkafka) from Python against it.

The tuned producer is the one of Kafka's own documentation for throughput: acks=1, 1 MB batches, 5 ms linger. Its bodies
come from a file of 1,000, as ours come from a list, so that making them is no part of a round; and in a work of its own
from the tool itself, which is how its figures are usually given.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from benchmarks.children import Place, ToolFailed, free_port
from benchmarks.ours import ONE_AT_A_TIME_PER_SECOND, STORED_PER_SECOND
from benchmarks.peers import fetch
from benchmarks.peers.fetch import CannotBeHad
from benchmarks.peers.peer import Figures, Paced, Peer, Work
from millpond.client.load import batched

ARTIFACTS = [
    "org.apache.kafka:kafka_2.13:4.1.0",
    "org.apache.kafka:kafka-tools:4.1.0",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.1",
]
TOOLS = "org.apache.kafka.tools"
TUNED = ("acks=1", "batch.size=1000000", "linger.ms=5", "buffer.memory=134217728")
SINGLE = (
    "acks=1", "batch.size=1", "linger.ms=0", "max.in.flight.requests.per.connection=64", "enable.idempotence=false",
)  # fmt: skip
WARM_FACTOR = 2  # its rounds are so much longer than ours, for a new JVM to be warm in most of them
SINGLE_PARTITIONS = 8
FLUSHED = "flush.messages=1"
CONFLUENT = "confluent-kafka"
PRODUCED = re.compile(r"^(\d+) records sent, ([\d.]+) records/sec", re.M)
QUANTILES = re.compile(r"Percentiles: 50th = (\d+), 99th = (\d+), 99\.9th = (\d+)")
AVERAGE = re.compile(r"Avg latency: ([\d.]+) ms")


class Kafka(Peer):
    key = "kafka"
    title = "Kafka"
    version = "4.1.0"
    unfair = (
        "To Kafka: its tools are a new JVM for each round, which compiles itself during the first seconds (so its "
        "producer's rounds are twice as long as ours); its broker and its client share two cores with each other. "
        "Where its producer makes the bodies, that takes more of it than sending them. EndToEndLatency rounds "
        "quantiles down to whole milliseconds and sends one message after the other, as fast as that goes, where ours "
        "keeps to a fixed rate and counts every stall; `one at a time` both do the same. To us: Kafka's binary "
        "protocol, not HTTP; its single requests are pipelined by 64 on one connection, and a request may hold one "
        "record of each of 8 partitions."
    )

    async def fetch(self) -> None:
        self._jars = await fetch.maven("kafka", ARTIFACTS, self.tell)

    async def start(self, here: Place, server: str) -> None:
        self._here = here
        self._port, controller = free_port(), free_port()
        self._address = f"127.0.0.1:{self._port}"
        self._names = count()
        self._paced: dict[str, Paced] = {}
        self._stored: dict[str, tuple[str, int]] = {}
        self._payload = here.folder / "payload"
        self._payload.write_bytes(b"\n".join(batched.bodies(self.setup.message_bytes)))
        properties = here.folder / "server.properties"
        properties.write_text(_properties(self._port, controller, here.folder / "kafka"))
        (here.folder / "log4j2.properties").write_text("rootLogger.level = error\n")
        identity = (await here.prepare(*self.java(self._jars), "kafka.tools.StorageTool", "random-uuid")).split()[-1]
        await here.prepare(
            *self.java(self._jars), "kafka.tools.StorageTool", "format", "-t", identity, "-c", str(properties)
        )
        heap = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20")  # as its start script sets it
        await here.serve(*self.java(self._jars, *heap), "kafka.Kafka", str(properties), port=self._port, name="kafka")

    def works(self, server: str) -> list[Work]:
        return [
            Work("batched produce, memory", partial(self._produce, "memory", TUNED)),
            Work("batched produce, memory, bodies made", partial(self._produce, "made", TUNED, bodies="made")),
            Work("batched produce, flush", partial(self._produce, "flush", TUNED, FLUSHED)),
            Work("single requests, flush", partial(self._produce, "single", SINGLE, FLUSHED, SINGLE_PARTITIONS)),
            Work("direct read, batches", self._consume),
            Work("latency, memory", partial(self._latency, "")),
            Work("latency, flush", partial(self._latency, FLUSHED)),
            Work("latency, one at a time, memory", partial(self._latency, "")),
            Work("latency, one at a time, flush", partial(self._latency, FLUSHED)),
            Work("batched produce, memory", partial(self._confluent, "produce"), CONFLUENT),
            Work("direct read, messages", partial(self._confluent, "consume"), CONFLUENT),
            Work("many topics", partial(self._confluent, "topics"), CONFLUENT),
        ]

    # -- topics -----------------------------------------------------------------------------------------------

    async def _topic(self, config: str = "", partitions: int = 0) -> str:
        name = f"bench-{next(self._names)}"
        wanted = ["--create", "--topic", name, "--partitions", str(partitions or self.setup.queues)]
        await self._topics(*wanted, *(("--config", config) if config else ()))
        return name

    async def _topics(self, *arguments: str) -> None:
        await self._here.prepare(
            *self.java(self._jars), f"{TOOLS}.TopicCommand", "--bootstrap-server", self._address, *arguments
        )

    async def _filled(self, kind: str) -> tuple[str, int]:
        wanted = int(STORED_PER_SECOND[kind] * self.setup.seconds)
        if self._stored.get(kind, ("", 0))[1] < wanted:
            topic = await self._topic()
            await self._send(topic, wanted, TUNED, "file")
            self._stored[kind] = topic, wanted
        return self._stored[kind][0], wanted

    # -- works ------------------------------------------------------------------------------------------------

    async def _send(self, topic: str, messages: int, settings: tuple[str, ...], bodies: str) -> float:
        made = ("--record-size", str(self.setup.message_bytes))
        printed = await self._here.run(
            *self.java(self._jars, "-Xmx512m"), f"{TOOLS}.ProducerPerformance", "--topic", topic, "--num-records",
            str(messages), *(made if bodies == "made" else ("--payload-file", str(self._payload))),
            "--throughput", "-1", "--producer-props",
            f"bootstrap.servers={self._address}", *settings,
        )  # fmt: skip
        return produced(printed)

    async def _produce(
        self, kind: str, settings: tuple[str, ...], config: str = "", partitions: int = 0, bodies: str = "file"
    ) -> Figures:
        paced = self._paced.setdefault(kind, Paced(1000 if kind == "single" else 50_000))
        topic = await self._topic(config, partitions)
        rate = await self._send(topic, paced.messages(WARM_FACTOR * self.setup.seconds), settings, bodies)
        await self._topics("--delete", "--topic", topic)
        paced.learn(rate)
        return {"": rate}

    async def _consume(self) -> Figures:
        topic, messages = await self._filled("read")
        printed = await self._here.run(
            *self.java(self._jars, "-Xmx512m"), f"{TOOLS}.ConsumerPerformance", "--bootstrap-server", self._address,
            "--topic", topic, "--messages", str(messages), "--hide-header",
        )  # fmt: skip
        return {"": consumed(printed)}

    async def _latency(self, config: str) -> Figures:
        topic = await self._topic(config, 1)
        messages = str(int(ONE_AT_A_TIME_PER_SECOND * self.setup.seconds))
        printed = await self._here.run(
            *self.java(self._jars, "-Xmx512m"), f"{TOOLS}.EndToEndLatency", self._address, topic, messages, "1",
            str(self.setup.message_bytes),
        )  # fmt: skip
        return latency(printed)

    async def _confluent(self, work: str) -> Figures:
        if importlib.util.find_spec("confluent_kafka") is None:
            raise CannotBeHad("confluent-kafka is not installed: `make bench PEERS=kafka` installs it")
        topic, messages = await self._filled("read") if work == "consume" else ("", 0)
        printed = await self._here.run(
            sys.executable, "-m", "benchmarks.peers.confluent", work, self._address, str(self.setup.seconds),
            str(self.setup.message_bytes), topic or f"confluent-{next(self._names)}", str(messages),
            str(self.setup.queues), env={"PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        figures: dict[str, float] = msgspec.json.decode(printed.splitlines()[-1], type=dict[str, float])
        return figures


def _properties(port: int, controller: int, data: Path) -> str:
    return (
        "process.roles=broker,controller\nnode.id=1\n"
        f"controller.quorum.voters=1@127.0.0.1:{controller}\n"
        f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}\n"
        "controller.listener.names=CONTROLLER\n"
        f"log.dirs={data}\n"
        "offsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\n"
        "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
        "group.initial.rebalance.delay.ms=0\nlog.segment.delete.delay.ms=1000\n"
    )


def produced(printed: str) -> float:
    """Records a second of the whole run: the last line of ProducerPerformance."""
    found = PRODUCED.findall(printed)
    if not found:
        raise ToolFailed(f"ProducerPerformance said: {printed[-500:]}")
    return float(found[-1][1])


def consumed(printed: str) -> float:
    """Records a second of ConsumerPerformance, without the time it took to join the group.

    start, end, MB, MB/s, records, records/s, rebalance ms, fetch ms, fetch MB/s, fetch records/s
    """
    for line in reversed(printed.splitlines()):
        columns = [column.strip() for column in line.split(",")]
        if len(columns) == 10:
            return float(columns[9])
    raise ToolFailed(f"ConsumerPerformance said: {printed[-500:]}")


def latency(printed: str) -> Figures:
    """Milliseconds of EndToEndLatency, which rounds quantiles down to whole ones: a p50 of 0 is told as its average."""
    quantiles, average = QUANTILES.search(printed), AVERAGE.search(printed)
    if quantiles is None or average is None:
        raise ToolFailed(f"EndToEndLatency said: {printed[-500:]}")
    return {"p50": float(quantiles[1]) or float(average[1]), "p99": float(quantiles[2])}


PEER = Kafka
