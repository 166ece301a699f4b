"""Real processes: ready, drained by SIGTERM, and refusing to start with one line that names the remedy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from millpond.client import Connection, Consumer, Producer, Reader, Topics

START_SECONDS = 60


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A part and its address; killed at the end when it is still there."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millpond", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            async for line in process.stdout:
                if line.startswith(b"ready "):
                    yield process, line.split()[1].decode()
                    return
            assert process.stderr is not None
            raise AssertionError((await process.stderr.read()).decode())
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def refused(*arguments: str) -> str:
    """What a part that must not start says; it ends with exit code 1 and without a traceback."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millpond", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(START_SECONDS):
        out, said = await process.communicate()
    assert process.returncode == 1, out
    assert b"ready" not in out
    assert b"Traceback" not in said, said.decode()
    return said.decode().splitlines()[-1]


async def stopped(process: asyncio.subprocess.Process) -> int:
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(START_SECONDS):
        return await process.wait()


async def test_standalone_life(tmp_path: Path) -> None:
    """A message survives a drained stop and a start; the ready file is there exactly while it is ready."""
    ready = tmp_path / "ready"
    arguments = ("standalone", "--data", str(tmp_path / "data"), "--port", "0", "--ready-file", str(ready))
    async with running(*arguments) as (process, url):
        assert ready.read_text().strip() == url
        async with Connection(url) as connection:
            await Topics(connection).create("t")
            async with Producer("t", connection=connection) as producer:
                sent = await producer.send("kept", key="k", tag="x", properties={"a": "b"})
            async with Consumer("t", "g", connection=connection, start="earliest") as consumer:
                message = await anext(consumer)
                assert (message.body, message.message_id) == (b"kept", sent.message_id)
                assert await message.ack() == "ok"
        assert await stopped(process) == 0
        assert not ready.exists()
    async with running(*arguments) as (process, url), Connection(url) as connection:
        page = await Reader(connection, "t", sent.queue).read(offset=sent.offset)
        assert page.messages.column("body").to_pylist() == [b"kept"]
        found = await Topics(connection).message("t", sent.message_id)
        assert (found["queue"], found["offset"]) == (sent.queue, sent.offset)
        assert await stopped(process) == 0


async def test_bench(tmp_path: Path) -> None:
    """`millpond bench` measures every kind of work, and leaves no topic behind."""
    async with running("standalone", "--data", str(tmp_path), "--port", "0") as (_, url):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "millpond", "bench", "--seconds", "0.2", "--bytes", "100", "--json", "--url", url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(START_SECONDS):
            out, said = await process.communicate()
        assert (process.returncode, said) == (0, b"")
        told = json.loads(out)
        messages = told["batched"]["messages"]
        assert messages > 0
        for work in ("read", "read one by one", "consume", "consume one by one"):
            assert told[work]["messages"] == messages, work
        assert told["single"]["messages"] > 0
        assert told["single"]["errors"] == 0
        assert told["latency"]["messages"] == 200
        async with Connection(url) as connection:
            assert not [topic async for topic in Topics(connection).list()]


async def test_parts_apart(tmp_path: Path) -> None:
    """The three parts as processes carry a message from a producer to a consumer."""
    secret = str(tmp_path / "metadata" / "cluster-secret")
    tier = str(tmp_path / "tier")
    metadata_arguments = ("metadata", "--data", str(tmp_path / "metadata"), "--listen", "127.0.0.1:0")
    async with running(*metadata_arguments) as (_, metadata):
        shared = ("--metadata", metadata, "--cluster-secret-file", secret, "--tier", tier, "--listen", "127.0.0.1:0")
        async with (
            running("store", "--data", str(tmp_path / "store"), *shared),
            running("proxy", *shared) as (process, url),
            Connection(url) as connection,
        ):
            await Topics(connection).create("t", queues=2)
            async with Producer("t", connection=connection) as producer:
                await producer.send_many([b"%d" % i for i in range(100)])
            async with Consumer("t", "g", connection=connection, start="earliest") as consumer:
                bodies = [(await anext(consumer)).body for _ in range(100)]
            assert sorted(bodies) == sorted(b"%d" % i for i in range(100))
            assert await stopped(process) == 0


async def test_port_in_use(tmp_path: Path) -> None:
    """A taken port is named, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = await refused("standalone", "--data", str(tmp_path), "--port", port)
    assert port in said
    assert "another port" in said


async def test_second_process_on_the_same_directory(tmp_path: Path) -> None:
    """Two processes never share a data directory."""
    arguments = ("standalone", "--data", str(tmp_path), "--port", "0")
    async with running(*arguments):
        said = await refused(*arguments)
    assert "another process" in said.lower()


async def test_directory_that_cannot_be_written() -> None:
    """A directory that cannot be made says so; not even root can make one there."""
    said = await refused("standalone", "--data", "/sys/millpond", "--port", "0")
    assert "/sys/millpond" in said
    assert "--data" in said


async def test_directory_that_is_a_file(tmp_path: Path) -> None:
    """A file in the place of the data directory says so."""
    file = tmp_path / "data"
    file.write_text("")
    said = await refused("standalone", "--data", str(file), "--port", "0")
    assert str(file) in said
    assert "directory" in said


async def test_directory_of_another(tmp_path: Path) -> None:
    """Data of a newer format, or of another store group, is refused."""
    arguments = ("standalone", "--data", str(tmp_path), "--port", "0")
    async with running(*arguments) as (process, _):
        assert await stopped(process) == 0
    identity = tmp_path / "store" / "store.json"
    own = json.loads(identity.read_text())
    for changed, named in (({"format": 99}, "newer release"), ({"group": "other"}, "--group other")):
        identity.write_text(json.dumps({**own, **changed}))
        assert named in await refused(*arguments)


async def test_store_without_metadata(tmp_path: Path) -> None:
    """A store whose metadata is not there says where it looked, and does not hang."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("x" * 40)
    shared = ("--metadata", address, "--cluster-secret-file", str(secret), "--tier", str(tmp_path / "tier"))
    said = await refused("store", "--data", str(tmp_path / "store"), "--listen", "127.0.0.1:0", *shared)
    assert address.removeprefix("http://") in said


async def test_secret_that_others_can_read(tmp_path: Path) -> None:
    """A cluster secret with loose permissions is refused."""
    secret = tmp_path / "secret"
    secret.write_text("x" * 40)
    secret.chmod(0o644)
    said = await refused(
        "proxy", "--cluster-secret-file", str(secret), "--tier", str(tmp_path), "--listen", "127.0.0.1:0"
    )
    assert "chmod 600" in said


async def test_not_on_loopback_without_keys(tmp_path: Path) -> None:
    """Open mode refuses to listen where others could reach it."""
    said = await refused("standalone", "--data", str(tmp_path), "--listen", "0.0.0.0:0")
    assert "key" in said


async def test_json_log_of_a_refusal(tmp_path: Path) -> None:
    """With --log-json even the last words are a JSON line."""
    file = tmp_path / "data"
    file.write_text("")
    said = json.loads(await refused("standalone", "--data", str(file), "--port", "0", "--log-json"))
    assert said["level"] == "error"


async def test_signal_while_starting_ends_cleanly(tmp_path: Path) -> None:
    """SIGINT at any time before it is ready ends the process, too."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millpond", "standalone", "--data", str(tmp_path), "--port", "0",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ},
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0
