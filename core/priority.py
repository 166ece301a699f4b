"""Who takes what others leave of the cores: `go_after_others`, `only_when_idle`."""

from __future__ import annotations

import os
import threading
from pathlib import Path

LATER = 10  # 110 parts against 1,024: somebody waits, but for more than a message
NICENESS = 19  # the least: 15 parts against 1,024 of a thread that serves, and whatever nobody wants


def go_after_others() -> None:
    """The calling thread comes after those of the usual priority, but is not left out while they take all cores (Linux
    has a priority for each thread, and an ordinary process cannot raise it again). Made for
    `Threads(begin=...)`."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LATER)


def only_when_idle() -> None:
    """This process, its threads and those they make, run when nobody else wants the core, and are put off it at once
    when somebody does.

    A thread that only has the lowest priority keeps the core until its slice is over, some milliseconds.
    """
    for task in Path("/proc/self/task").iterdir():  # some libraries have made threads of theirs
        os.setpriority(os.PRIO_PROCESS, int(task.name), NICENESS)
        os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
