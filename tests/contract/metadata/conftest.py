"""Every way to reach the metadata part: direct calls on SQLite and on PostgreSQL, the same pushed through the codec of
calls between parts, and real HTTP on loopback. One behaviour suite, in this folder, runs on each."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from support.metadata import PATIENCE, Pond, SteppedClock

from millpond.core.clock import SystemRandom
from millpond.core.errors import Unauthenticated
from millpond.core.http import rpc
from millpond.core.http.routing import Router
from millpond.core.http.secret import SECRET_HEADER, same_secret
from millpond.core.http.server import HttpServer
from millpond.metadata.client import MetadataClient
from millpond.metadata.local import LocalMetadata
from millpond.metadata.remote import RemoteMetadata
from millpond.metadata.server import routes

WAYS = ["sqlite", "codec", "http", "postgresql"]
CLUSTER_SECRET = "a secret of one test's loopback listener"  # noqa: S105


class SecretGate:
    """The cluster secret opens every route."""

    def known(self, request: Any, scope: object) -> object:
        if not same_secret(request.headers.get(SECRET_HEADER), CLUSTER_SECRET):
            raise Unauthenticated("unauthenticated", "cluster secret")
        return object()

    async def admit(self, request: Any, scope: object) -> object:
        raise AssertionError("known answers or raises")


# -- a PostgreSQL of our own ------------------------------------------------------------------------------


def _postgresql_programs() -> Path | None:
    """The folder of initdb and pg_ctl: on PATH, or where Debian keeps the servers beside each other."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    return max((path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")), default=None)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """URL (without database) of a private server on a Unix socket, gone after the session."""
    programs = _postgresql_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server programs here (initdb): Debian has them in the package postgresql")
    owner: dict[str, Any] = {}
    if os.geteuid() == 0:  # the server refuses to run as root
        if "postgres" not in {user.pw_name for user in pwd.getpwall()}:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        owner = {"user": "postgres", "group": "postgres", "extra_groups": []}
    folder = Path(tempfile.mkdtemp(prefix="millpond-pg-"))
    if owner:
        shutil.chown(folder, "postgres", "postgres")

    def run(program: str, *arguments: str) -> None:
        command = [str(programs / program), "-D", str(folder / "data"), *arguments]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=200, **owner)  # noqa: S603

    try:
        run("initdb", "--auth=trust", "--username=postgres", "--no-sync", "--locale=C.UTF-8", "--encoding=UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off -c max_connections=60"
        run("pg_ctl", "--wait", f"--options={options}", f"--log={folder / 'log'}", "start")
        try:
            yield f"postgresql://postgres@/{{}}?host={folder}"
        finally:
            run("pg_ctl", "--wait", "--mode=immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_numbers = itertools.count(1)


def _new_database(server: str) -> str:
    name = f"millpond_{next(_numbers)}"
    engine = create_engine(server.format("postgres").replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server.format(name)


# -- the ways to reach it ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _over_http(local: LocalMetadata) -> AsyncIterator[MetadataClient]:
    server = HttpServer(Router(routes(local)), SecretGate(), None, SystemRandom())
    await server.start("127.0.0.1:0")
    remote = RemoteMetadata(server.address, CLUSTER_SECRET)
    try:
        yield remote
    finally:
        await remote.close()
        await server.stop()


@pytest.fixture(params=WAYS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return _new_database(request.getfixturevalue("postgresql"))
    return f"sqlite:///{tmp_path / 'metadata.db'}"


@pytest.fixture
async def pond(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Pond]:
    clock = SteppedClock()
    local = await LocalMetadata.open(url, clock, SystemRandom(), **PATIENCE)
    way = request.node.callspec.params["url"]
    try:
        if way == "http":
            async with _over_http(local) as remote:
                yield Pond(remote, clock, url)
        else:
            direct: MetadataClient = local
            through = rpc.through_codec(MetadataClient, direct) if way == "codec" else direct
            yield Pond(through, clock, url)
    finally:
        await local.close()


@pytest.fixture
def metadata(pond: Pond) -> MetadataClient:
    return pond.metadata
