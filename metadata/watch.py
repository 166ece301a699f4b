"""Waiting for the catalog to change: by this process (an event) or by another one (a poll).

However many calls wait, the version is read at most once every FEED_POLL_MS when nothing happens here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from millpond.core import limits


class Watch:
    """Belongs to one event loop. `wake` may be called from any thread."""

    def __init__(self, read_version: Callable[[], Awaitable[int]]) -> None:
        self._read_version = read_version
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._reading = asyncio.Lock()
        self._version = 0
        self._read_at = -math.inf
        self._closed = False

    def wake(self) -> None:
        """The catalog changed here."""
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._read_at = -math.inf
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed = True
        self._wake()

    async def wait(self, since: int, wait_ms: int) -> None:
        """Until the version is another than `since`, at most `wait_ms`."""
        end = self._loop.time() + wait_ms / 1000
        while not self._closed:
            changed = self._changed  # taken before reading: a change in between sets it
            left = end - self._loop.time()
            if await self._current() != since or left <= 0:
                return
            try:
                async with asyncio.timeout(min(left, limits.FEED_POLL_MS / 1000)):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _current(self) -> int:
        async with self._reading:
            if self._loop.time() - self._read_at >= limits.FEED_POLL_MS / 1000:
                at = self._loop.time()
                self._read_at = at  # a wake-up during the read makes it old again
                self._version = await self._read_version()
            return self._version
