"""The two threads that decompress, encode and hash for the tier: `SealThreads`.

So sealing takes what producers and consumers leave: the threads run at a lower priority (Linux has one for each
thread). One run is encoded while the one before is hashed; sealing that falls behind is caught up with when it is
quieter, and until then the log holds the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from millpond.core.priority import yield_to_others

T = TypeVar("T")


class SealThreads:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="seal", initializer=yield_to_others)

    async def run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
