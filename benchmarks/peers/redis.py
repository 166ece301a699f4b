"""Redis streams: one server, by redis-benchmark: XADD of one field."""

from __future__ import annotations

import csv
from functools import partial

from benchmarks.children import Place, ToolFailed, free_port
from benchmarks.peers import fetch
from benchmarks.peers.peer import Figures, Paced, Peer, Work
from millpond.client.load import batched

FLUSHED = "appendfsync always"
CONNECTIONS, PIPELINE = 50, 64
STREAM = "bench"


class Redis(Peer):
    key = "redis"
    title = "Redis streams"
    version = "7.0 (Debian)"
    servers = ("", FLUSHED)
    unfair = (
        "To us: it holds everything in memory, without appendfsync nothing is on a disk, and its protocol and client "
        "are the least there can be: 50 connections, in the batched work with 64 commands under way on each. To "
        "Redis: one thread does its work, and shares two cores with its client."
    )

    async def fetch(self) -> None:
        self._root = await fetch.debian("redis", ["redis-server", "redis-tools"], self.tell)
        self._env = {"LD_LIBRARY_PATH": ":".join(sorted({str(at.parent) for at in self._root.rglob("*.so.*")}))}

    async def start(self, here: Place, server: str) -> None:
        self._here, self._port = here, free_port()
        self._paced: dict[int, Paced] = {}
        flushed = "yes" if server == FLUSHED else "no"
        await here.serve(
            str(self._root / "usr/bin/redis-server"), "--bind", "127.0.0.1", "--port", str(self._port), "--save", "",
            "--dir", str(here.folder), "--appendonly", flushed, "--appendfsync", "always",
            "--auto-aof-rewrite-percentage", "0", env=self._env, port=self._port, name="redis-server",
        )  # fmt: skip

    def works(self, server: str) -> list[Work]:
        durability = "flush" if server == FLUSHED else "memory"
        return [
            Work(f"batched produce, {durability}", partial(self._add, PIPELINE)),
            Work(f"single requests, {durability}", partial(self._add, 1)),
        ]

    def short(self) -> dict[str, str]:
        tool = str(self._root / "usr/bin/redis-benchmark")
        return {
            **super().short(),
            tool: "redis-benchmark",
            batched.bodies(self.setup.message_bytes)[0].decode(): "$BODY",
        }

    async def _add(self, pipeline: int) -> Figures:
        paced = self._paced.setdefault(pipeline, Paced(20_000))
        printed = await self._here.run(
            str(self._root / "usr/bin/redis-benchmark"), "-p", str(self._port), "-c", str(CONNECTIONS), "-P",
            str(pipeline), "-n", str(paced.messages(self.setup.seconds)), "--csv", "XADD", STREAM, "*", "body",
            batched.bodies(self.setup.message_bytes)[0].decode(), env=self._env,
        )  # fmt: skip
        rate = requests(printed)
        paced.learn(rate)
        await self._here.prepare(
            str(self._root / "usr/bin/redis-cli"), "-p", str(self._port), "UNLINK", STREAM, env=self._env
        )
        return {"": rate}


def requests(printed: str) -> float:
    """Requests a second: the second column of redis-benchmark's last row."""
    rows = [row for row in csv.reader(printed.splitlines()) if len(row) > 2]
    try:
        return float(rows[-1][1])
    except (IndexError, ValueError) as error:
        raise ToolFailed(f"redis-benchmark said: {printed[-500:]}") from error


PEER = Redis
