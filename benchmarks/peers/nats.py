"""NATS JetStream, file storage: one server, by a small program on its own Go client (`nats_tool`): its command line
tool is no package."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from benchmarks.children import Place, ToolFailed, free_port
from benchmarks.ours import STORED_PER_SECOND
from benchmarks.peers import fetch
from benchmarks.peers.peer import Figures, Peer, Work

TOOL = Path(__file__).parent / "nats_tool"
SERVER = "github.com/nats-io/nats-server/v2"
ALWAYS = "sync_interval always"


class Nats(Peer):
    key = "nats"
    title = "NATS JetStream"
    version = "2.15.2"
    servers = ("", ALWAYS)
    unfair = (
        "To NATS: it takes each message as one of its own, and fsyncs each of them when asked to, where ours fsyncs "
        "groups of them. To us: a compiled client and a binary protocol; its stream has no queues, groups or tenants."
    )

    async def fetch(self) -> None:
        self._bin = await fetch.go("nats", TOOL, [SERVER, "."], self.tell)

    async def start(self, here: Place, server: str) -> None:
        self._here, port = here, free_port()
        self._url = f"nats://127.0.0.1:{port}"
        config = here.folder / "nats.conf"
        sync = "  sync_interval: always\n" if server == ALWAYS else ""
        config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{\n  store_dir: "{here.folder}/nats"\n{sync}}}\n')
        await here.serve(str(self._bin / "nats-server"), "-c", str(config), port=port, name="nats-server")

    def works(self, server: str) -> list[Work]:
        if server == ALWAYS:
            return [
                Work("batched produce, flush", partial(self._measure, "publish")),
                Work("single requests, flush", partial(self._measure, "single")),
                Work("latency, flush", partial(self._measure, "latency")),
            ]
        return [
            Work("batched produce, memory", partial(self._measure, "publish")),
            Work("single requests, memory", partial(self._measure, "single")),
            Work("lease + ack", partial(self._measure, "acked")),
            Work("latency, memory", partial(self._measure, "latency")),
        ]

    async def _measure(self, work: str) -> Figures:
        setup = self.setup
        printed = await self._here.run(
            str(self._bin / "nats_tool"), "-url", self._url, "-work", work, "-seconds", str(setup.seconds),
            "-bytes", str(setup.message_bytes), "-rate", str(setup.per_second),
            "-messages", str(int(STORED_PER_SECOND["lease"] * setup.seconds)),
        )  # fmt: skip
        return figures(printed)


def figures(printed: str) -> Figures:
    """What nats_tool says in its last line."""
    try:
        return msgspec.json.decode(printed.splitlines()[-1], type=dict[str, float])
    except (IndexError, msgspec.DecodeError) as error:
        raise ToolFailed(f"nats_tool said: {printed[-500:]}") from error


PEER = Nats
