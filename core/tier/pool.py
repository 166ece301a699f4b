"""Blocking calls of an object store, in a bounded pool of threads: `ObjectPool`.

A call that has timed out cannot be stopped: its thread goes on until the operating system lets it go, and its
slot stays taken so long. So a hung disk or server blocks at most the pool, never the event loop, and further
calls time out while they wait for a slot, with an error that says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from millpond.core.errors import Unavailable

T = TypeVar("T")


class ObjectPool:
    """`threads` blocking calls at once; the others wait for their turn, inside their own time limit."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._slots = asyncio.Semaphore(threads)

    async def run(self, seconds: float, what: str, call: Callable[[], T]) -> T:
        """`call()` in a thread. Raises Unavailable(tier_unavailable) after `seconds`, the wait for a slot included."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        try:
            async with asyncio.timeout_at(ends):
                await self._slots.acquire()
        except TimeoutError:
            raise Unavailable("tier_unavailable", f"{what}: no free thread within {seconds:.0f} s") from None
        try:
            future = loop.run_in_executor(self._executor, call)
        except RuntimeError:
            self._slots.release()
            raise Unavailable("tier_unavailable", f"{what}: the object store is closed") from None
        future.add_done_callback(self._free)
        await asyncio.wait({future}, timeout=max(0.0, ends - loop.time()))
        if not future.done():
            raise Unavailable("tier_unavailable", f"{what}: no answer within {seconds:.0f} s")
        return future.result()

    def _free(self, future: asyncio.Future[T]) -> None:
        self._slots.release()
        if not future.cancelled():
            future.exception()  # looked at here, because a caller that has timed out no longer does

    def close(self) -> None:
        """Take no further calls; those that run are not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)
