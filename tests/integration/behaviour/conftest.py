"""Every test of this folder runs on Millpond as one process and as three; each is started once per session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from integration.behaviour.world import Http, Service, fresh
from support.processes import Process

KINDS = ["standalone", "apart"]


@pytest.fixture(scope="session", params=KINDS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The one that most tests share, each with a topic of its own."""
    one = Service(request.param, tmp_path_factory.mktemp(request.param))
    try:
        asyncio.run(one.start())
        yield one
    finally:
        one.close()


@pytest.fixture(params=KINDS)
def own_service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for a single test: what it does (API keys) would change the others'."""
    one = Service(request.param, tmp_path_factory.mktemp("own"))
    try:
        asyncio.run(one.start())
        yield one
    finally:
        one.close()


@pytest.fixture(scope="session")
def strict_url(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a proxy with short limits: a second for a head or a body, and 20 connections."""
    folder = tmp_path_factory.mktemp("strict")
    flags = ["--connections", "20", "--header-seconds", "1", "--body-seconds", "1"]
    if service.kind == "apart":
        process = service.proxy_beside(folder, *flags)
    else:
        process = Process(folder, "standalone", ["--data", str(folder / "data"), *flags])
    try:
        asyncio.run(process.start())
        yield process.url
    finally:
        process.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as one:
        yield one


@pytest.fixture
async def http(service: Service, session: aiohttp.ClientSession) -> Http:
    return Http(service.url, session)


@pytest.fixture
async def topic(http: Http) -> str:
    """A topic of one queue that nobody else uses."""
    name = fresh()
    await http.make(name)
    return name


@pytest.fixture
async def wide(http: Http) -> str:
    """A topic of four queues that nobody else uses."""
    name = fresh()
    await http.make(name, queues=4)
    return name
