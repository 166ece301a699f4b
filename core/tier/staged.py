"""An object that is kept in memory until it is put: `StagedInMemory`, for stores that take an object in one piece."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class StagedInMemory:
    """A `Staged` over the store's own `put_new`."""

    def __init__(self, put_new: Callable[[str, bytes | memoryview, str], Awaitable[None]]) -> None:
        self._put_new = put_new
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        self._data += data

    async def publish(self, key: str, sha256: str) -> None:
        await self._put_new(key, memoryview(self._data), sha256)

    def drop(self) -> None:
        self._data = bytearray()
