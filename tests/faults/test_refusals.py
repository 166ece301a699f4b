"""What standalone cannot start on, it refuses: one clear line on stderr with the remedy, exit code 1, no traceback,
and the data directory as it was."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.load import Http
from support.processes import Process

Start = Callable[..., Process]
Client = Callable[[Process], Http]


async def refusal(process: Process, *wanted: str) -> str:
    """Launch a process that must not start: the one line it leaves, which holds every text of `wanted`."""
    process.launch()
    assert await process.exited() == 1
    lines = [line for line in process.log().splitlines() if line]
    assert len(lines) == 1, process.log()
    assert lines[0].startswith("millpond: cannot start: "), lines[0]
    for text in wanted:
        assert text.lower() in lines[0].lower(), lines[0]
    assert not process.ready_file.exists()
    return lines[0]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data directory with one message in it, cleanly stopped."""
    yield tmp_path_factory.mktemp("used") / "data"


@pytest.fixture
async def data(used: Path, tmp_path: Path, start: Start, client: Client) -> Path:
    """A copy of it."""
    if not used.exists():  # the first test makes it
        service = await start(name="first", data=used).start()
        http = client(service)
        await http.ok("PUT", "/v1/topics/kept", {"queues": 1})
        await http.ok("POST", "/v1/topics/kept/messages", {"messages": [{"body": "kept"}]})
        assert await service.stop() == 0
    return Path(shutil.copytree(used, tmp_path / "copy", copy_function=_copy_sparse))


def _copy_sparse(source: str, target: str) -> None:
    data = Path(source).read_bytes()
    with Path(target).open("wb") as file:
        file.write(data.rstrip(b"\0"))
        file.truncate(len(data))
    shutil.copymode(source, target)


async def starts_again(process: Process, client: Client) -> None:
    """Once the cause is gone the same directory serves its message."""
    await process.start()
    http = client(process)
    _, _, found = await http.whole("kept", 0)
    assert [one["body"] for one in found] == ["kept"]
    assert await process.stop() == 0


async def test_a_second_process_on_the_same_directory(start: Start, data: Path, client: Client) -> None:
    """It is refused, and the first one goes on as if nothing had been."""
    first = await start(data=data).start()
    await refusal(start(name="second", data=data), "another process is using this data directory", "stop it first")
    http = client(first)
    await http.ok("POST", "/v1/topics/kept/messages", {"messages": [{"body": "more"}]})
    assert await first.stop() == 0


async def test_a_port_in_use(start: Start, data: Path, tmp_path: Path, client: Client) -> None:
    """The line names the port; the directory is free again afterwards."""
    first = await start(name="holder", data=tmp_path / "other").start()
    second = start(data=data)
    second.port = first.port
    await refusal(second, f"127.0.0.1:{first.port}", "in use")
    second.port = 0
    await starts_again(second, client)


async def test_a_directory_of_another_group(start: Start, data: Path) -> None:
    await refusal(start("--group", "b", data=data), "belongs to store group 'a'", "--group a")


async def test_a_directory_of_a_newer_format(start: Start, data: Path) -> None:
    identity = data / "store" / "store.json"
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"format": 99}))
    await refusal(start(data=data), "format 99", "newer release")


async def test_a_newer_database(start: Start, data: Path) -> None:
    """A catalog written by a newer release is left alone."""
    with closing(sqlite3.connect(data / "metadata.db")) as database, database:
        table, column = _version_column(database)
        database.execute(f"UPDATE {table} SET {column} = {column} + 100")  # noqa: S608  # names of our own schema
    line = await refusal(start(data=data))
    assert "newer" in line


def _version_column(database: sqlite3.Connection) -> tuple[str, str]:
    tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        for _, column, *_ in database.execute(f"PRAGMA table_info({table})"):
            if "schema_version" in column or (column == "version" and "schema" in table):
                return table, column
    raise AssertionError(f"no schema version in {tables}")


async def test_a_corrupt_database(start: Start, data: Path, client: Client) -> None:
    """Not started, not written to; with the file put back all is there."""
    database = data / "metadata.db"
    whole = database.read_bytes()
    broken = bytearray(whole)
    broken[: len(broken) // 2] = b"\xa5" * (len(broken) // 2)
    database.write_bytes(broken)
    await refusal(start(data=data), "metadata")
    assert database.read_bytes() == broken
    database.write_bytes(whole)
    await starts_again(start(name="right", data=data), client)


async def test_a_locked_database(start: Start, data: Path, client: Client) -> None:
    """Another program holds the database: refused after the busy timeout, started once it is released."""
    with closing(sqlite3.connect(data / "metadata.db", isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode=EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        await refusal(start(data=data), "metadata database", "locked")
    await starts_again(start(name="right", data=data), client)


@pytest.mark.parametrize("what", ["store.json", "log"])
async def test_a_directory_with_parts_missing(start: Start, data: Path, what: str) -> None:
    """A log without its identity, or an identity without its log, is not taken for an empty directory."""
    path = data / "store" / what
    path.rename(data / "elsewhere")
    await refusal(start(data=data), "backup")


async def test_a_file_in_place_of_the_directory(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    await refusal(start(data=tmp_path / "file"), str(tmp_path / "file"), "--data")
