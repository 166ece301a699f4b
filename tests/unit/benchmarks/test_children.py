"""Processes of a benchmark end with it, and their folder goes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import children, restart
from benchmarks.children import Place, ToolFailed, free_port, place

SERVER = """
import socket, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
open("child", "w").write(str(child.pid))
while True:
    listener.accept()
"""
BENCHMARK = """
import asyncio, signal, sys
from benchmarks.__main__ import _end_on_sigterm
from benchmarks.children import free_port, place
async def main():
    _end_on_sigterm()
    async with place(sys.argv[1]) as here:
        port = free_port()
        pid = await here.serve(sys.executable, "-c", sys.argv[2], str(port), port=port)
        while not (here.folder / "child").exists() or not (here.folder / "child").read_text():
            await asyncio.sleep(0.01)
        print(pid, (here.folder / "child").read_text(), flush=True)
        await asyncio.Event().wait()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background jobs begin without it
try:
    asyncio.run(main())
except (KeyboardInterrupt, asyncio.CancelledError):
    sys.exit(130)
"""
PARENT = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
signal.pause()
"""
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # as above
runpy.run_module("benchmarks", run_name="__main__")
"""
ROOT = Path(children.__file__).parent.parent


async def started(here: Place) -> tuple[int, int]:
    """A server and the process that it started itself."""
    port = free_port()
    pid = await here.serve(sys.executable, "-c", SERVER, str(port), port=port)
    while len(here.pids()) < 2:  # noqa: ASYNC110 (another process tells no event)
        await asyncio.sleep(0.01)
    return pid, next(each for each in here.pids() if each != pid)


def alive(pid: int) -> bool:
    """Running, and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(*pids: int) -> bool:
    """In a moment: a killed orphan is cleared away by init."""
    async with asyncio.timeout(10):
        while any(map(alive, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return True


async def test_after_an_exception_nothing_is_left(tmp_path: Path) -> None:
    """Neither the server, nor what it started, nor the folder."""
    pids: tuple[int, ...] = ()
    with pytest.raises(ZeroDivisionError):
        async with place(str(tmp_path)) as here:
            pids = await started(here)
            assert all(map(alive, pids))
            raise ZeroDivisionError
    assert await gone(*pids)
    assert not list(tmp_path.iterdir())


async def test_a_cancelled_tool_is_ended(tmp_path: Path) -> None:
    """Ctrl-C cancels the benchmark: a tool that runs does not go on without it."""
    async with place(str(tmp_path)) as here:
        tool = asyncio.create_task(
            here.run(
                sys.executable, "-c", "import os, signal; open('pid', 'w').write(str(os.getpid())); signal.pause()"
            )
        )
        path = here.folder / "pid"
        while not path.exists() or not path.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pid = int(path.read_text())
        tool.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tool
        assert await gone(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_a_benchmark_that_is_ended_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """By Ctrl-C and SIGTERM also no folder; after kill -9 Linux ends the server, whose child this one cannot reach."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BENCHMARK, str(tmp_path), SERVER, cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    server, child = map(int, (await process.stdout.readline()).split())
    process.send_signal(number)
    await process.wait()
    if number is signal.SIGKILL:
        if children.bound(["x"]) != ["x"]:
            assert await gone(server)
        os.kill(child, signal.SIGKILL)
    else:
        assert await gone(server, child)
        assert not list(tmp_path.iterdir())


async def test_a_tool_that_fails_says_its_last_words(tmp_path: Path) -> None:
    """Of Python's, the error and not where it was; no path of the machine."""
    async with place(str(tmp_path)) as here:
        with pytest.raises(ToolFailed, match=r"python.* ended with 1: ValueError: in \$DATA$"):
            await here.run(sys.executable, "-c", "import os; raise ValueError('in ' + os.getcwd())")


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """Its log's end, at once and not after the time that a start may take."""
    async with place(str(tmp_path)) as here:
        with pytest.raises(ToolFailed, match="server did not start: no such setting"):
            await here.serve(sys.executable, "-c", "import sys; sys.exit('no such setting')", port=free_port())


async def test_an_endless_tool_is_ended_when_it_has_said_enough(tmp_path: Path) -> None:
    """Up to the line that was asked for."""
    async with place(str(tmp_path)) as here:
        code = "import signal\nfor i in range(5): print('rate', i, flush=True)\nsignal.pause()"
        printed = await here.run_until(sys.executable, "-c", code, wanted="rate", count=3)
    assert printed.splitlines() == ["rate 0", "rate 1", "rate 2"]


async def test_commands_are_told_without_paths_of_the_machine(tmp_path: Path) -> None:
    """As a person would type them; what only prepares is left out."""
    async with place(str(tmp_path), {"/long/cache": "$CACHE"}) as here:
        await here.prepare(sys.executable, "-c", "")
        await here.run(sys.executable, "-c", "", "/long/cache/jars/*", str(here.folder / "x"))
    assert here.commands == ["python -c '' '$CACHE/jars/*' $DATA/x"]


async def test_what_runs_is_out_of_reach_of_ctrl_c() -> None:
    """A process that runs beside a benchmark is in no group of the terminal's, and ends with the block, and its own."""
    async with children.running(sys.executable, "-c", PARENT) as process:
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
        while len(children.members(process.pid)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pids = children.members(process.pid)
    assert await gone(*pids)


async def test_ctrl_c_of_a_terminal_leaves_nothing(tmp_path: Path) -> None:
    """The signal that all processes of the terminal get ends a measurement with its service, and no folder stays."""
    benchmark = subprocess.Popen(  # noqa: ASYNC220, S603
        [sys.executable, "-c", INTERRUPTIBLE, "latency", "--folder", str(tmp_path)], cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not list(tmp_path.glob("millpond-bench-*/data/store")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        os.killpg(benchmark.pid, signal.SIGINT)
        assert await asyncio.to_thread(benchmark.wait, 60) == 130
        assert not list(tmp_path.iterdir())
    finally:
        benchmark.kill()
        await asyncio.to_thread(benchmark.wait)


async def test_a_service_started_again_keeps_its_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python is told not to write it: what a process is given stands before what this one has."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    asked = "import sys; print(sys.dont_write_bytecode)"
    said = []
    for env in (None, restart.COMPILED):
        async with children.running(sys.executable, "-c", asked, env=env) as process:
            assert process.stdout is not None
            said.append((await process.stdout.read()).strip())
    assert said == [b"True", b"False"]
