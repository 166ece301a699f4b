"""A file for Arrow to write to: small writes are put together, large buffers kept as they are.

So the bodies of a frame go from where they were read to the socket, and the columns of a checkpoint from where they
were copied to the disk, without another copy in between. What was written must not change until it has been used.
"""

from __future__ import annotations

from typing import TypeAlias

import pyarrow as pa

from millpond.core.limits import KIB

Buffer: TypeAlias = bytes | bytearray | memoryview | pa.Buffer

GATHERED_BYTES = 16 * KIB
"""Buffers below are copied together: a piece of its own costs the kernel about as much as copying so many bytes."""


class Gathered:
    closed = False

    def __init__(self) -> None:
        self._whole: list[Buffer] = []
        self._small: list[Buffer] = []
        self._position = 0

    def write(self, data: Buffer) -> int:
        size = len(data)
        self._position += size
        if size < GATHERED_BYTES:
            self._small.append(data)
        else:
            self._join()
            self._whole.append(data)
        return size

    def _join(self) -> None:
        if self._small:
            self._whole.append(b"".join(self._small))
            self._small = []

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Nothing to do: all is in memory."""

    def close(self) -> None:
        self.closed = True

    def whole(self) -> list[Buffer]:
        self._join()
        return self._whole
