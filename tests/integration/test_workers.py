"""`millpond proxy --processes N`: several proxy processes behind one port, as real processes.

Each process names its requests with a prefix of its own, so that a kept-alive connection tells which one it reached.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from support.processes import Apart, Process

from millpond import workers
from millpond.client import Connection, Consumer, Producer, Topics
from millpond.core.config import Config, ProxyConfig, TierConfig
from millpond.workers import Workers

PATIENCE_SECONDS = 30.0
PINS_MOST = 64  # connections that are opened to find one to each worker


class Pinned(NamedTuple):
    """One kept-alive connection; `worker`: the prefix of the process at its other end."""

    session: aiohttp.ClientSession
    worker: str

    async def call(self, method: str, path: str, json: Any = None, data: bytes | None = None) -> Any:
        async with self.session.request(method, path, json=json, data=data) as response:
            assert response.status < 300, (response.status, await response.text())
            return await response.json(content_type=None)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """Metadata and a store (and a proxy) that the tests of this file share."""
    parts = Apart(tmp_path_factory.mktemp("cluster"))
    try:
        asyncio.run(parts.start())
        yield parts
    finally:
        parts.close()


def proxy_of(cluster: Apart, folder: Path, *flags: str, secret: Path | None = None) -> Process:
    """A proxy of two processes, not launched yet."""
    beside = ["--metadata", cluster.metadata.url, "--cluster-secret-file", str(secret or cluster.secret)]
    return Process(folder, "proxy", [*beside, "--tier", str(cluster.folder / "tier"), "--processes", "2", *flags])


@pytest.fixture
async def proxy(cluster: Apart, tmp_path: Path) -> AsyncIterator[Process]:
    one = proxy_of(cluster, tmp_path)
    try:
        yield await one.start()
    finally:
        one.close()


def workers_of(proxy: Process) -> set[int]:
    """Their process ids."""
    return {int(pid) for pid in Path(f"/proc/{proxy.pid}/task/{proxy.pid}/children").read_text().split()}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(claim: Callable[[], bool | Awaitable[bool]]) -> None:
    """Ask again until it holds. For what no event tells from outside."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            holds = claim()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def pins(url: str, count: int = 2, each: int = 1) -> AsyncIterator[list[Pinned]]:
    """`each` connections to each of `count` workers."""
    found: dict[str, list[Pinned]] = {}
    async with AsyncExitStack() as ends:
        for _ in range(PINS_MOST):
            if len(found) == count and all(len(pinned) >= each for pinned in found.values()):
                break
            session = aiohttp.ClientSession(
                url, connector=aiohttp.TCPConnector(limit=1), timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
            )
            await ends.enter_async_context(session)
            async with session.get("/nothing-there") as response:
                worker = response.headers["Millpond-Request-Id"].partition("-")[0]
                await response.read()
            found.setdefault(worker, []).append(Pinned(session, worker))
        assert len(found) == count, f"{PINS_MOST} connections reached {len(found)} workers"
        yield [pinned for each_worker in found.values() for pinned in each_worker[:each]]


