"""Threads that take what others leave of the cores: `yield_to_others`, `go_after_others`."""

from __future__ import annotations

import os
import threading

LATER = 10  # 110 parts against 1,024: somebody waits, but for more than a message
NICENESS = 19  # the least: 15 parts against 1,024 of a thread that serves, and whatever nobody wants


def yield_to_others() -> None:
    """The calling thread runs at the lowest priority from here on (Linux has one for each thread, and an ordinary
    process cannot raise it again). Made for `ThreadPoolExecutor(initializer=...)`."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def go_after_others() -> None:
    """The calling thread comes after those of the usual priority, but is not left out while they take all cores."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LATER)
