"""`python -m benchmarks [produce] [consume] [latency] [limits] [restart] [--seconds N] [--rounds N] [--folder DIR]`."""

from __future__ import annotations

from typing import Annotated

import typer
import uvloop
from rich.console import Console

from benchmarks import consume, harness, latency, limits, produce, restart, single
from benchmarks.harness import Line, Setup
from millpond.client.command import show

KINDS = {"produce": produce.measure, "consume": consume.measure, "latency": latency.measure}
KINDS_HELP = "produce, consume, latency, limits (default: these); restart (fills 11 GB)"
CONSOLE = Console(stderr=True)


def main(
    kinds: Annotated[
        list[str] | None, typer.Argument(help="produce, consume, latency, limits; default these; restart")
    ] = None,
    seconds: Annotated[float, typer.Option(help="For each round")] = 4.0,
    rounds: Annotated[int, typer.Option(help="The median of so many counts")] = 3,
    message_bytes: Annotated[int, typer.Option("--bytes", help="Body of a message")] = 1024,
    queues: Annotated[int, typer.Option(help="Queues of each topic")] = 4,
    fill_queues: Annotated[int, typer.Option(help="restart: queues of the log that is opened")] = 10_000,
    fill_messages: Annotated[int, typer.Option(help="restart: messages in it")] = 10_000_000,
    folder: Annotated[str, typer.Option(help="Where the service writes: the disk to be measured")] = "",
) -> None:
    """Measure a fresh standalone service beside the machine's own limits."""
    chosen = kinds or [*KINDS, "limits"]
    if set(chosen) - {*KINDS, "limits", "restart"}:
        raise typer.BadParameter(f"choose from {', '.join(KINDS)}, limits and restart")
    setup = Setup(seconds, rounds, message_bytes, queues, folder=folder)
    lines = uvloop.run(_measure(chosen, setup))
    if "restart" in chosen:
        lines += uvloop.run(restart.measure(setup, CONSOLE.print, fill_queues, fill_messages))
    path = harness.write(lines, setup)
    by_name = {line.name: line for line in lines}
    about = harness.machine()
    show.table(
        ["", ">median", "unit", ">of the limit", "limit", ">least", ">most"],
        [_row(line, by_name) for line in lines],
        title=f"{message_bytes:,} B messages; {about['cores']} x {about['cpu']}; single requests by {single.tool()}",
    )
    CONSOLE.print(f"written to {path}")


async def _measure(chosen: list[str], setup: Setup) -> list[Line]:
    lines: list[Line] = []
    for kind, measure in KINDS.items():
        if kind in chosen:
            async with harness.service(setup.folder) as running:
                lines += await measure(running.url, setup, CONSOLE.print)
    if "limits" in chosen:
        lines.append(Line("fdatasync 4 KiB", "ms", [limits.fdatasync(setup.folder) for _ in range(setup.rounds)]))
        lines.append(Line("CRC32C, one core", "MB/s", [limits.crc32c() for _ in range(setup.rounds)]))
    return lines


def _row(line: Line, by_name: dict[str, Line]) -> list[object]:
    limit = by_name.get(line.limit)
    ratio = f"{line.median / limit.median:.2f}x" if limit is not None else None
    return [line.name, round(line.median, 2), line.unit, ratio, line.limit or None, min(line.values), max(line.values)]


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
