"""A least-recently-used cache bounded by bytes: `ByteCache`. Rebuildable: from the tier's objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class ByteCache(Generic[V]):
    """Values with their sizes; the oldest go when the sum exceeds `bytes_most`. A larger value is not kept."""

    def __init__(self, bytes_most: int) -> None:
        self._bytes_most = bytes_most
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self.bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get(self, key: Hashable) -> V | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, value: V, size: int) -> None:
        self.drop(key)
        if size > self._bytes_most:
            return
        self._values[key] = (value, size)
        self.bytes += size
        while self.bytes > self._bytes_most:
            _, (_, freed) = self._values.popitem(last=False)
            self.bytes -= freed

    def drop(self, key: Hashable) -> None:
        if (old := self._values.pop(key, None)) is not None:
            self.bytes -= old[1]
