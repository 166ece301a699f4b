"""Commands against a service in this process: what they print, and how they end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from millpond import __version__
from millpond.client.command import exits
from millpond.client.command.app import build
from millpond.client.command.parts import Starters
from millpond.client.command.session import time_ms
from millpond.core import limits
from millpond.core.config import Config
from millpond.core.errors import BadRequest

from .conftest import FakeService, arrow_answer, problem

MILLPOND = """import signal
from millpond.launch import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background jobs begin without it
main()
"""


class Started:
    """Starters that note what they are given."""

    def __init__(self) -> None:
        self.configs: list[Config] = []

    def part(self, config: Config, ready_file: str | None) -> int:
        self.configs.append(config)
        return 0

    def replay(self, *arguments: Any) -> dict[str, Any]:
        return {"replay_id": arguments[2], "spec": arguments[3], "skip_lost": arguments[6]}


async def invoke(*arguments: str, started: Started | None = None) -> Result:
    starts = started or Started()
    app = build(Starters(starts.part, starts.part, starts.part, starts.part, starts.replay))
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


@pytest.fixture(autouse=True)
def quick(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_URL", service.url)


async def test_produce_says_where(service: FakeService) -> None:
    """produce sends bodies with key, tag and properties, and prints their places as JSON."""
    result = await invoke("produce", "t", "one", "two", "--key", "k", "--tag", "x", "-p", "a=b", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["sent"] == 2
    for body, place in zip([b"one", b"two"], told["messages"], strict=True):
        row = service.rows[place["queue"]][place["offset"]]
        assert (row["body"], row["key"], row["tag"], row["properties"]) == (body, b"k", "x", [("a", "b")])


async def test_produce_file(service: FakeService, tmp_path: Any) -> None:
    """--file sends a message a line, without its end."""
    file = tmp_path / "lines"
    file.write_bytes(b"one\r\ntwo\nthree")
    result = await invoke("produce", "t", "--file", str(file))
    assert result.exit_code == 0, result.output
    assert sorted(row["body"] for rows in service.rows.values() for row in rows) == [b"one", b"three", b"two"]


@asynccontextmanager
async def producing() -> AsyncIterator[asyncio.subprocess.Process]:
    """`produce` in a process of its own, which reads lines from a pipe."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MILLPOND, "produce", "t", stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(30):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_produce_sends_while_a_pipe_goes_on(service: FakeService) -> None:
    """A line is sent once it has come; Ctrl-C sends what was taken."""
    async with producing() as process:
        assert process.stdin is not None
        for written, sent in ((b"one\ntw", [b"one"]), (b"o\r\n", [b"one", b"two"])):
            process.stdin.write(written)
            await service.came.acquire()
            assert sorted(row["body"] for rows in service.rows.values() for row in rows) == sent
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130


async def test_produce_ends_with_what_failed(service: FakeService) -> None:
    """Also while the pipe goes on: who writes to it must not believe that all is well."""
    service.faults += [lambda _: None, lambda _: problem(404, "topic_not_found", "gone")]
    async with producing() as process:
        assert process.stdin is not None and process.stderr is not None
        while process.returncode is None:
            process.stdin.write(b"line\n")
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 0.05)
        assert process.returncode == exits.NOT_FOUND
        assert b"gone" in await process.stderr.read()


async def test_produce_refuses_a_line_that_is_too_long(service: FakeService, tmp_path: Any) -> None:
    """And nothing of it is sent."""
    file = tmp_path / "lines"
    file.write_bytes(b"x" * (limits.MESSAGE_BYTES + 100_000))
    result = await invoke("produce", "t", "--file", str(file), "--json")
    assert json.loads(result.stdout)["code"] == "message_too_large"
    assert not service.produced


async def test_consume_acks_what_it_printed(service: FakeService) -> None:
    """consume prints up to --count messages as JSON lines, acks those, and hands the rest back."""
    rows: list[dict[str, Any]] = [{"queue": 0, "offset": i, "body": b"%d" % i} for i in range(3)]
    service.receives.append(arrow_answer(rows, {"receipts": [{"receipt": "T", "queue": 0, "rows": "0-2"}]}))
    result = await invoke("consume", "t", "g", "-n", "2", "--json")
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["body"] for line in result.stdout.splitlines()] == ["0", "1"]
    assert service.settled_rows("acks") == ["T.0", "T.1"]
    assert service.settled_rows("nacks") == ["T.2"]


@pytest.mark.parametrize("command", [("topic", "list"), ("produce", "t", "one"), ("consume", "t", "g")])
async def test_an_address_that_is_none(command: tuple[str, ...]) -> None:
    """Is named, and what it should be."""
    result = await invoke(*command, "--url", "localhost:8080", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["code"], told["remedy"]) == (
        exits.REFUSED, "invalid_request", "url: http://host:port or https://host:port",
    )  # fmt: skip


