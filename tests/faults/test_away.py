"""The object store or the metadata is away: what does not need them goes on, what does says so, and all of it comes
back by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from support.load import Http
from support.processes import Apart, Process

Start = Callable[..., Process]
Client = Callable[[Process | Apart], Http]
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_CONFIG_FILE": "/nonexistent"}
AGAIN_SECONDS = 60
LOOK_SECONDS = 0.1
RECEIVE = "/v1/topics/kept/groups/readers/messages/receive"
ACK = "/v1/topics/kept/groups/readers/messages/ack"


class ObjectServer:
    """moto's S3 that is switched off and on again on the same port; its objects stay."""

    def __init__(self) -> None:
        self._server: ThreadedMotoServer | None = None
        self.port = 0

    def on(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def off(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def flags(self) -> list[str]:
        """Sealing looks at everything at once, so that it need not be asked."""
        sealing = ["--seal-trickle-bytes", "1", "--seal-trickle-ms", "1"]
        return ["--tier", "s3://pond/faults", "--s3-endpoint", f"http://127.0.0.1:{self.port}", *sealing]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    server = ObjectServer()
    server.on()
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}", region_name="us-east-1")
    s3.create_bucket(Bucket="pond")
    s3.close()
    yield server
    server.off()


async def produce(http: Http, number: int) -> None:
    await http.ok("POST", "/v1/topics/kept/messages", {"messages": [{"body": str(row)} for row in range(number)]})


async def consume(http: Http, number: int) -> None:
    """Receive and ack exactly so many."""
    seen = 0
    while seen < number:
        got = await http.ok("POST", RECEIVE, {"max_messages": 100, "wait_ms": 2000})
        assert got["messages"], f"{seen} of {number}"
        settled = await http.ok("POST", ACK, {"acks": [one["lease_id"] for one in got["messages"]]})
        assert {one["status"] for one in settled["results"]} == {"ok"}
        seen += len(got["messages"])
    assert seen == number


async def made(http: Http) -> None:
    await http.ok("PUT", "/v1/topics/kept", {"queues": 1})
    await http.ok("PUT", "/v1/topics/kept/groups/readers", {"start": "earliest"})


async def until(look: Callable[[], Any]) -> None:
    """Until `look()` answers True: of another process there is no event to wait for."""
    async with asyncio.timeout(AGAIN_SECONDS):
        while not await look():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)


async def tiered(http: Http) -> int:
    return (await http.queues("kept"))[0]["tiered_to"]


async def test_the_tier_goes_away_and_comes_back(objects: ObjectServer, start: Start, client: Client) -> None:
    """Produce and consume go on, flush is 503 tier_unavailable, also after a restart meanwhile: an outage of S3 must
    not become one of the queue. With the tier back, sealing goes on by itself."""
    service = await start(*objects.flags).start()
    http = client(service)
    await made(http)
    await produce(http, 50)
    await http.ok("POST", "/v1/topics/kept/flush")
    assert await tiered(http) == 50
    objects.off()
    await produce(http, 50)
    await consume(http, 100)
    service.kill()
    await service.start()
    await produce(http, 50)
    await consume(http, 50)
    refused = await http.call("POST", "/v1/topics/kept/flush")
    assert (refused.status, refused.code, refused.body["retryable"]) == (503, "tier_unavailable", True)
    assert await tiered(http) == 50
    _, end, found = await http.whole("kept", 0)
    assert (end, len(found)) == (150, 150)
    objects.on()

    async def sealed() -> bool:
        return await tiered(http) == 150

    await until(sealed)


async def test_a_first_start_without_its_tier(objects: ObjectServer, start: Start) -> None:
    """A new directory whose tier cannot be used is refused with the remedy: it is more likely a typing mistake."""
    service = start(*objects.flags)
    objects.off()
    service.launch()
    assert await service.exited() == 1
    lines = service.log().splitlines()
    assert len(lines) == 1, service.log()
    assert "s3://pond/faults" in lines[0]
    assert "--tier" in lines[0]


async def test_metadata_goes_away_and_comes_back(apart: Callable[..., Apart], client: Client) -> None:
    """Produce, receive, ack, lag and hot reads go on from what is cached; administration and the unknown are 503."""
    parts = await apart().start()
    http = client(parts)
    await made(http)
    await produce(http, 50)
    await consume(http, 50)
    parts.metadata.kill()
    for _ in range(2):
        await produce(http, 50)
        await consume(http, 50)
    assert (await http.ok("GET", "/v1/topics/kept/groups/readers/lag"))["total"] == 0
    _, end, _ = await http.whole("kept", 0)
    assert end == 150
    refused = {
        "PUT /v1/topics/other": {"queues": 1},
        "PUT /v1/topics/kept/groups/others": {},
        "PATCH /v1/topics/kept": {"queues": 2},
        "DELETE /v1/topics/kept": None,
        "POST /v1/topics/unknown/messages": {"messages": [{"body": "x"}]},
    }
    for request, body in refused.items():
        method, path = request.split()
        answer = await http.call(method, path, body)
        assert (answer.status, answer.code) == (503, "metadata_unavailable"), request
        assert answer.body["retryable"] is True
    assert (await http.call("GET", "/readyz")).status == 200, "messages go on: it should get traffic"
    await parts.metadata.start()
    assert (await http.call("POST", "/v1/topics/unknown/messages", {"messages": [{"body": "x"}]})).status == 404
    await http.ok("PUT", "/v1/topics/other", {"queues": 1})
    await produce(http, 50)
    await consume(http, 50)
