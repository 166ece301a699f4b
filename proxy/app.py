"""The proxy: `Parts` from configuration and clients, all routes, one listener.

`Proxy` is given its clients, so that the launcher runs it with direct calls (standalone) or with remote ones (apart);
it owns what it makes itself (catalog, coalescer, reader) and ends it in `stop`, clients excepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millpond.core import limits
from millpond.core.clock import Clock, Random
from millpond.core.config import ProxyConfig
from millpond.core.errors import MillpondError, StartupError
from millpond.core.http.call import BodyPace
from millpond.core.http.connection import Bounds
from millpond.core.http.routing import Route, Router
from millpond.core.http.server import DRAIN_SECONDS, HttpServer
from millpond.core.tasks import OnDeath, Tasks
from millpond.core.tier.objects import ObjectStore
from millpond.core.tier.reader import TierReader
from millpond.metadata.client import MetadataClient, StoreInfo
from millpond.proxy.auth import KeyGate, check_listen
from millpond.proxy.catalog import Catalog
from millpond.proxy.coalesce import Coalescer
from millpond.proxy.counters import Counters
from millpond.proxy.frames import FrameCache
from millpond.proxy.parts import Parts, Siblings, Stores
from millpond.proxy.read_range import RangeReader
from millpond.proxy.receipts import LeaseTokens
from millpond.proxy.routes import (
    admin,
    docs,
    find,
    groups,
    history,
    lag,
    ops,
    produce,
    read,
    receive,
    replays,
    seek,
    settle,
    topics,
)
from millpond.store.client import StoreClient

STORES_SECONDS = 5.0  # how often the registered stores are looked at, beside every move of the catalog's feed
_API = (topics, produce, receive, settle, groups, lag, seek, read, find, history, replays, admin, ops)

_log = logging.getLogger("millpond.proxy")
OpenStore = Callable[[StoreInfo], StoreClient]


def all_routes() -> list[Route]:
    """Every call of the public interface, and the pages that describe them."""
    routes = [route for module in _API for route in module.ROUTES]
    return [*routes, *docs.routes(routes)]


FIRST_SECONDS = 2.0  # for the first word of metadata, so that a proxy that says it is ready is


class Proxy:
    """One proxy. Either `stores` (group -> client, made by the caller) or `open_store` (called for every store that
    metadata names, and again when its address changed) says how stores are reached."""

    def __init__(
        self,
        config: ProxyConfig,
        metadata: MetadataClient,
        objects: ObjectStore,
        clock: Clock,
        random: Random,
        *,
        stores: Mapping[str, StoreClient] | None = None,
        open_store: OpenStore | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        assert (stores is None) != (open_store is None), "stores are given, or there is a way to open them"
        self._config = config
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._directory = None if open_store is None else _StoreDirectory(metadata, open_store, self._on_death)
        on_change = self._directory.wake if self._directory is not None else None
        self._catalog = Catalog(metadata, clock, on_change, self._on_death)
        self._tier = TierReader(objects, config.tier_cache_bytes, config.cold_reads, clock)
        known = Stores(self._directory.clients if self._directory is not None else dict(stores or {}))
        self.parts = Parts(
            config=config,
            clock=clock,
            random=random,
            metadata=metadata,
            catalog=self._catalog,
            stores=known,
            objects=objects,
            tokens=LeaseTokens(metadata, clock),
            coalescer=Coalescer(known.of),
            reader=RangeReader(known, metadata, self._tier, FrameCache(config.frame_cache_bytes)),
            counters=Counters(),
            siblings=siblings,
        )
        self._server = HttpServer(
            Router(all_routes()), KeyGate(self._catalog), self.parts, random, _bounds(config), self._on_death
        )
        self._gauges()

    @property
    def address(self) -> str:
        """`http://host:port` once it has started."""
        return self._server.address

    async def start(self) -> None:
        """Listen. Raises StartupError (address taken; not loopback and no key)."""
        try:
            keys_exist = await self.parts.metadata.keys_exist()
        except MillpondError as error:
            _log.warning("metadata is away at start (%s): every call needs a key until it is heard of", error)
            keys_exist = True
        check_listen(self._config.listen, keys_exist)
        if not keys_exist:
            _log.warning("open mode: no API key exists, everybody on this machine is the tenant 'default'")
        if self._directory is not None:
            await self._directory.start()
        await self._catalog.start()
        if not await self._catalog.heard(FIRST_SECONDS):
            _log.warning("metadata has not answered yet: this proxy starts without a catalog")
        try:
            await self._server.start(self._config.listen, shared=self._config.processes > 1)
        except StartupError:
            await self.stop(0)
            raise

    async def stop(self, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Drain, then end what this made. Idempotent."""
        await self._server.stop(drain_seconds)
        await self.parts.releases.finish(limits.CALL_MS / 1_000)
        await self.parts.coalescer.close()
        await self._catalog.close()
        if self._directory is not None:
            await self._directory.close()
        await self._tier.close()

    def _on_death(self, _name: str, error: BaseException) -> None:
        """A task without which this proxy would go on with stale knowledge: `failed` is done, its process ends."""
        if not self.failed.done():
            self.failed.set_result(error)

    def _gauges(self) -> None:
        counters, server = self.parts.counters, self._server
        counters.gauge("connections", lambda: float(server.connections))
        counters.gauge("draining", lambda: float(server.draining))
        counters.gauge("catalog_fresh", lambda: float(self._catalog.fresh))
        counters.group("requests_total", "status", lambda: {str(k): float(v) for k, v in server.requests.items()})


def _bounds(config: ProxyConfig) -> Bounds:
    return Bounds(
        connections=config.connections,
        header_seconds=config.header_seconds,
        pace=BodyPace(config.body_seconds, limits.BODY_BYTES_PER_SECOND),
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    address: str
    client: StoreClient


class _StoreDirectory:
    """The registered stores as clients, kept up to date; a store that moved is opened anew."""

    def __init__(self, metadata: MetadataClient, open_store: OpenStore, on_death: OnDeath) -> None:
        self.clients: dict[str, StoreClient] = {}
        self._metadata = metadata
        self._open_store = open_store
        self._opened: dict[str, _Opened] = {}
        self._moved = asyncio.Event()
        self._tasks = Tasks(on_death)

    async def start(self) -> None:
        try:
            await self._refresh()
        except (MillpondError, TimeoutError) as error:
            _log.warning("no store is known yet: %s", error)
        self._tasks.spawn(self._follow(), "directory of stores")

    def wake(self) -> None:
        self._moved.set()

    async def close(self) -> None:
        await self._tasks.close()
        for opened in self._opened.values():
            await _close(opened.client)

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(STORES_SECONDS):
                    await self._moved.wait()
            except TimeoutError:
                pass  # time to look anyway: a registration may not have reached the feed
            self._moved.clear()
            try:
                await self._refresh()
            except (MillpondError, TimeoutError) as error:
                _log.warning("the directory of stores is not refreshed: %s", error)

    async def _refresh(self) -> None:
        async with asyncio.timeout(limits.CALL_MS / 1_000):
            found = await self._metadata.stores()
        for info in found:
            known = self._opened.get(info.store_group)
            if not info.address or (known is not None and known.address == info.address):
                continue
            client = self._open_store(info)
            self._opened[info.store_group] = _Opened(info.address, client)
            self.clients[info.store_group] = client
            if known is not None:
                await _close(known.client)


async def _close(client: StoreClient) -> None:
    """A remote client has connections to close; `StoreClient` itself has no end."""
    close = getattr(client, "close", None)
    if close is not None:
        await close()
