"""RabbitMQ: one node from Debian's package, by its own PerfTest. Quorum queues are fsynced, classic ones are not."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.children import Place, ToolFailed, free_port
from benchmarks.ours import STORED_PER_SECOND
from benchmarks.peers import fetch
from benchmarks.peers.peer import Figures, Peer, Work

PERF_TEST = ["com.rabbitmq:perf-test:2.22.1"]
CONFIRMS = "1000"
PREFETCH, ACK_EVERY = "1000", "100"
SENT = re.compile(r"sending rate avg: (\d+) msg/s")
RECEIVED = re.compile(r"receiving rate avg: (\d+) msg/s")
LATENCY = re.compile(r"consumer latency min/median/75th/95th/99th ([\d/]+) (µs|ms)")


class RabbitMq(Peer):
    key = "rabbitmq"
    title = "RabbitMQ"
    version = "3.10 (Debian)"
    unfair = (
        "To RabbitMQ: it takes each message as one of its own, on one queue, and Debian's is not its newest. To us: a "
        "binary protocol, 1,000 messages sent ahead of their confirms, and in the consumer's work 100 a settlement."
    )

    async def fetch(self) -> None:
        self._jars = await fetch.maven("rabbitmq-perf-test", PERF_TEST, self.tell)
        self._root = await fetch.debian("rabbitmq", ["rabbitmq-server"], self.tell)
        _moved(self._root / "usr/lib/erlang")

    async def start(self, here: Place, server: str) -> None:
        self._here, port, mapper = here, free_port(), free_port()
        self._uri = f"amqp://127.0.0.1:{port}"
        self._names = count()
        usr = self._root / "usr"
        erlang = usr / "lib/erlang" if (usr / "lib/erlang").exists() else Path("/usr/lib/erlang")
        env = {
            "HOME": str(here.folder), "PATH": f"{usr}/bin:{usr}/sbin:{os.environ['PATH']}", "ERL_ROOTDIR": str(erlang),
            "ERL_EPMD_PORT": str(mapper), "ERL_EPMD_ADDRESS": "127.0.0.1", "RABBITMQ_NODENAME": "bench@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1", "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()), "RABBITMQ_MNESIA_BASE": f"{here.folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{here.folder}/log", "RABBITMQ_ENABLED_PLUGINS_FILE": f"{here.folder}/plugins",
            "RABBITMQ_CONF_ENV_FILE": f"{here.folder}/none", "RABBITMQ_CONFIG_FILE": f"{here.folder}/rabbitmq",
            "ERL_LIBS": "",
        }  # fmt: skip
        (here.folder / "plugins").write_text("[].\n")
        (here.folder / "rabbitmq.conf").write_text("log.console.level = error\n")
        epmd = next(iter(sorted(erlang.glob("erts-*/bin/epmd"))), Path(shutil.which("epmd") or "epmd"))
        # in the foreground: else the server starts one that goes on for ever
        await here.serve(str(epmd), "-address", "127.0.0.1", "-port", str(mapper), env=env, port=mapper, name="epmd")
        script = next(iter(sorted(usr.glob("lib/rabbitmq/lib/*/sbin/rabbitmq-server"))), None)
        if script is None:
            raise ToolFailed("there is no rabbitmq-server in Debian's package")
        await here.serve(str(script), env=env, port=port, name="rabbitmq-server")

    def works(self, server: str) -> list[Work]:
        return [
            Work("batched produce, memory", partial(self._send, ())),
            Work("batched produce, flush", partial(self._send, ("--quorum-queue",))),
            Work("lease + ack", self._acked),
            Work("latency, flush", self._latency),
        ]

    async def _perf_test(self, *arguments: str) -> str:
        return await self._here.run(
            *self.java(self._jars, "-Xmx512m"), "com.rabbitmq.perf.PerfTest", "--uri", self._uri, "--size",
            str(self.setup.message_bytes), "--auto-delete", "false", *arguments,
        )  # fmt: skip

    def _queue(self) -> tuple[str, ...]:
        return ("--queue", f"bench{next(self._names)}")

    async def _send(self, kind: tuple[str, ...]) -> Figures:
        """A queue is deleted only by its name's end: each round has one of its own, and the node is gone at the end."""
        printed = await self._perf_test(
            *self._queue(), *kind, "--producers", "1", "--consumers", "0", "--confirm", CONFIRMS, "--flag",
            "persistent", "--time", str(max(1, round(self.setup.seconds))),
        )  # fmt: skip
        return {"": average(SENT, printed)}

    async def _acked(self) -> Figures:
        queue, messages = self._queue(), str(int(STORED_PER_SECOND["lease"] * self.setup.seconds / 4))
        common = (*queue, "--quorum-queue")
        await self._perf_test(
            *common, "--producers", "1", "--consumers", "0", "--confirm", CONFIRMS, "--flag", "persistent",
            "--pmessages", messages,
        )  # fmt: skip
        printed = await self._perf_test(
            *common, "--producers", "0", "--consumers", "1", "--qos", PREFETCH, "--multi-ack-every", ACK_EVERY,
            "--cmessages", messages,
        )  # fmt: skip
        return {"": average(RECEIVED, printed)}

    async def _latency(self) -> Figures:
        printed = await self._perf_test(
            *self._queue(), "--quorum-queue", "--producers", "1", "--consumers", "1", "--flag", "persistent", "--rate",
            str(self.setup.per_second), "--time", str(max(1, round(self.setup.seconds))),
        )  # fmt: skip
        return latency(printed)


def _moved(erlang: Path) -> None:
    """Erlang's start scripts name the folder it is meant to be installed in: name the one it was unpacked to."""
    for script in ("erl", "start"):
        path = erlang / "bin" / script
        if path.exists():
            path.write_text(path.read_text().replace("ROOTDIR=/usr/lib/erlang\n", f"ROOTDIR={erlang}\n"))


def average(pattern: re.Pattern[str], printed: str) -> float:
    """PerfTest's average over the whole run."""
    found = pattern.findall(printed)
    if not found:
        raise ToolFailed(f"PerfTest said: {printed[-500:]}")
    return float(found[-1])


def latency(printed: str) -> Figures:
    """Milliseconds: the medians over PerfTest's seconds, of their medians and their 99th percentiles."""
    found = LATENCY.findall(printed)
    if not found:
        raise ToolFailed(f"PerfTest said: {printed[-500:]}")
    values, unit = found[-1]
    each = [float(value) for value in values.split("/")]
    scale = 1.0 if unit == "ms" else 1000.0
    return {"p50": each[1] / scale, "p99": each[4] / scale}


PEER = RabbitMq
