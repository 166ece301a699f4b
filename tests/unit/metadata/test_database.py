"""The SQL database behind the metadata part: how it opens, what it promises, and how it fails."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from millpond.core import limits
from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.errors import BadRequest, Internal, MillpondError, Unavailable
from millpond.metadata.client import TopicSettings
from millpond.metadata.database import Database
from millpond.metadata.local import LocalMetadata
from millpond.metadata.tables import SCHEMA_VERSION

HORSES = b"all the king's horses " * 1_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pond" / "metadata.db"


async def opened(path: Path, busy_ms: int = 50, call_ms: int = 5_000) -> LocalMetadata:
    return await LocalMetadata.open(
        f"sqlite:///{path}", SystemClock(), SystemRandom(), busy_ms=busy_ms, call_ms=call_ms
    )


async def made(path: Path) -> None:
    """A database with one topic, closed."""
    metadata = await opened(path)
    await metadata.put_topic("default", "orders", TopicSettings(queues=2))
    await metadata.close()


def text_file(path: Path) -> bytes:
    """What is in `path`: a text, when it was not there."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.write_bytes(HORSES)
    return path.read_bytes()


def damage(path: Path) -> None:
    """Overwrite every page but the first."""
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))


def refuses(error: type[MillpondError], code: str, match: str | None = None) -> pytest.RaisesExc[MillpondError]:
    return pytest.RaisesExc(error, match=match, check=lambda raised: raised.code == code)


async def test_reopen_keeps_everything(path: Path) -> None:
    """What was written is there after closing and opening again."""
    await made(path)
    metadata = await opened(path)
    assert (await metadata.topic("default", "orders")).settings.queues == 2
    await metadata.close()


