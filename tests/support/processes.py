"""Parts of Millpond as real processes on loopback: started, killed, started again on the same directory and port.

A process is ready when it says so on its standard output; its ready file stands there by then. What it writes to
stderr goes to a file, so that a failing test can show it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from millpond.core.clock import SystemClock

READY_SECONDS = 60.0  # a start on a loaded machine; tests that claim more measure `ready_seconds`
EXIT_SECONDS = 40.0
_CLOCK = SystemClock()


class Process:
    """`millpond PART ...` with its log in `folder`. `wrapper`: a command that runs it (strace, prlimit)."""

    def __init__(
        self,
        folder: Path,
        part: str,
        flags: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.flags = list(flags)
        self.wrapper = list(wrapper)
        self.environment = environment or {}
        self.port = 0
        self.url = ""
        self.ready_seconds = 0.0
        self.starts = 0
        self.ready_file = folder / f"{part}.ready"
        self._part = part
        self._log_file = folder / f"{part}.log"
        self._running: subprocess.Popen[str] | None = None

    async def start(self) -> Self:
        """Until it is ready; AssertionError with its log when it ends or takes too long."""
        self.launch()
        try:
            async with asyncio.timeout(READY_SECONDS):
                told = await asyncio.to_thread(self._ready_line)
        except TimeoutError:
            self.kill()
            raise AssertionError(f"{self._part} is not ready after {READY_SECONDS} s\n{self.log()}") from None
        assert told, f"{self._part} ended before it was ready\n{self.log()}"
        self.ready_seconds = _CLOCK.monotonic() - self._launched
        assert self.ready_file.read_text().strip() == told
        self.url = told
        self.port = int(told.rpartition(":")[2])
        return self

    def launch(self) -> None:
        """Start it without waiting: for processes that are expected to refuse."""
        assert self._running is None, "it runs already"
        self.ready_file.unlink(missing_ok=True)
        command = [*self.wrapper, sys.executable, "-m", "millpond", self._part, *self.flags]
        command += ["--listen", f"127.0.0.1:{self.port}", "--ready-file", str(self.ready_file)]
        with self._log_file.open("a") as log:
            self._launched = _CLOCK.monotonic()
            self._running = subprocess.Popen(  # noqa: S603  # this program
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self.starts += 1

    def _ready_line(self) -> str:
        assert self._running is not None
        assert self._running.stdout is not None
        for line in self._running.stdout:
            if line.startswith("ready "):
                return line.split()[1]
        return ""

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    @property
    def running(self) -> bool:
        return self._running is not None and self._running.poll() is None

    def log(self) -> str:
        return self._log_file.read_text()

    def kill(self) -> int:
        """kill -9, as the kernel would; the exit code. No word to it, nothing flushed."""
        assert self._running is not None
        os.killpg(self._running.pid, signal.SIGKILL)  # its own session: a wrapper and what it runs
        return self._end()

    def signal(self, number: int) -> None:
        assert self._running is not None
        os.killpg(self._running.pid, number)

    async def stop(self) -> int:
        """SIGTERM, and its exit code once it has drained."""
        self.signal(signal.SIGTERM)
        return await self.exited()

    async def exited(self, seconds: float = EXIT_SECONDS) -> int:
        """The exit code, once it ends by itself."""
        assert self._running is not None
        try:
            await asyncio.to_thread(self._running.wait, seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self._part} still runs after {seconds} s\n{self.log()}") from None
        return self._end()

    def _end(self) -> int:
        assert self._running is not None
        code = self._running.wait(EXIT_SECONDS)
        assert self._running.stdout is not None
        self._running.stdout.close()
        self._running = None
        return code

    def close(self) -> None:
        if self._running is not None:
            if self._running.poll() is None:
                self.kill()
            else:
                self._end()


def standalone(
    folder: Path,
    *flags: str,
    data: Path | None = None,
    environment: dict[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> Process:
    """`millpond standalone` on `data` (default: a folder in `folder`), with segments of 4 MiB unless flags say."""
    where = ["--data", str(data or folder / "data"), "--log-level", "error"]
    segments = [] if "--segment-bytes" in flags else ["--segment-bytes", str(4 << 20)]
    return Process(folder, "standalone", [*where, *segments, *flags], environment=environment, wrapper=wrapper)


class Apart:
    """Metadata, one store and one proxy as three processes, each with its own directory in `folder`."""

    def __init__(self, folder: Path, *store_flags: str) -> None:
        self.folder = folder
        self.secret = folder / "metadata" / "cluster-secret"
        self._tier = str(folder / "tier")
        self._store_flags = store_flags
        self.metadata = Process(folder, "metadata", ["--data", str(folder / "metadata"), "--log-level", "error"])
        self.store: Process
        self.proxy: Process

    async def start(self) -> Self:
        await self.metadata.start()
        beside = ["--metadata", self.metadata.url, "--cluster-secret-file", str(self.secret)]
        beside += ["--tier", self._tier, "--log-level", "error"]
        data = ["--data", str(self.folder / "store"), "--segment-bytes", str(4 << 20)]
        self.store = Process(self.folder, "store", [*data, *beside, *self._store_flags])
        await self.store.start()
        self.proxy = Process(self.folder, "proxy", beside)
        await self.proxy.start()
        return self

    @property
    def url(self) -> str:
        return self.proxy.url

    def close(self) -> None:
        for part in ("proxy", "store", "metadata"):
            process = getattr(self, part, None)
            if process is not None:
                process.close()
