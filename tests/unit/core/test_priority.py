"""Threads at another priority, and nobody else at it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from millpond.core.priority import LATER, go_after_others


def test_only_the_calling_thread_steps_back() -> None:
    """Its pool's threads have the lower priority, the process keeps its own."""

    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own()
    with ThreadPoolExecutor(1, initializer=go_after_others) as threads:
        assert threads.submit(own).result() == max(before, LATER)
    assert own() == before
