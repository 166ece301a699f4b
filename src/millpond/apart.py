"""`millpond metadata`, `millpond store`, `millpond proxy`: the parts as processes of their own, over HTTP.

They show each other the cluster secret, from a file that `metadata` makes at its first start and the others are
given (`--cluster-secret-file`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.config import Config
from millpond.core.errors import StartupError
from millpond.core.http.routing import Route, Router
from millpond.core.http.secret import SecretGate, load_or_create_secret, load_secret
from millpond.core.http.server import HttpServer, split_listen
from millpond.core.tier.open import open_objects
from millpond.metadata import server as metadata_server
from millpond.metadata.local import LocalMetadata
from millpond.metadata.remote import RemoteMetadata
from millpond.proxy.app import Proxy
from millpond.proxy.parts import Siblings
from millpond.standalone import check_tier, first_failure, made
from millpond.store import server as store_server
from millpond.store.local import LocalStore
from millpond.store.remote import RemoteStore


class Part:
    """One part, up. `facts`: for its greeting; `numbers()`: what it counts."""

    def __init__(
        self,
        name: str,
        address: str,
        facts: dict[str, str],
        ends: AsyncExitStack,
        failed: asyncio.Future[BaseException],
        numbers: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.address = address
        self.facts = {"url": address, **facts}
        self.failed = failed
        self.numbers = numbers
        self._name, self._ends = name, ends

    def greeting(self) -> list[str]:
        return greeting(self._name, self.facts)

    async def close(self) -> None:
        await self._ends.aclose()


def greeting(name: str, facts: dict[str, str]) -> list[str]:
    return [f"Millpond {name}", *(f"  {fact:<9}{value}" for fact, value in facts.items())]


async def start_metadata(config: Config) -> Part:
    """The metadata part. Its data directory also holds the cluster secret, unless another file is named."""
    clock, random = SystemClock(), SystemRandom()
    data = made(config.metadata.data)
    secret_file = Path(config.metadata.cluster_secret_file or data / "cluster-secret")
    secret = _secret(secret_file, make=True)
    async with AsyncExitStack() as ends:
        url = config.metadata.database or f"sqlite:///{data / 'metadata.db'}"
        metadata = await LocalMetadata.open(url, clock, random)
        ends.push_async_callback(metadata.close)
        server, failed = await _serve(metadata_server.routes(metadata), config.metadata.listen, secret, ends)
        return Part("metadata", server.address, {"secret": str(secret_file)}, ends.pop_all(), failed)


async def start_store(config: Config) -> Part:
    """A store. It registers the address others reach it at: `advertise`, else where it listens."""
    clock, random = SystemClock(), SystemRandom()
    secret = _secret(Path(config.store.cluster_secret_file))
    listen = _definite(config.store.listen)
    advertise = config.store.advertise or f"http://{listen}"
    async with AsyncExitStack() as ends:
        metadata = RemoteMetadata(config.store.metadata, secret)
        ends.push_async_callback(metadata.close)
        objects = open_objects(config.tier, config.store.data, clock, random)
        ends.push_async_callback(objects.close)
        await check_tier(objects, Path(config.store.data))
        settings = msgspec.structs.replace(config.store, advertise=advertise)
        store = await LocalStore.open(settings, config.tier, metadata, objects, clock, random)
        ends.push_async_callback(store.close)
        server, failed = await _serve(store_server.routes(store), listen, secret, ends)
        facts = {"group": config.store.group, "data": config.store.data, "tier": objects.url}
        return Part("store", server.address, facts, ends.pop_all(), first_failure(store.failed, failed))


async def start_proxy(config: Config, siblings: Siblings | None = None) -> Part:
    """A proxy: it learns the stores from metadata. It reads the tier itself, so it is given the same one.

    `siblings`: what all workers count, where this is one of several behind one port.
    """
    clock, random = SystemClock(), SystemRandom()
    secret = _secret(Path(config.proxy.cluster_secret_file))
    if not config.tier.url:
        raise StartupError("a proxy that runs apart does not know the tier", "give the stores' own with --tier")
    async with AsyncExitStack() as ends:
        metadata = RemoteMetadata(config.proxy.metadata, secret)
        ends.push_async_callback(metadata.close)
        objects = open_objects(config.tier, "", clock, random)
        ends.push_async_callback(objects.close)
        proxy = Proxy(
            config.proxy,
            metadata,
            objects,
            clock,
            random,
            open_store=lambda info: RemoteStore(info.address, secret),
            siblings=siblings,
        )
        await proxy.start()
        ends.push_async_callback(proxy.stop)
        facts = {"metadata": config.proxy.metadata, "tier": objects.url, "docs": f"{proxy.address}/docs"}
        return Part("proxy", proxy.address, facts, ends.pop_all(), proxy.failed, proxy.parts.counters.snapshot)


async def _serve(
    routes: list[Route], listen: str, secret: str, ends: AsyncExitStack
) -> tuple[HttpServer, asyncio.Future[BaseException]]:
    """An internal listener: whoever does not show the cluster secret is refused; and what its death completes."""
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def on_death(_name: str, error: BaseException) -> None:
        if not failed.done():
            failed.set_result(error)

    server = HttpServer(Router(routes), SecretGate(secret), None, SystemRandom(), on_death=on_death)
    await server.start(listen)
    ends.push_async_callback(server.stop)
    return server, failed


def _secret(path: Path, make: bool = False) -> str:
    """The cluster secret. Raises StartupError."""
    if path == Path():
        raise StartupError(
            "no cluster secret is named", "give the file that `millpond metadata` made with --cluster-secret-file"
        )
    try:
        return load_or_create_secret(path) if make else load_secret(path)
    except FileNotFoundError as error:
        raise StartupError(f"there is no cluster secret at {path}", "start `millpond metadata` first") from error
    except ValueError as error:
        raise StartupError(str(error), "correct the file, or name another with --cluster-secret-file") from error


def _definite(listen: str) -> str:
    """`listen` with a port: a store is registered before it listens, so that port 0 must be resolved before."""
    host, port = split_listen(listen)
    if port:
        return listen
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        chosen = probe.getsockname()[1]
    return f"[{host}]:{chosen}" if ":" in host else f"{host}:{chosen}"
