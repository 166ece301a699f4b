"""`python -m benchmarks [KIND ..] [--peers "kafka nats .."] [--seconds N] [--rounds N] [--folder DIR]`: `make bench`.

One file a kind, each with `measure(setup, tell) -> lines`; `compare` runs the peers of `peers/` beside ours.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Annotated, TypeVar

import typer
import uvloop

from benchmarks import compare, limits, memory, peers, report
from benchmarks.harness import Line, Setup
from benchmarks.paused import watched
from benchmarks.progress import Progress
from benchmarks.stolen import Stolen
from millpond.core.errors import DiskFull

T = TypeVar("T")
Measure = Callable[[Setup, Callable[[str], None]], Awaitable[list[Line]]]

# Kind -> the module that measures it. The first are those of a plain run.
EVERYDAY = ("produce", "consume", "latency", "limits")
LONG = {
    "read": "",
    "settle": "",
    "json_api": "",
    "topics": "to 10,000, fills up to 60 GB",
    "backlog": "fills 1.5 GB",
    "cold": "fills 3 GB",
    "waiting": "5,000 long polls, a minute",
    "memory": "",
    "steady": "a minute a round",
    "sealing": "",
    "restart": "fills 11 GB",
}
KINDS = [*EVERYDAY, *LONG]
KINDS_HELP = ", ".join(
    [f"{', '.join(EVERYDAY)} (default: these)", *(f"{name}{why and f' ({why})'}" for name, why in LONG.items())]
)


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help=KINDS_HELP)] = None,
    peer_names: Annotated[
        str, typer.Option("--peers", help=f"Side by side with: {' '.join(peers.NAMES)}; or all")
    ] = "",
    works: Annotated[str, typer.Option(help="Only works of the peers whose name has this in it")] = "",
    seconds: Annotated[float, typer.Option(help="For each round")] = 4.0,
    rounds: Annotated[int, typer.Option(help="The median of so many counts")] = 3,
    message_bytes: Annotated[int, typer.Option("--bytes", help="Body of a message")] = 1024,
    queues: Annotated[int, typer.Option(help="Queues of each topic")] = 4,
    fill_queues: Annotated[int, typer.Option(help="restart: queues of the log that is opened")] = 10_000,
    fill_messages: Annotated[int, typer.Option(help="restart: messages in it")] = 10_000_000,
    backlog: Annotated[int, typer.Option(help="backlog: messages behind")] = 10_000_000,
    folder: Annotated[str, typer.Option(help="Where services write: the disk to be measured")] = "",
) -> None:
    """Measure a fresh standalone service beside the machine's own limits, and beside peers by their own tools."""
    wanted = peers.NAMES if peer_names == "all" else peer_names.replace(",", " ").split()
    chosen = kinds or list(EVERYDAY)
    _known("kinds", chosen, KINDS)
    _known("peers", wanted, peers.NAMES)
    setup = Setup(
        seconds, rounds, message_bytes, queues, folder=folder, fill_queues=fill_queues, fill_messages=fill_messages,
        backlog=backlog,
    )  # fmt: skip
    try:
        lines, told = uvloop.run(_measure(chosen, wanted, works, setup))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None
    except DiskFull as error:
        sys.stderr.write(f"{error}; measure on a disk with more room (--folder), or for fewer --seconds\n")
        raise typer.Exit(1) from None
    typed = shlex.join(["python", "-m", "benchmarks", *("DIR" if folder == word else word for word in sys.argv[1:])])
    found = report.result(lines, setup, told, typed)
    report.table(found)
    sys.stderr.write(f"written to {report.write(found)}\n")


def _known(what: str, chosen: list[str], known: list[str]) -> None:
    if set(chosen) - set(known):
        raise typer.BadParameter(f"{what}: choose from {', '.join(known)}")


async def _measure(
    chosen: list[str], wanted: list[str], works: str, setup: Setup
) -> tuple[list[Line], list[report.PeerReport]]:
    _end_on_sigterm()
    lines: list[Line] = []
    with Progress(len(chosen) + len(wanted)) as progress:
        for kind in chosen:
            with progress.step(kind):
                measured, mood = await _with_mood(kind, setup, partial(measure_of(kind), setup, progress.tell))
                found = [*measured, *mood]
            progress.lines(found)
            lines += found
        told = []
        for name in wanted:
            with progress.step(name):
                measure = partial(compare.measure, name, setup, progress.tell, works)
                (measured, peer), mood = await _with_mood(f"comparison with {name}", setup, measure)
                found = [*measured, *mood]
            progress.lines(found)
            lines += found
            told.append(peer)
    return lines, told


async def _with_mood(what: str, setup: Setup, measure: Callable[[], Awaitable[T]]) -> tuple[T, list[Line]]:
    """What is measured, and what memory, host and disk did meanwhile."""
    stolen = Stolen()
    async with watched(setup.folder) as disk:
        measured = await measure()
    return measured, [*memory.under(what), *stolen.under(what), *disk.under(what)]


def measure_of(kind: str) -> Measure:
    if kind == "limits":
        return limits.measure
    found: Measure = import_module(f"benchmarks.{kind}").measure
    return found


def _end_on_sigterm() -> None:
    """SIGTERM as Ctrl-C: whatever was started is ended, whatever was written is removed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
