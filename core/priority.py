"""Who takes what others leave of the cores: `go_after_others`, `only_when_idle`, `Cores`."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

LATER = 10  # 110 parts against 1,024: somebody waits, but for more than a message
NICENESS = 19  # the least: 15 parts against 1,024 of a thread that serves, and whatever nobody wants


def go_after_others() -> None:
    """The calling thread comes after those of the usual priority, but is not left out while they take all cores (Linux
    has a priority for each thread, and an ordinary process cannot raise it again). Made for
    `Threads(begin=...)`."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LATER)


def only_when_idle(pid: int) -> None:
    """A process that was just started, and all threads it will make, run when nobody else wants the core, and are put
    off it at once when somebody does. Nothing when it has ended already.

    A thread that only has the lowest priority keeps the core until its slice is over, some milliseconds.
    """
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


class Cores:
    """The cores that this process may use, and their use of only half of them: with one left to others entirely, they
    wait for none of its system calls, which a kernel without preemption does not interrupt."""

    def __init__(self) -> None:
        self._all = os.sched_getaffinity(0)
        self._half = set(sorted(self._all)[len(self._all) // 2 :])
        self._used = self._all

    def use_half(self, half: bool) -> None:
        """From now on, all threads that there are and will be; else all cores. A cpuset that has none of them any more
        decides alone."""
        wanted = self._half if half else self._all
        if wanted != self._used:
            self._used = wanted
            for task in Path("/proc/self/task").iterdir():
                with suppress(OSError):  # the thread has ended, or the cpuset was changed
                    os.sched_setaffinity(int(task.name), wanted)
