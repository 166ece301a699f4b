"""Every test fails when code of Millpond blocks the event loop: a producer waiting for somebody else's disk is a bug.

blockbuster wraps the calls that may block (files, sockets, locks, sleeps, SQLite), to which this adds the syncs and
reads that only a store uses, and raises where one is called on a running loop with a file of Millpond on the stack.
That error may be caught on its way (an HTTP handler's becomes an answer), so each is also written down here, and the
test that caused it fails at its end.

What a test itself calls, without Millpond in between, may block. What Millpond calls on the loop on purpose:

- `os.pwritev`, by which the store writes a small append into its preallocated segment: into memory, no wait;
- `os.preadv` with RWF_NOWAIT, which answers at once whether the bytes are in memory or not;
- log lines, to stderr;
- the start of a proxy's worker, in a parent that serves nobody;
- what happens once, when nothing is served yet or any more: making the data directory, the ready file, and waiting
  for the last write of a store that closes.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence

import blockbuster.blockbuster as engine
import pytest
from blockbuster import BlockBuster, BlockBusterFunction

SCANNED = "millpond"
ALSO_BLOCKING = ("fsync", "fdatasync", "pread", "posix_fallocate", "ftruncate", "fstat", "open")
MAY_BLOCK = [
    ("logging/__init__.py", {"emit"}),
    ("millpond/store/disk.py", {"__init__"}),  # of SystemDisk
    ("millpond/store/engine.py", {"close"}),
    ("millpond/standalone.py", {"made"}),
    ("millpond/workers.py", {"launch"}),
    ("millpond/process.py", {"_ready", "_not_ready"}),
    ("<frozen importlib._bootstrap>", {"_find_and_load"}),  # a part imported when a command starts it
]
_blocked: list[str] = []


class Blocked(engine.BlockingError):
    """Writes itself down, with where it happened."""

    def __init__(self, function: str) -> None:
        super().__init__(function)
        _blocked.append(f"{function} blocks the event loop:\n" + "".join(traceback.format_stack(limit=12)[:-2]))


def _reads_what_is_cached(_fd: int, _buffers: Sequence[object], _offset: int = 0, flags: int = 0) -> bool:
    return bool(flags & os.RWF_NOWAIT)


@pytest.fixture(scope="session", autouse=True)
def watched() -> Iterator[None]:
    """blockbuster, for the whole session: putting it in and out of place for every test would cost seconds."""
    engine.BlockingError = Blocked  # type: ignore[misc]  # what its wrappers raise
    buster = BlockBuster(SCANNED)
    for name in ALSO_BLOCKING:
        buster.functions[f"os.{name}"] = BlockBusterFunction(os, name, scanned_modules=SCANNED)
    buster.functions["os.preadv"] = BlockBusterFunction(
        os, "preadv", scanned_modules=SCANNED, can_block_predicate=_reads_what_is_cached
    )
    del buster.functions["os.path.abspath"]  # joins strings
    for function in buster.functions.values():
        for file, functions in MAY_BLOCK:
            function.can_block_in(file, functions)
    buster.activate()
    try:
        yield
    finally:
        buster.deactivate()


@pytest.fixture(autouse=True)
def never_blocks(watched: None) -> Iterator[list[str]]:
    """What blocked the loop so far in this test; the test fails when anything has."""
    _blocked.clear()
    yield _blocked
    if _blocked:
        told, count = _blocked[0], len(_blocked)
        _blocked.clear()
        pytest.fail(told + (f"\n.. and {count - 1} more" if count > 1 else ""), pytrace=False)
