"""ElasticMQ (SQS over HTTP, in memory): one message a request, by the tool that measures our single requests."""

from __future__ import annotations

import asyncio
from urllib.request import Request, urlopen

from benchmarks import single
from benchmarks.children import Place, free_port
from benchmarks.peers import fetch
from benchmarks.peers.peer import Figures, Peer, Work
from millpond.client.load import batched

ARTIFACTS = ["org.elasticmq:elasticmq-server_2.13:1.6.14"]
FORM = "application/x-www-form-urlencoded"
QUEUE = "/000000000000/bench"
REQUEST_SECONDS = 30.0


class ElasticMq(Peer):
    key = "elasticmq"
    title = "ElasticMQ"
    version = "1.6.14"
    warm_seconds = 20.0
    unfair = (
        "To ElasticMQ: a JVM that has compiled itself only as far as the round that is not counted takes it. To us: "
        "nothing of it is ever written to a disk."
    )

    async def fetch(self) -> None:
        self._jars = await fetch.maven("elasticmq", ARTIFACTS, self.tell)

    async def start(self, here: Place, server: str) -> None:
        self._here, port = here, free_port()
        self._url = f"http://127.0.0.1:{port}"
        config = here.folder / "elasticmq.conf"
        config.write_text(
            'include classpath("application.conf")\n'
            f'node-address {{ host = "127.0.0.1", port = {port} }}\n'
            f'rest-sqs {{ enabled = true, bind-hostname = "127.0.0.1", bind-port = {port}, sqs-limits = relaxed }}\n'
            "rest-stats.enabled = false\n"
        )
        java = self.java(self._jars, f"-Dconfig.file={config}", "-Xmx4g")
        await here.serve(*java, "org.elasticmq.server.Main", port=port, name="elasticmq")
        await self._call("/", "Action=CreateQueue&QueueName=bench")

    def works(self, server: str) -> list[Work]:
        return [Work("single requests, memory", self._send)]

    async def _send(self) -> Figures:
        body = b"Action=SendMessage&MessageBody=" + batched.bodies(self.setup.message_bytes)[0]
        rate = await single.posts_per_second(self._url, QUEUE, body, FORM, self.setup)
        self._here.commands.append(single.told(self._url, QUEUE, self.setup))
        await self._call(QUEUE, "Action=PurgeQueue")
        return {"": rate}

    async def _call(self, path: str, form: str) -> None:
        request = Request(self._url + path, form.encode(), {"Content-Type": FORM})  # noqa: S310 (loopback)

        def call() -> None:
            with urlopen(request, timeout=REQUEST_SECONDS) as answer:  # noqa: S310
                answer.read()

        await asyncio.to_thread(call)


PEER = ElasticMq
