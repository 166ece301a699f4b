"""Threads at another priority, and nobody else at it."""

from __future__ import annotations

import asyncio
import os
import threading

from millpond.core.priority import LATER, go_after_others
from millpond.core.threads import Threads


async def test_only_the_calling_thread_steps_back() -> None:
    """Threads that begin with it have the lower priority, the process keeps its own."""

    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own()
    threads = Threads(1, "later", go_after_others)
    assert await threads.run(own) == max(before, LATER)
    await asyncio.to_thread(threads.close)
    assert own() == before
