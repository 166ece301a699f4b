"""The SQL database behind the metadata part: transactions off the event loop, bounded and with a timeout.

    call (event loop) -> bounded pool of threads -> one transaction -> commit -> answer

A call is a plain function of a `Connection`; it runs in one transaction, may run more than once (a transaction
that gave way to a concurrent one is repeated here and nowhere else) and has no effect outside the database. A
call that was accepted goes on when its caller is gone. On SQLite one thread does all writes of the process: they
queue in order instead of competing for the file's lock. Driver exceptions come out as `MillpondError`s.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection, Engine, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from millpond.core import limits
from millpond.core.errors import Internal, Unavailable
from millpond.metadata import failures
from millpond.metadata.engine import for_read, for_write, make_engine, make_file, place
from millpond.metadata.tables import HEAD, METADATA, SCHEMA_VERSION

Answer = TypeVar("Answer")
Call = Callable[[Connection], Answer]

_SCHEMA_LOCK = 7_205_759_403  # any constant: two processes must not create the tables at once


class Database:
    """`read` and `write` from any task of one event loop; `close` once, last."""

    def __init__(self, url: str, *, busy_ms: int, call_ms: int) -> None:
        self._url = url
        self._place = place(url)
        self._call_ms = call_ms
        self._engine: Engine = make_engine(url, busy_ms, call_ms)
        self._readers = ThreadPoolExecutor(limits.METADATA_THREADS, "metadata")
        alone = self.dialect == "sqlite"
        self._writers = ThreadPoolExecutor(1, "metadata-writer") if alone else self._readers
        self._pending = 0
        self._closed = False

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    async def read(self, call: Call[Answer]) -> Answer:
        """What `call` finds in one snapshot. Raises Unavailable, Internal(metadata_corrupt), and what `call` does."""
        return await self._run(self._readers, lambda: self._transaction(call, for_read))

    async def write(self, call: Call[Answer], committed: Callable[[], None] | None = None) -> Answer:
        """Run `call` and commit; an exception rolls back. `committed` is called in the thread after the commit,
        also when the caller has gone away."""

        def run() -> Answer:
            answer = self._transaction(call, for_write)
            if committed is not None:
                committed()
            return answer

        return await self._run(self._writers, run)

    async def create(self, prepare: Callable[[Connection], None]) -> None:
        """Make the tables in an empty database, then `prepare` their first rows; else check the schema version.
        Raises Internal(newer_format) for one that a newer release made."""

        def create(connection: Connection) -> None:
            if self.dialect == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _SCHEMA_LOCK})
            if not inspect(connection).has_table(HEAD.name):
                METADATA.create_all(connection, checkfirst=False)
                connection.execute(HEAD.insert().values(one=1, schema_version=SCHEMA_VERSION, version=1, floor=0))
                prepare(connection)
            self._check_version(connection)

        def run() -> None:
            try:
                make_file(self._url)
            except OSError as error:
                raise failures.away(error, self._place) from error
            self._transaction(create, for_write)

        await self._run(self._writers, run)

    def _check_version(self, connection: Connection) -> None:
        found = connection.execute(select(HEAD.c.schema_version)).scalar()
        if found is None or found < 1:
            raise Internal("metadata_corrupt", f"{self._place}: it does not say its schema version")
        if found != SCHEMA_VERSION:
            detail = f"{self._place}: schema version {found}, this release knows up to {SCHEMA_VERSION}; upgrade it"
            raise Internal("newer_format", detail, found=found, known=SCHEMA_VERSION)

    async def close(self) -> None:
        """Wait for the calls under way, then close every connection. Later calls are Unavailable."""
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._shut)

    def _shut(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()
        self._engine.dispose()

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], Answer]) -> Answer:
        if self._closed:
            raise Unavailable("metadata_unavailable", f"{self._place}: closed")
        if self._pending >= limits.METADATA_PENDING:
            raise Unavailable("metadata_unavailable", f"{self._place}: {self._pending} calls are waiting already")
        self._pending += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(pool, work)
            async with asyncio.timeout(self._call_ms / 1000):  # wait_for loses a cancel that meets the answer (3.11)
                return await future
        except TimeoutError:
            raise Unavailable("metadata_unavailable", f"{self._place}: no answer in {self._call_ms} ms") from None
        finally:
            self._pending -= 1

    def _transaction(self, call: Call[Answer], mode: Callable[[Engine, Connection], Connection]) -> Answer:
        for attempt in range(limits.METADATA_RETRIES):
            try:
                with self._engine.connect() as connection, mode(self._engine, connection).begin():
                    return call(connection)
            except (SQLAlchemyError, sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
                if failures.gives_way(error) and attempt + 1 < limits.METADATA_RETRIES:
                    continue
                translated = failures.translate(error, self._place)
                if translated is None:
                    raise
                raise translated from error
        raise AssertionError("the last attempt returns or raises")
