"""The threads that sealing works in: `SealThreads`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class SealThreads:
    """Four, side by side; each does what it is given in that order."""

    def __init__(self) -> None:
        self._before = ThreadPoolExecutor(1, thread_name_prefix="seal-rows")
        self._encode = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._hash = ThreadPoolExecutor(1, thread_name_prefix="seal-hash")
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="seal-write")

    def before(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """What makes ready what is encoded next."""
        return asyncio.get_running_loop().run_in_executor(self._before, call)

    def encode(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._encode, call)

    def hash(self, call: Callable[[], T]) -> Future[T]:
        """What hashes what was encoded, while `behind` writes it."""
        return self._hash.submit(call)

    def behind(self, call: Callable[[], T]) -> Future[T]:
        """What writes what was encoded; asked for, as `hash`, by the thread that encodes."""
        return self._behind.submit(call)

    def close(self) -> None:
        """What was given to the last two is still done."""
        self._before.shutdown(wait=False, cancel_futures=True)
        self._encode.shutdown(wait=False, cancel_futures=True)
        self._hash.shutdown(wait=False)
        self._behind.shutdown(wait=False)