async def metrics(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def test_each_step_at_another_worker(proxy: Process) -> None:
    """Two processes serve one port, and what one of them did the other one goes on with."""
    assert len(workers_of(proxy)) == 2
    async with pins(proxy.url) as (one, other):
        await one.call("PUT", "/v1/topics/steps", json={"queues": 1})
        sent = await other.call("POST", "/v1/topics/steps/messages", data=b"first")
        path = "/v1/topics/steps/groups/g"
        taken = await one.call("POST", f"{path}/messages/receive", json={"max_messages": 1, "start": "earliest"})
        (message,) = taken["messages"]
        assert message["message_id"] == sent["results"][0]["message_id"]
        settled = await other.call("POST", f"{path}/messages/ack", json={"acks": [message["lease_id"]]})
        assert [result["status"] for result in settled["results"]] == ["ok"]
        assert (await one.call("GET", f"{path}/lag"))["total"] == 0
        waiting = asyncio.ensure_future(
            other.call("POST", f"{path}/messages/receive", json={"max_messages": 1, "wait_ms": 20_000})
        )
        await one.call("POST", "/v1/topics/steps/messages", data=b"second")
        (message,) = (await waiting)["messages"]
        assert message["body"] == "second"


async def test_metrics_of_all(proxy: Process) -> None:
    """Whichever worker is asked for /metrics answers for all of them, each with its label."""
    async with pins(proxy.url) as (one, other):
        await one.call("PUT", "/v1/topics/counted", json={"queues": 1})
        for pinned, count in ((one, 3), (other, 5)):
            for _ in range(count):
                await pinned.call("POST", "/v1/topics/counted/messages", data=b"x")
        seen = []
        for pinned in (one, other):
            async with pinned.session.get("/metrics") as response:
                text = await response.text()
            lines = [line for line in text.splitlines() if line.startswith("millpond_proxy_produced_messages_total")]
            seen.append(sorted(float(line.rpartition(" ")[2]) for line in lines))
            assert 'millpond_proxy_connections{worker="1"}' in text
            assert 'millpond_proxy_connections{worker="2"}' in text
        assert seen == [[3.0, 5.0]] * 2
    assert (await metrics(proxy.url))["millpond_proxy_workers"] == 2


async def test_one_line_says_it_is_ready(cluster: Apart, tmp_path: Path) -> None:
    """`ready` is said once, when every worker serves; SIGTERM ends all, with 0."""
    async with AsyncExitStack() as ends:
        process = await asyncio.create_subprocess_exec(
            *_command(proxy_of(cluster, tmp_path)), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        ends.callback(lambda: process.returncode is None and process.kill())
        assert process.stdout is not None
        said = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not said or not said[-1].startswith(b"ready "):
                said.append(await process.stdout.readline())
        async with pins(said[-1].split()[1].decode()):
            pass
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            said += (await process.stdout.read()).splitlines()
            assert await process.wait() == 0
    assert sum(line.startswith(b"ready ") for line in said) == 1


def _command(process: Process) -> list[str]:
    import sys

    return [sys.executable, "-m", "millpond", "proxy", *process.flags, "--listen", "127.0.0.1:0"]


async def test_port_in_use(cluster: Apart, proxy: Process, tmp_path: Path) -> None:
    """A port that somebody has is refused by one line, also when other workers have it, which would share it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for number, port in enumerate((proxy.port, taken.getsockname()[1])):
            second = proxy_of(cluster, tmp_path / str(number))
            second.port = port
            second.launch()
            assert await second.exited() == 1
            (line,) = second.log().splitlines()
            assert str(port) in line
            assert "another port" in line


async def test_port_of_a_worker_is_not_shared_by_a_single_one(cluster: Apart, proxy: Process, tmp_path: Path) -> None:
    """A proxy of one process does not get in beside workers."""
    second = proxy_of(cluster, tmp_path / "second", "--processes", "1")
    second.port = proxy.port
    second.launch()
    assert await second.exited() == 1
    assert "another port" in second.log()


async def test_worker_that_cannot_start(cluster: Apart, tmp_path: Path) -> None:
    """What keeps a worker from starting is why nothing starts: one line with the remedy, exit 1."""
    refused = proxy_of(cluster, tmp_path, secret=tmp_path / "none")
    refused.launch()
    assert await refused.exited() == 1
    (line,) = refused.log().splitlines()
    assert "cannot start" in line
    assert "millpond metadata" in line


@pytest.mark.parametrize("count", ["0", "1000"])
async def test_number_of_processes(cluster: Apart, tmp_path: Path, count: str) -> None:
    """No process, or very many, is refused with what is possible."""
    refused = proxy_of(cluster, tmp_path, "--processes", count)
    refused.launch()
    assert await refused.exited() == 1
    assert "1 to 64" in refused.log()


async def test_worker_killed_under_load(proxy: Process) -> None:
    """kill -9 of a worker is seen by its own clients only, and another one takes its place."""
    before = workers_of(proxy)
    async with pins(proxy.url, each=3) as pinned:
        await pinned[0].call("PUT", "/v1/topics/loaded", json={"queues": 2})
        sent = dict.fromkeys(pinned, 0)
        killed = asyncio.Event()

        async def load(one: Pinned) -> str | None:
            """The worker of a connection that broke."""
            after = 0
            while after < 50:
                try:
                    await one.call("POST", "/v1/topics/loaded/messages", data=b"x" * 1000)
                except aiohttp.ClientError:
                    return one.worker
                sent[one] += 1
                after += killed.is_set()
            return None

        loads = [asyncio.create_task(load(one)) for one in pinned]
        await until(lambda: min(sent.values()) >= 10)
        os.kill(min(before), signal.SIGKILL)
        killed.set()
        broken = await asyncio.gather(*loads)
    assert len(set(broken) - {None}) == 1, "clients of one worker"
    assert broken.count(None) == 3, "and the other one's saw nothing"
    await until(lambda: "serves again" in proxy.log())
    (fresh,) = workers_of(proxy) - before
    async with pins(proxy.url):
        assert (await metrics(proxy.url))["millpond_proxy_worker_starts_total"] == 3
    log = proxy.log()
    assert f"process {min(before)}) ended by signal 9" in log
    assert f"as process {fresh}" in log


async def test_worker_ended_by_an_operator(proxy: Process) -> None:
    """SIGTERM to one worker drains it, and another one takes its place."""
    before = workers_of(proxy)
    os.kill(max(before), signal.SIGTERM)
    await until(lambda: "serves again" in proxy.log())
    assert len(workers_of(proxy) - before) == 1
    async with pins(proxy.url):
        pass
    assert "ended with 0" in proxy.log()


async def test_worker_that_hangs(cluster: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that answers nobody is killed and replaced; one that is only asked and answers is left alone."""
    monkeypatch.setattr(workers, "LOOK_SECONDS", 0.1)
    metadata, secret = cluster.metadata.url, str(cluster.secret)
    listening = ProxyConfig(listen="127.0.0.1:0", processes=2, metadata=metadata, cluster_secret_file=secret)
    up = await Workers.start(Config(tier=TierConfig(url=str(cluster.folder / "tier")), proxy=listening))
    stopped, other = (worker.pid for worker in up._places)
    try:
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: up._places[0].pid != stopped)
        assert not alive(stopped)
        assert up._places[1].pid == other
        async with pins(up.address):
            pass
    finally:
        if alive(stopped):
            os.kill(stopped, signal.SIGCONT)
        await up.close()


async def test_parent_killed(cluster: Apart, proxy: Process, tmp_path: Path) -> None:
    """kill -9 of the parent ends its workers, and the port is free for the next one."""
    workers = workers_of(proxy)
    async with pins(proxy.url, each=2):
        os.kill(proxy.pid, signal.SIGKILL)
        await until(lambda: not any(alive(pid) for pid in workers))
    following = proxy_of(cluster, tmp_path / "next")
    following.port = proxy.port
    try:
        await following.start()
        async with pins(following.url):
            pass
    finally:
        following.close()


async def test_rolling(proxy: Process) -> None:
    """SIGHUP replaces every worker, one after the other; a port that answers all the time, and no message is lost."""
    before = workers_of(proxy)
    over = asyncio.Event()
    count = 0
    async with Connection(proxy.url) as connection:
        await Topics(connection).create("rolled", queues=2)

        async def send() -> None:
            nonlocal count
            async with Producer("rolled", connection=connection) as producer:
                while not over.is_set():
                    await producer.send(b"%d" % count)
                    count += 1

        sending = asyncio.create_task(send())
        await until(lambda: count > 10)
        os.kill(proxy.pid, signal.SIGHUP)
        await until(lambda: "every worker was replaced" in proxy.log())
        reached = count
        await until(lambda: count > reached + 10 or sending.done())
        over.set()
        await sending
        assert len(workers_of(proxy)) == 2
        assert not workers_of(proxy) & before
        seen = set()
        async with Consumer("rolled", "g", connection=connection, start="earliest") as consumer:
            while len(seen) < count:
                seen.add((await anext(consumer)).body)
    assert seen == {b"%d" % number for number in range(count)}


async def test_nothing_can_be_started_any_more(cluster: Apart, tmp_path: Path) -> None:
    """When no worker is left and none can be started, the parent ends with 1, as a single proxy would."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(cluster.secret.read_text())
    proxy = proxy_of(cluster, tmp_path, secret=secret)
    try:
        await proxy.start()
        secret.unlink()
        for pid in workers_of(proxy):
            os.kill(pid, signal.SIGKILL)
        assert await proxy.exited() == 1
        assert "no cluster secret" in proxy.log()
    finally:
        proxy.close()
