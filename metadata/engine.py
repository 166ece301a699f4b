"""A SQLAlchemy engine for a metadata URL, with the settings that durability and clear failures need.

SQLite (`sqlite:///path`): WAL, synchronous=FULL (NORMAL loses acknowledged commits in a power cut), foreign keys,
a busy timeout, and transactions that begin as told: BEGIN for reads, BEGIN IMMEDIATE for writes, so that two
writers queue up instead of failing half way. The file is made for its owner only: it holds key hashes and the
secrets that sign leases.

PostgreSQL (`postgresql://..`, driver psycopg): timeouts on connecting, statements, locks and dead peers. Writes
run READ COMMITTED and take explicit row locks first; reads run REPEATABLE READ, READ ONLY: one snapshot.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from millpond.core import limits
from millpond.core.errors import BadRequest, Unavailable

WRITES = "millpond_writes"  # execution option: this transaction will write


def make_engine(url: str, busy_ms: int, call_ms: int) -> Engine:
    """An engine that has not connected yet. Raises BadRequest for a URL that cannot be served."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, busy_ms)
    return _postgresql(parsed, busy_ms, call_ms)


def parse_url(url: str) -> URL:
    """`url` checked and with its driver named."""
    expected = "sqlite:///path or postgresql://user@host/database"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise BadRequest.field("metadata.database", expected) from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
            raise BadRequest.field("metadata.database", "sqlite:///path, a file: memory is not kept")
        return parsed.set(drivername="sqlite")
    if backend != "postgresql":
        raise BadRequest.field("metadata.database", expected, backend)
    if find_spec("psycopg") is None:
        raise BadRequest.field("metadata.database", "the package psycopg; install millpond[postgresql]")
    return parsed.set(drivername="postgresql+psycopg")


def place(url: str) -> str:
    """The database as messages name it: no user, no password."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return f"metadata database {parsed.database}"
    return f"metadata database {parsed.database} on {parsed.host or 'the local socket'}"


def _sqlite(url: URL, busy_ms: int) -> Engine:
    engine = create_engine(url, pool_size=limits.METADATA_THREADS + 1, max_overflow=0, pool_timeout=busy_ms / 1000)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself: `begin` below does
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={busy_ms}")
        mode = cursor.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise Unavailable("metadata_unavailable", f"{url.database}: this file system cannot hold a WAL database")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def make_file(url: str) -> None:
    """Make the SQLite file and its folder, readable by the owner only. The journal files inherit its mode."""
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        return
    assert parsed.database is not None, "parse_url refuses a URL without a path"
    path = Path(parsed.database)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    for folder in (path.parent, path.parent.parent):  # so that a power cut does not take the new entries back
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _postgresql(url: URL, busy_ms: int, call_ms: int) -> Engine:
    settings = {
        "statement_timeout": call_ms,
        "lock_timeout": busy_ms,
        "idle_in_transaction_session_timeout": 2 * call_ms,  # a stuck peer must not keep a row lock
        "synchronous_commit": "on",
        "timezone": "UTC",
    }
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    return create_engine(
        url,
        pool_size=limits.METADATA_THREADS,
        max_overflow=0,
        pool_timeout=busy_ms / 1000,
        pool_pre_ping=True,  # a server that restarted costs nobody an error
        connect_args={
            "options": options,
            "connect_timeout": max(2, busy_ms // 1000),  # seconds; libpq rounds 1 up to 2
            "tcp_user_timeout": call_ms,
            "application_name": "millpond",
        },
    )


def for_read(engine: Engine, connection: Connection) -> Connection:
    """`connection` set so that its next transaction reads one snapshot."""
    if engine.dialect.name == "postgresql":
        return connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return connection


def for_write(engine: Engine, connection: Connection) -> Connection:
    """`connection` set so that its next transaction may write."""
    if engine.dialect.name == "postgresql":
        return connection.execution_options(isolation_level="READ COMMITTED")
    return connection.execution_options(**{WRITES: True})
