"""`millpond standalone`: metadata, store and proxy in one process and one event loop, with direct calls.

DATA/metadata.db   the catalog (SQLite), unless a database is set
DATA/store/        the log
DATA/tier/         the cold copy, unless a tier is set
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.config import Config
from millpond.core.errors import MillpondError, StartupError
from millpond.core.tier.objects import ObjectStore
from millpond.core.tier.open import open_objects
from millpond.metadata.local import LocalMetadata
from millpond.proxy.app import Proxy
from millpond.store import identity as store_identity
from millpond.store.local import LocalStore


class Standalone:
    """All parts, up. `close` ends them in the opposite order: drain, checkpoint and mark, database."""

    def __init__(
        self, config: Config, proxy: Proxy, objects: ObjectStore, failed: asyncio.Future[BaseException], is_open: bool
    ) -> None:
        self.address = proxy.address
        self.failed = failed
        self._config = config
        self._objects = objects
        self._is_open = is_open
        self._ends = AsyncExitStack()

    @classmethod
    async def start(cls, config: Config) -> Standalone:
        """Raises StartupError, DirectoryRefused, MillpondError, OSError; then nothing is left running."""
        clock, random = SystemClock(), SystemRandom()
        data = made(config.store.data)
        async with AsyncExitStack() as ends:
            url = config.metadata.database or f"sqlite:///{data / 'metadata.db'}"
            metadata = await LocalMetadata.open(url, clock, random)
            ends.push_async_callback(metadata.close)
            objects = open_objects(config.tier, data, clock, random)
            ends.push_async_callback(objects.close)
            await check_tier(objects, data / "store")
            store_config = msgspec.structs.replace(config.store, data=str(data / "store"), advertise="")
            store = await LocalStore.open(store_config, config.tier, metadata, objects, clock, random)
            ends.push_async_callback(store.close)
            stores = {config.store.group: store}
            proxy = Proxy(config.proxy, metadata, objects, clock, random, stores=stores)
            await proxy.start()
            ends.push_async_callback(proxy.stop)
            failed = first_failure(store.failed, proxy.failed)
            running = cls(config, proxy, objects, failed, not await metadata.keys_exist())
            running._ends = ends.pop_all()
            return running

    def greeting(self) -> list[str]:
        lines = [
            "Millpond standalone",
            f"  url    {self.address}",
            f"  data   {Path(self._config.store.data).absolute()}",
            f"  tier   {self._objects.url}",
        ]
        if self._is_open:
            lines.append("  open   no API key exists: everybody on this machine may do everything")
        return [*lines, f"  try    {first_step(self.address)}", f"  docs   {self.address}/docs"]

    async def close(self) -> None:
        await self._ends.aclose()


def first_failure(*parts: asyncio.Future[BaseException]) -> asyncio.Future[BaseException]:
    """Done once one of the parts has failed."""
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def note(part: asyncio.Future[BaseException]) -> None:
        if not part.cancelled() and not failed.done():
            failed.set_result(part.result())

    for part in parts:
        part.add_done_callback(note)
    return failed


def first_step(address: str) -> str:
    at = "" if address.endswith(":8080") else f" --url {address}"
    return f"millpond topic create hello{at} && millpond produce hello 'first message'{at}"


def made(folder: str) -> Path:
    """The folder, made when it is not there. Raises OSError."""
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


async def check_tier(objects: ObjectStore, store_data: Path) -> None:
    """Before a store's first start: raises StartupError when the tier cannot be used, which is most likely a mistake
    in its settings. A store that has started before goes on without its tier: sealing waits, and says so."""
    if await asyncio.to_thread((store_data / store_identity.NAME).exists):
        return
    try:
        await objects.check()
    except MillpondError as error:
        raise StartupError(
            f"the tier {objects.url} cannot be used: {error.detail}", "correct --tier, its endpoint and credentials"
        ) from error