async def test_the_version() -> None:
    """`--version`, and help that still is what it was."""
    assert (await invoke("--version")).stdout == f"millpond {__version__}\n"
    assert "Exit codes" in (await invoke("--help")).stdout


async def test_tail_says_what_ended_it(service: FakeService) -> None:
    """Of several queues that are read at once the first that fails."""
    service.faults += [lambda _: None, *(lambda _: problem(410, "offset_expired", "expired") for _ in range(4))]
    result = await invoke("tail", "t", "--json")
    assert (result.exit_code, json.loads(result.stdout)["code"]) == (exits.REFUSED, "offset_expired")


async def test_tail_waits_for_a_service_that_it_follows(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than who asks once. The first answer is not waited for."""
    monkeypatch.setattr("millpond.client.command.session.RETRY_SECONDS", 0.0)
    ends = {"start_offset": 0, "next_offset": 1, "end_offset": 1}
    page = arrow_answer([{"queue": 0, "offset": 0, "body": b"one"}], ends)
    away, expired = problem(503, "store_unavailable", "away"), problem(410, "offset_expired", "expired")
    service.faults += [lambda _: page, lambda _: away, lambda _: expired]
    result = await invoke("tail", "t", "--queue", "0", "--follow", "--json")
    printed, failure = map(json.loads, result.stdout.splitlines())
    assert (printed["body"], failure["code"]) == ("one", "offset_expired")
    service.faults.append(lambda _: problem(503, "store_unavailable", "away"))
    result = await invoke("tail", "t", "--queue", "0", "--follow", "--json")
    assert json.loads(result.stdout)["code"] == "store_unavailable"


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [(404, "topic_not_found", 4), (403, "forbidden", 5), (400, "invalid_request", 5), (500, "internal", 1)],
)
async def test_exit_codes(service: FakeService, status: int, code: str, exit_code: int) -> None:
    """The kind of failure is the exit code; text names the error, JSON also its code and remedy."""
    service.faults.append(lambda _: problem(status, code, "that is how it is"))
    result = await invoke("lag", "t", "g")
    assert result.exit_code == exit_code
    assert "that is how it is" in result.stderr
    service.faults.append(lambda _: problem(status, code, "that is how it is"))
    told = json.loads((await invoke("lag", "t", "g", "--json")).stdout)
    assert told["code"] == code
    assert told["exit_code"] == exit_code


async def test_unreachable_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody there is exit code 3, and says how to start one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr("millpond.client.command.session.RETRY_SECONDS", 0.0)
    result = await invoke("topic", "list", "--url", f"http://127.0.0.1:{port}")
    assert result.exit_code == exits.UNREACHABLE
    assert "millpond standalone" in result.stderr


async def test_usage_is_2() -> None:
    """A wrong command line is exit code 2."""
    assert (await invoke("topic", "create")).exit_code == exits.USAGE
    assert (await invoke("find", "t")).exit_code == exits.USAGE


async def test_standalone_gets_its_settings() -> None:
    """Flags reach the part that is started; --port is short for --listen."""
    started = Started()
    result = await invoke("standalone", "--data", "d", "--tier", "s3://b/p", "--port", "0", started=started)
    assert result.exit_code == 0, result.output
    config = started.configs[0]
    assert (config.store.data, config.tier.url, config.proxy.listen) == ("d", "s3://b/p", "127.0.0.1:0")


async def test_config_says_from_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """config lists every setting with its origin."""
    monkeypatch.setenv("MILLPOND_STORE_GROUP", "b")
    told = json.loads((await invoke("config", "--json")).stdout)
    assert told["store.group"] == {"value": "b", "from": "environment MILLPOND_STORE_GROUP"}
    assert told["store.data"]["from"] == "default"


async def test_settings_mistake_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that cannot be is one line and exit code 1, not a traceback."""
    monkeypatch.setenv("MILLPOND_STORE_GROOP", "b")
    result = await invoke("standalone")
    assert result.exit_code == exits.FAILED
    assert "MILLPOND_STORE_GROOP" in result.stderr
    assert "Traceback" not in result.stderr


async def test_replay_passes_its_plan() -> None:
    """replay hands times in ms, the filter and the id to the starter."""
    result = await invoke(
        "replay", "a", "b", "--from", "2013-02-08", "--tag", "UA", "--id", "x", "--skip-lost", "--json"
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["replay_id"], told["skip_lost"]) == ("x", True)
    assert told["spec"]["from"] == 1360281600000
    assert told["spec"]["filter"] == {"tag": "UA", "properties": {}}


def test_times() -> None:
    """Times are ISO 8601, UTC unless they say otherwise, or milliseconds."""
    assert time_ms("1970-01-01T00:00:01", "t") == 1000
    assert time_ms("1970-01-01T01:00:00+01:00", "t") == 0
    assert time_ms("12345", "t") == 12345
    assert time_ms(None, "t") is None
    with pytest.raises(BadRequest):
        time_ms("yesterday", "t")
