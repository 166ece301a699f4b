"""What a process takes, as the kernel counts it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from benchmarks.process import family_cpu_seconds

TURNS = "while True: pass"
CHILD_TURNS = f"""
import os
if os.fork():
    import signal; signal.pause()
import ctypes; ctypes.CDLL(None).prctl(1, 9)  # ends with the one above
{TURNS}
"""


@pytest.mark.parametrize("code", [TURNS, CHILD_TURNS])
async def test_time_of_a_family(code: str) -> None:
    """A process that computes is seen, and so is one that it has started."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code)
    try:
        async with asyncio.timeout(100):
            while family_cpu_seconds(process.pid) < 0.5:  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.02)
    finally:
        process.kill()
        await process.wait()


def test_who_is_gone_takes_nothing() -> None:
    """No error: it may go at any time."""
    assert family_cpu_seconds(2**22 - 1) == 0
