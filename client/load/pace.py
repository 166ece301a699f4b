"""A steady rate, finer than the timers of an event loop, which are true to a millisecond.

By a timer of the kernel (timerfd of Linux), which wakes the loop as a socket does. Elsewhere by a thread, which has to
be woken, and given the interpreter, for each message: what that costs is taken from the service that is measured, when
both are on one machine.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable

from millpond.core.clock import Clock

_MONOTONIC = 1  # CLOCK_MONOTONIC
_FLAGS = 0o2000000 | os.O_NONBLOCK  # TFD_CLOEXEC, TFD_NONBLOCK
_NANOSECONDS = 1_000_000_000
_ITimerSpec = ctypes.c_long * 4  # struct itimerspec: seconds and nanoseconds of the interval, and of the first time


async def paced(clock: Clock, total: int, per_second: int, send: Callable[[int, float], None]) -> None:
    """Call `send(number, when it was due)` for each of `total` messages, on the loop; late, when that is busy, and
    never early. Raises what `send` raises; then nothing more is sent."""
    sends = Sends(clock, total, per_second, send)
    try:
        timer = KernelTimer()
    except (OSError, AttributeError):  # not Linux
        await by_thread(sends)
    else:
        await by_kernel(sends, timer)


class Sends:
    """Messages that are due one after the other, of one event loop. `ended`: all are sent, or `send` raised."""

    def __init__(self, clock: Clock, total: int, per_second: int, send: Callable[[int, float], None]) -> None:
        self._clock = clock
        self._per_second = per_second
        self._send = send
        self._begin = clock.monotonic()
        self._sent = 0
        self.total = total
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def seconds_to(self, number: int) -> float:
        """Until that message is due: 0 or less when it is."""
        return self._due(number) - self._clock.monotonic()

    def go_on(self) -> float:
        """Send what is due. Seconds until the next one; 0 when all have ended."""
        try:
            while not self.ended.done():
                if self._sent == self.total:
                    self.ended.set_result(None)
                elif (seconds := self.seconds_to(self._sent)) > 0:
                    return seconds
                else:
                    self._send(self._sent, self._due(self._sent))
                    self._sent += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who waits
            self.ended.set_exception(error)
        return 0.0

    def _due(self, number: int) -> float:
        return self._begin + number / self._per_second


class KernelTimer:
    """Its descriptor can be read once the time is over that it was given last."""

    def __init__(self) -> None:
        """Raises OSError or AttributeError where there is no such thing."""
        self._library = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._library.timerfd_create(_MONOTONIC, _FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def give(self, seconds: float) -> None:
        whole, rest = divmod(max(1, int(seconds * _NANOSECONDS)), _NANOSECONDS)  # 0 would be never
        if self._library.timerfd_settime(self.fd, 0, ctypes.byref(_ITimerSpec(0, 0, whole, rest)), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        os.close(self.fd)


async def by_kernel(sends: Sends, timer: KernelTimer) -> None:
    """Closes the timer."""
    loop = asyncio.get_running_loop()
    loop.add_reader(timer.fd, lambda: timer.give(sends.go_on()))  # which makes it unreadable, too
    try:
        timer.give(sends.go_on())
        await sends.ended
    finally:
        loop.remove_reader(timer.fd)
        timer.close()


async def by_thread(sends: Sends) -> None:
    loop = asyncio.get_running_loop()
    left = threading.Event()

    def pace() -> None:
        for number in range(sends.total):
            if left.wait(max(0.0, sends.seconds_to(number))):
                return
            loop.call_soon_threadsafe(sends.go_on)

    pacing = loop.run_in_executor(None, pace)
    try:
        sends.go_on()
        await sends.ended
    finally:
        left.set()
        await pacing