async def test_file_is_its_owners(path: Path) -> None:
    """The database and its journal files can be read by their owner only: they hold secrets."""
    metadata = await opened(path)
    await metadata.lease_keys()
    modes = {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == {0o600}
    await metadata.close()


async def test_newer_schema_is_refused(path: Path) -> None:
    """A database of a newer release is refused by number, and left as it is."""
    await made(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE millpond SET schema_version = ?", (SCHEMA_VERSION + 1,))
    with refuses(Internal, "newer_format", f"schema version {SCHEMA_VERSION + 1}"):
        await opened(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE millpond SET schema_version = ?", (SCHEMA_VERSION,))
    await (await opened(path)).close()


async def test_missing_head_row_is_corrupt(path: Path) -> None:
    """A database that does not say its version is not guessed about."""
    await made(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM millpond")
    with refuses(Internal, "metadata_corrupt"):
        await opened(path)


async def test_file_of_something_else_is_corrupt(path: Path) -> None:
    """A file that is no database is refused, not overwritten."""
    text_file(path)
    with refuses(Internal, "metadata_corrupt", "not a database"):
        await opened(path)
    assert text_file(path) == HORSES


async def test_damaged_pages_are_corrupt(path: Path) -> None:
    """Damage behind an intact head is an error of its own in the first call that meets it."""
    await made(path)
    damage(path)
    with refuses(Internal, "metadata_corrupt", "malformed|no such"):
        metadata = await opened(path)
        try:
            await metadata.changes(0, 0)
        finally:
            await metadata.close()


async def test_missing_table_is_corrupt(path: Path) -> None:
    """A table that is not there is told as damage, not as a traceback."""
    await made(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE replays")
    metadata = await opened(path)
    with refuses(Internal, "metadata_corrupt", "no such table"):
        await metadata.replays("default")
    await metadata.close()


async def test_locked_file_is_unavailable_soon(path: Path) -> None:
    """While another process holds the lock, opening and writing fail after the busy time; reading goes on."""
    await made(path)
    metadata = await opened(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(3):
            with refuses(Unavailable, "metadata_unavailable", "locked by another process"):
                await metadata.put_topic("default", "more", TopicSettings(queues=1))
            with refuses(Unavailable, "metadata_unavailable", "locked by another process"):
                await opened(path)
            assert (await metadata.topic("default", "orders")).name == "orders"
        other.execute("ROLLBACK")
    await metadata.put_topic("default", "more", TopicSettings(queues=1))
    await metadata.close()


async def test_exclusively_locked_file_is_unavailable(path: Path) -> None:
    """A file that another program keeps wholly to itself cannot be opened, and says so."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE t (x)")
        other.execute("BEGIN EXCLUSIVE")
        with refuses(Unavailable, "metadata_unavailable", "locked by another process"):
            await opened(path)


async def test_place_that_cannot_hold_a_file(tmp_path: Path) -> None:
    """A path below a file, and a folder instead of a file, are unavailable with the reason."""
    (tmp_path / "file").write_bytes(b"")
    with refuses(Unavailable, "metadata_unavailable", "Not a directory|File exists"):
        await opened(tmp_path / "file" / "metadata.db")
    with refuses(Unavailable, "metadata_unavailable", "unable to open"):
        await opened(tmp_path)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://x/y", "nonsense", "postgresql+asyncpg:"])
async def test_bad_urls(url: str) -> None:
    """A URL that cannot be served is a bad request before anything is made."""
    with refuses(BadRequest, "invalid_request"):
        await LocalMetadata.open(url, SystemClock(), SystemRandom())


async def test_unreachable_server_shows_no_password(tmp_path: Path) -> None:
    """A PostgreSQL that does not answer is unavailable; the text names the place and never the password."""
    url = f"postgresql://someone:geheim@/pond?host={tmp_path}"
    with refuses(Unavailable, "metadata_unavailable", "metadata database pond") as raised:
        await LocalMetadata.open(url, SystemClock(), SystemRandom(), busy_ms=100, call_ms=5_000)
    assert "geheim" not in raised.value.detail


# -- the database by itself -------------------------------------------------------------------------------


@pytest.fixture
async def database(path: Path) -> AsyncIterator[Database]:
    database = Database(f"sqlite:///{path}", busy_ms=50, call_ms=5_000)
    await database.create(lambda connection: None)
    yield database
    await database.close()


async def test_settings_of_every_connection(database: Database) -> None:
    """Every connection flushes each commit to the disk and keeps references whole. NORMAL would lose commits."""

    def pragmas(connection: Connection) -> tuple[object, ...]:
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return tuple(connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names)

    together = threading.Barrier(limits.METADATA_THREADS)

    def read(connection: Connection) -> tuple[object, ...]:
        together.wait(5)  # so that each read has a connection of its own
        return pragmas(connection)

    found = await asyncio.gather(*(database.read(read) for _ in range(limits.METADATA_THREADS)))
    found.append(await database.write(pragmas))
    assert set(found) == {("wal", 2, 1, 50)}


async def test_exception_rolls_back(database: Database) -> None:
    """A call that raises leaves nothing behind."""

    def half(connection: Connection) -> None:
        connection.execute(text("INSERT INTO tenants (name, created_ms) VALUES ('x', 0)"))
        raise Unavailable("metadata_unavailable", "half way")

    with refuses(Unavailable, "metadata_unavailable", "half way"):
        await database.write(half)
    assert await database.read(lambda c: c.execute(text("SELECT count(*) FROM tenants")).scalar()) == 0


class GaveWay(Exception):
    """What a PostgreSQL driver raises when it picked this transaction to give way."""

    sqlstate = "40001"


async def test_transaction_that_gave_way_is_repeated(database: Database) -> None:
    """It runs again from its start, with nothing left of the first try, and a bounded number of times."""
    runs: list[int] = []
    insert = text("INSERT INTO tenants (name, created_ms) VALUES ('x', 0)")

    def twice(connection: Connection) -> None:
        connection.execute(insert)
        runs.append(1)
        if len(runs) < 3:
            raise DBAPIError("COMMIT", None, GaveWay())

    await database.write(twice)
    assert len(runs) == 3
    assert await database.read(lambda c: c.execute(text("SELECT count(*) FROM tenants")).scalar()) == 1

    def always(connection: Connection) -> None:
        runs.append(1)
        raise DBAPIError("COMMIT", None, GaveWay())

    runs.clear()
    with refuses(Unavailable, "metadata_unavailable"):
        await database.write(always)
    assert len(runs) == limits.METADATA_RETRIES


async def test_read_sees_one_snapshot(database: Database) -> None:
    """Two statements of one read see the same state, whatever is written between them."""
    first, go_on = threading.Event(), threading.Event()
    count = text("SELECT count(*) FROM tenants")

    def twice(connection: Connection) -> tuple[object, object]:
        before = connection.execute(count).scalar()
        first.set()
        assert go_on.wait(5)
        return before, connection.execute(count).scalar()

    reading = asyncio.ensure_future(database.read(twice))
    await asyncio.to_thread(first.wait, 5)
    insert = text("INSERT INTO tenants (name, created_ms) VALUES ('x', 0)")
    await database.write(lambda c: c.execute(insert).rowcount)
    go_on.set()
    assert await reading == (0, 0)
    assert await database.read(lambda c: c.execute(count).scalar()) == 1


async def test_slow_call_times_out(path: Path) -> None:
    """A call that does not end in time is unavailable; it still ends, and its commit is told."""
    before = Database(f"sqlite:///{path}", busy_ms=50, call_ms=5_000)
    await before.create(lambda connection: None)
    await before.close()
    database = Database(f"sqlite:///{path}", busy_ms=50, call_ms=100)
    go_on, committed = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        assert go_on.wait(5)

    with refuses(Unavailable, "metadata_unavailable", "no answer in 100 ms"):
        await database.write(slow, committed.set)
    go_on.set()
    await database.close()
    assert committed.is_set()


async def test_too_many_waiting_calls(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a call is refused at once instead of queueing."""
    monkeypatch.setattr(limits, "METADATA_PENDING", 2)
    go_on = threading.Event()
    waiting = [asyncio.ensure_future(database.read(lambda c: go_on.wait(5))) for _ in range(2)]
    await asyncio.sleep(0)
    with refuses(Unavailable, "metadata_unavailable", "2 calls are waiting"):
        await database.read(lambda c: None)
    go_on.set()
    assert await asyncio.gather(*waiting) == [True, True]
    await database.read(lambda c: None)


async def test_closed_is_unavailable(path: Path) -> None:
    """After close every call is unavailable, and waiting for changes ends."""
    metadata = await opened(path)
    version = (await metadata.changes(0, 0)).version
    waiting = asyncio.ensure_future(metadata.changes(version, 30_000))
    await asyncio.wait([waiting], timeout=0.05)
    await metadata.close()
    with refuses(Unavailable, "metadata_unavailable"):
        await waiting
    with refuses(Unavailable, "metadata_unavailable", "closed"):
        await metadata.stores()
