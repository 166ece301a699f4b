"""Threads at other priorities, and nobody else at them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from millpond.core.priority import LATER, NICENESS, go_after_others, yield_to_others


@pytest.mark.parametrize(("step_back", "niceness"), [(go_after_others, LATER), (yield_to_others, NICENESS)])
def test_only_the_calling_thread_steps_back(step_back: Callable[[], None], niceness: int) -> None:
    """Its pool's threads have the lower priority, the process keeps its own."""

    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own()
    with ThreadPoolExecutor(1, initializer=step_back) as threads:
        assert threads.submit(own).result() == max(before, niceness)
    assert own() == before
