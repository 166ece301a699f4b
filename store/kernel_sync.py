"""fdatasync that no thread waits for: the kernel does it, and tells the event loop (asynchronous I/O of Linux).

    Syncs --> io_submit(IOCB_CMD_FDSYNC) --> a worker of the kernel --> an eventfd --> the event loop --> the future

A thread needs the interpreter before its fdatasync and behind it, and gets it when the event loop's thread next gives
it up: with 1,000 messages a second of `memory` topics an append was confirmed 4.4 ms after it at p50, 1.4 this way.

Not everywhere: Linux from 4.18 on, on the processors below, where nothing forbids io_setup and `fs.aio-max-nr` is not
used up. `KernelSync.open` says so elsewhere, and `Syncs` has a thread do it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import platform
import sys
from typing import NamedTuple, Self

from millpond.core.threads import Threads
from millpond.store.disk import File

_log = logging.getLogger("millpond.store")


class _Calls(NamedTuple):
    """Numbers of the system calls, which the C library has no functions for."""

    setup: int
    destroy: int
    getevents: int
    submit: int


_CALLS = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}
_FDSYNC = 3  # IOCB_CMD_FDSYNC
_RESFD = 1  # IOCB_FLAG_RESFD: `resfd` is told
_AT_ONCE = 8  # more than are ever in flight: one, and one whose caller has left


class _Iocb(ctypes.Structure):
    """struct iocb of linux/aio_abi.h, on a little-endian machine."""

    _fields_ = (
        ("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_uint32), ("opcode", ctypes.c_uint16),
        ("reqprio", ctypes.c_int16), ("fildes", ctypes.c_uint32), ("buf", ctypes.c_uint64), ("nbytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64), ("reserved2", ctypes.c_uint64), ("flags", ctypes.c_uint32),
        ("resfd", ctypes.c_uint32),
    )  # fmt: skip


class _Event(ctypes.Structure):
    """struct io_event: `data` of the iocb, where that stood, and what fdatasync would have returned, or -errno."""

    _fields_ = (("data", ctypes.c_uint64), ("obj", ctypes.c_uint64), ("res", ctypes.c_int64), ("res2", ctypes.c_int64))


class KernelSync:
    """Of one event loop, one sync at a time."""

    def __init__(self, calls: _Calls) -> None:
        """Raises OSError where there is no such thing."""
        self._calls = calls
        self._context = ctypes.c_ulong(0)
        # the interpreter is kept: these calls start, look and never wait
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        if self._syscall(calls.setup, _AT_ONCE, ctypes.byref(self._context)):
            os.close(self._told)
            raise OSError(ctypes.get_errno(), "io_setup")
        self._iocb = _Iocb(opcode=_FDSYNC, flags=_RESFD, resfd=self._told)
        self._iocbs = (ctypes.c_void_p * 1)(ctypes.addressof(self._iocb))
        self._events = (_Event * _AT_ONCE)()
        self._number = 0
        self._future: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._told, self._look)

    @classmethod
    def open(cls) -> Self:
        """Raises OSError where the kernel does not do this."""
        calls = _CALLS.get(platform.machine())
        of_64_bits = sys.maxsize > 1 << 32  # the numbers of others are of other calls
        if calls is None or sys.platform != "linux" or sys.byteorder != "little" or not of_64_bits:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return cls(calls)

    def sync(self, fd: int) -> asyncio.Future[None] | None:
        """What was written to `fd` is on the disk when this is done; raises OSError as fdatasync does.

        Nothing has begun when it is None, the kernel having too much to do, or when this itself raises OSError: it
        takes no sync of such a file (its file system has none), or of anybody (a sandbox)."""
        self._number += 1
        self._iocb.data, self._iocb.fildes = self._number, fd
        if self._syscall(self._calls.submit, self._context, 1, self._iocbs) != 1:
            if (error := ctypes.get_errno()) == errno.EAGAIN:
                return None
            raise OSError(error, os.strerror(error))
        self._future = self._loop.create_future()
        return self._future

    def _look(self) -> None:
        try:
            os.eventfd_read(self._told)
        except BlockingIOError:
            return
        count = self._syscall(self._calls.getevents, self._context, 0, _AT_ONCE, self._events, None)
        if count < 0 and (error := ctypes.get_errno()) != errno.EINTR:  # interrupted: nothing had ended
            self._end(error)
        for event in self._events[: max(0, count)]:
            if event.data == self._number:  # else its caller has left
                self._end(-event.res)

    def _end(self, error: int) -> None:
        if self._future is None or self._future.done():
            return
        if error:
            self._future.set_exception(OSError(error, os.strerror(error)))
        else:
            self._future.set_result(None)

    def close(self) -> None:
        """Blocks until a sync that is in flight has ended, which nobody hears of any more."""
        self._loop.remove_reader(self._told)
        ctypes.CDLL(None).syscall(self._calls.destroy, self._context)
        os.close(self._told)


class Syncs:
    """Syncs files one at a time, by the kernel where it can, else by one of `threads`. Of one event loop."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._kernel: KernelSync | None = None
        self._refused = False

    def sync(self, file: File) -> asyncio.Future[None]:
        """Everything written to `file` is on the disk once this is done. Raises OSError, which is final."""
        fd = file.fileno()
        begun = None if fd is None or self._refused else self._by_kernel(fd)
        return self._threads.run(file.sync) if begun is None else begun

    def _by_kernel(self, fd: int) -> asyncio.Future[None] | None:
        """The kernel is asked for it at the first file that is one of its own, since giving it back takes 40 ms; and
        never again once it refuses, since all files are in one folder."""
        try:
            if self._kernel is None:
                self._kernel = KernelSync.open()
            return self._kernel.sync(fd)
        except OSError as error:
            self._refused = True
            _log.info("flushes go through a thread: the kernel does none by itself here (%s)", error)
            return None

    def close(self) -> None:
        """Blocks until a sync by the kernel has ended; the threads are their owner's."""
        if self._kernel is not None:
            self._kernel.close()
