"""Processes that end with the benchmark, whatever ends it, and the folder they write to.

Each is a process group of its own, so that Ctrl-C reaches only the benchmark, which then ends the groups: at the end of
`place`, else at the exit of the interpreter. Should even that not happen (kill -9), Linux ends them (`setpriv`).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.process import anonymous_mib

END_SECONDS = 10.0  # from a friendly end of a group to the unfriendly one
START_SECONDS = 90.0
POLL_SECONDS = 0.05
LINE_BYTES = 1 << 20
TOLD_LINES = 4  # of a failed tool's output
_groups: set[int] = set()


class ToolFailed(Exception):
    """A tool or server of a peer did not do what it was started for; says its last words."""


class Place:
    """A folder, and the processes that were started in it. `commands` are those of the tools that measure, as a person
    would type them; `short` has what stands in them for long paths."""

    def __init__(self, folder: Path, short: Mapping[str, str]) -> None:
        self.folder = folder
        self.commands: list[str] = []
        self._short = {**short, str(folder): "$DATA", sys.executable: "python"}
        self._servers: list[Process] = []

    # -- servers ----------------------------------------------------------------------------------------------

    async def serve(self, *argv: str, env: Mapping[str, str] | None = None, port: int, name: str = "server") -> int:
        """Start a server and wait until `port` answers; its process id. Its output goes to NAME.log in the folder."""
        process = await self._start(argv, env, name)
        self._servers.append(process)
        await self._answers(process, port, name)
        return process.pid

    async def _start(self, argv: Sequence[str], env: Mapping[str, str] | None, name: str) -> Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            return await started(*argv, cwd=self.folder, env=env, stdout=log, stderr=STDOUT)

    async def _answers(self, process: Process, port: int, name: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while process.returncode is None:
                    if await answers(port):
                        return
                    await asyncio.sleep(POLL_SECONDS)
        log = await asyncio.to_thread((self.folder / f"{name}.log").read_text, errors="replace")
        raise ToolFailed(self.shortened(f"{name} did not start: {tail(log)}"))

    def pids(self) -> list[int]:
        """Of all servers and what they started."""
        return [pid for process in self._servers for pid in members(process.pid)]

    def anonymous_mib(self) -> float:
        return sum(anonymous_mib(pid) for pid in self.pids())

    # -- tools ------------------------------------------------------------------------------------------------

    async def run(self, *argv: str, env: Mapping[str, str] | None = None, seconds: float = 120.0) -> str:
        """What a tool printed, once it has ended well; its command is kept. Raises ToolFailed."""
        self.commands.append(self.told(argv))
        return await self._tool(argv, env, seconds, None)

    async def prepare(self, *argv: str, env: Mapping[str, str] | None = None, seconds: float = 120.0) -> str:
        """`run` of what measures nothing: no command is kept."""
        return await self._tool(argv, env, seconds, None)

    async def run_until(
        self, *argv: str, wanted: str, count: int, env: Mapping[str, str] | None = None, seconds: float = 120.0
    ) -> str:
        """What a tool that never ends printed up to the `count`-th line with `wanted` in it; it is ended then."""
        self.commands.append(self.told(argv))
        return await self._tool(argv, env, seconds, (wanted, count))

    async def _tool(
        self, argv: Sequence[str], env: Mapping[str, str] | None, seconds: float, until: tuple[str, int] | None
    ) -> str:
        process = await started(*argv, cwd=self.folder, env=env, stdout=PIPE, stderr=STDOUT, limit=LINE_BYTES)
        lines: list[str] = []
        try:
            async with asyncio.timeout(seconds):
                if await self._read(process, lines, until):
                    return "\n".join(lines)
                await process.wait()
        except TimeoutError:
            told = f"{Path(argv[0]).name} took longer than {seconds:.0f} s: {tail(chr(10).join(lines))}"
            raise ToolFailed(self.shortened(told)) from None
        finally:
            await end(process, 0.0)
        text = "\n".join(lines)
        if process.returncode or until is not None:
            raise ToolFailed(self.shortened(f"{Path(argv[0]).name} ended with {process.returncode}: {tail(text)}"))
        return text

    async def _read(self, process: Process, lines: list[str], until: tuple[str, int] | None) -> bool:
        assert process.stdout is not None
        seen = 0
        async for line in process.stdout:
            lines.append(line.decode(errors="replace").rstrip())
            seen += until is not None and until[0] in lines[-1]
            if until is not None and seen >= until[1]:
                return True
        return False

    def told(self, argv: Sequence[str]) -> str:
        return self.shortened(shlex.join(argv))

    def shortened(self, text: str) -> str:
        for long, short in sorted(self._short.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(long, short)
        return text

    async def end(self) -> None:
        """All servers, the last started first."""
        for process in reversed(self._servers):
            await end(process, END_SECONDS)
        self._servers.clear()


@asynccontextmanager
async def place(below: str, short: Mapping[str, str] | None = None) -> AsyncIterator[Place]:
    """A fresh folder below `below` (default: the system's), gone at the end with every process started in it."""
    with tempfile.TemporaryDirectory(prefix="millpond-bench-", dir=below or None, ignore_cleanup_errors=True) as folder:
        here = Place(Path(folder), short or {})
        try:
            yield here
        finally:
            await asyncio.shield(asyncio.ensure_future(here.end()))


async def started(*argv: str, env: Mapping[str, str] | None = None, **options: Any) -> Process:
    """A process in a group of its own, with `env` beside this process's environment and with options of
    `create_subprocess_exec`; whoever starts it ends it by `end`."""
    whole = {**os.environ, "LC_ALL": "C.UTF-8", **(env or {})}
    process = await asyncio.create_subprocess_exec(
        *bound(argv), env=whole, stdin=DEVNULL, start_new_session=True, **options
    )
    _groups.add(process.pid)
    return process


@asynccontextmanager
async def running(
    *argv: str, friendly_seconds: float = 0.0, env: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """`started`, with its output in a pipe, and ended with the block."""
    process = await started(*argv, env=env, stdout=PIPE)
    try:
        yield process
    finally:
        await asyncio.shield(asyncio.ensure_future(end(process, friendly_seconds)))


async def end(process: Process, friendly_seconds: float) -> None:
    """End a process and all of its group."""
    if process.returncode is None and friendly_seconds:
        _signal(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(friendly_seconds):
                await process.wait()
    _signal(process.pid, signal.SIGKILL)  # also what the first one left behind in its group
    await process.wait()
    _groups.discard(process.pid)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@atexit.register
def _end_all() -> None:
    for group in _groups:
        _signal(group, signal.SIGKILL)


def bound(argv: Sequence[str]) -> list[str]:
    """`argv`, ended by Linux when its parent is gone, where there is a tool to ask for that."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--", *argv] if setpriv else list(argv)


def members(group: int) -> list[int]:
    """The process ids of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(stat.parent.name))
    return found


async def answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def tail(text: str) -> str:
    """The last words of a tool; of Python's, the error and not where it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-1 if "Traceback (most recent call last):" in lines else -TOLD_LINES :])
