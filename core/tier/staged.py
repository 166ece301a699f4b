"""An object that is kept in memory until it is put, for stores that take an object in one piece: `StagedInMemory`.

`compare` tells what a store has from what it was given.
"""

from __future__ import annotations

import hashlib

from millpond.core.errors import Internal, NotFound, Unavailable
from millpond.core.tier.objects import ObjectStore


class StagedInMemory:
    """A `Staged` over the store's own calls."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._data = bytearray()

    def write(self, data: memoryview) -> None:
        self._data += data

    async def publish(self, key: str, sha256: str) -> None:
        await self._objects.put_new(key, memoryview(self._data), sha256)
        await compare(self._objects, key, len(self._data), sha256)

    def drop(self) -> None:
        self._data = bytearray()


async def compare(objects: ObjectStore, key: str, size: int, sha256: str) -> None:
    """Whether that is what is there. Raises Unavailable(tier_unavailable), Internal(tier_corrupt)."""
    try:
        meta = await objects.head(key)
    except NotFound:
        raise Unavailable("tier_unavailable", f"{key} was put and is not there") from None
    found = meta.sha256 or hashlib.sha256(await objects.get(key)).hexdigest()
    if (meta.bytes, found) != (size, sha256):
        raise Internal("tier_corrupt", f"{key} holds other bytes than were put", path=key, missing=False)
