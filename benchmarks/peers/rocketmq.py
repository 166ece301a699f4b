"""Apache RocketMQ: a name server and a broker, by its own benchmark examples.

The examples print a rate over the last nine seconds, from the tenth on, and never end; what they print at the 15th is
taken, so that five seconds of the JVM's compiling are left out. They write up to a gigabyte a second; the broker
removes what it has written, but for the last files, once a second.
"""

from __future__ import annotations

import re
from itertools import count

from benchmarks.children import Place, ToolFailed, free_port
from benchmarks.peers import fetch
from benchmarks.peers.peer import Figures, Peer, Work

VERSION = "5.5.0"
ARTIFACTS = [f"org.apache.rocketmq:rocketmq-{part}:{VERSION}" for part in ("namesrv", "broker", "tools", "example")]
PACKAGE = "org.apache.rocketmq"
OPENED = (
    "--add-opens=java.base/java.lang=ALL-UNNAMED", "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
)  # fmt: skip
SYNC, CONSUME = "SYNC_FLUSH", "consumed"
BATCH = 1000
BATCH_THREADS, SINGLE_THREADS, CONSUMER_THREADS = 8, 64, 20
REPORT_MS = "1000"
KNOWN_TRIES = 20
REPORTS = 6  # the last of them counts
RATE = re.compile(r"(?:Send MPS|Send TPS|Consume TPS): (\d+)")
FAILED = re.compile(r"(?:Send Failed|Send Message Failed|Consume Fail): (\d+)")
EVERY_HOUR = ";".join(f"{hour:02}" for hour in range(24))


class RocketMq(Peer):
    key = "rocketmq"
    title = "RocketMQ"
    version = VERSION
    servers = ("", SYNC, CONSUME)
    unfair = (
        "To RocketMQ: its examples are a new JVM for each round, which compiles itself during it; "
        "broker, name server and client share two cores. To us: a batch there is one call with 1,000 messages made "
        "beforehand, where ours is one call a message; its rounds last 15 seconds, whatever ours do; its consumer "
        "leases nothing: it commits offsets."
    )

    async def fetch(self) -> None:
        self._jars = await fetch.maven("rocketmq", ARTIFACTS, self.tell)

    async def start(self, here: Place, server: str) -> None:
        self._here = here
        self._names = count()
        self._filled = ""
        names, broker = free_port(), free_port()
        self._broker = broker
        self._name_server = f"127.0.0.1:{names}"
        self._env = {"ROCKETMQ_HOME": str(here.folder), "NAMESRV_ADDR": self._name_server}
        (here.folder / "namesrv.conf").write_text(f"listenPort={names}\n")
        (here.folder / "broker.conf").write_text(_settings(here, server, broker))
        await here.serve(
            *self._java("-Xmx512m"), f"{PACKAGE}.namesrv.NamesrvStartup", "-c", str(here.folder / "namesrv.conf"),
            env=self._env, port=names, name="namesrv",
        )  # fmt: skip
        await here.serve(
            *self._java("-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=1g"), f"{PACKAGE}.broker.BrokerStartup", "-c",
            str(here.folder / "broker.conf"), "-n", self._name_server, env=self._env, port=broker, name="broker",
        )  # fmt: skip

    def works(self, server: str) -> list[Work]:
        if server == CONSUME:
            return [Work("lease + ack", self._consume)]
        durability = "flush" if server == SYNC else "memory"
        return [
            Work(f"batched produce, {durability}", self._batches),
            Work(f"single requests, {durability}", self._singles),
        ]

    def _java(self, *options: str) -> list[str]:
        folder = self._here.folder
        return self.java(
            self._jars, *OPENED, f"-Duser.home={folder}", f"-Drocketmq.client.logRoot={folder}/logs", *options
        )

    async def _topic(self) -> str:
        """A new topic; a broker that has just started is not known to the name server for a moment."""
        name = f"bench{next(self._names)}"
        for _ in range(KNOWN_TRIES):
            if f"create topic to 127.0.0.1:{self._broker} success" in await self._made(name):
                return name
        raise ToolFailed("the broker is not known to the name server")

    async def _made(self, name: str) -> str:
        queues = str(self.setup.queues)
        return await self._here.prepare(
            *self._java("-Xmx256m"), f"{PACKAGE}.tools.command.MQAdminStartup", "updateTopic", "-n", self._name_server,
            "-c", "DefaultCluster", "-t", name, "-r", queues, "-w", queues, env=self._env,
        )  # fmt: skip

    async def _example(self, name: str, *arguments: str) -> Figures:
        printed = await self._here.run_until(
            *self._java("-Xmx1g"), f"{PACKAGE}.example.benchmark.{name}", "-n", self._name_server, "-ri", REPORT_MS,
            *arguments, wanted=" TPS: ", count=REPORTS, env=self._env,
        )  # fmt: skip
        return {"": rate(printed)}

    async def _batches(self) -> Figures:
        size = str(self.setup.message_bytes)
        return await self._example(
            "BatchProducer", "-t", await self._topic(), "-w", str(BATCH_THREADS), "-s", size, "-b", str(BATCH)
        )

    async def _singles(self) -> Figures:
        size = str(self.setup.message_bytes)
        return await self._example("Producer", "-t", await self._topic(), "-w", str(SINGLE_THREADS), "-s", size)

    async def _consume(self) -> Figures:
        if not self._filled:
            self._filled = await self._topic()
            await self._example(
                "BatchProducer", "-t", self._filled, "-w", str(BATCH_THREADS), "-s", str(self.setup.message_bytes),
                "-b", str(BATCH),
            )  # fmt: skip
        group = f"group{next(self._names)}"
        return await self._example("Consumer", "-t", self._filled, "-w", str(CONSUMER_THREADS), "-g", group)


def _settings(here: Place, server: str, port: int) -> str:
    clean = "" if server == CONSUME else f"deleteWhen={EVERY_HOUR}\nfileReservedTime=0\ncleanResourceInterval=1000\n"
    return (
        "brokerClusterName=DefaultCluster\nbrokerName=bench\nbrokerId=0\nbrokerIP1=127.0.0.1\n"
        f"listenPort={port}\nhaListenPort={free_port()}\n"
        f"storePathRootDir={here.folder}/store\nstorePathCommitLog={here.folder}/store/commitlog\n"
        f"flushDiskType={SYNC if server == SYNC else 'ASYNC_FLUSH'}\ndiskMaxUsedSpaceRatio=95\n"
        f"autoCreateTopicEnable=false\ndeletePhysicFilesInterval=1\n{clean}"
    )


def rate(printed: str) -> float:
    """Messages a second of the last line with a rate; of a batch that is MPS, TPS being batches."""
    line = next((line for line in reversed(printed.splitlines()) if " TPS: " in line), "")
    found = RATE.findall(line)
    if not found:
        raise ToolFailed(f"the example said: {printed[-500:]}")
    if any(int(count) for count in FAILED.findall(line)) and not int(found[-1]):
        raise ToolFailed(f"nothing but failures: {line}")
    return float(found[-1])


PEER = RocketMq
