"""The threads that encode, and behind them hash and write, for the tier: `SealThreads`.

So sealing takes what producers and consumers leave: the threads run at a lower priority (Linux has one for each
thread). Sealing that falls behind is caught up with when it is quieter, and until then the log holds the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from millpond.core.priority import yield_to_others

T = TypeVar("T")


class SealThreads:
    def __init__(self) -> None:
        self._encode = ThreadPoolExecutor(1, thread_name_prefix="seal", initializer=yield_to_others)
        self._write = ThreadPoolExecutor(1, thread_name_prefix="seal-write", initializer=yield_to_others)

    async def run(self, call: Callable[[], T]) -> T:
        """In the thread that encodes."""
        return await asyncio.get_running_loop().run_in_executor(self._encode, call)

    def behind(self, call: Callable[[], T]) -> Future[T]:
        """In the other one, in the order of the calls."""
        return self._write.submit(call)

    def close(self) -> None:
        """What was begun behind still runs."""
        self._encode.shutdown(wait=False, cancel_futures=True)
        self._write.shutdown(wait=False)
