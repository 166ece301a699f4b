"""What a run found, as one JSON file and as a table: the lines, the machine, and the peers that took part or could
not be had."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import single
from benchmarks.harness import Aim, Line, Setup
from millpond.client.command import show
from millpond.core.clock import SystemClock

RESULTS = Path(__file__).parent / "results"
SIGNS = {"ratio": "x", "value": "", "difference": ""}


class PeerReport(msgspec.Struct, frozen=True):
    """A peer: `missing` says why it, or for a key of `failed` that work of it, could not be measured."""

    key: str
    title: str
    version: str = ""
    unfair: str = ""
    missing: str = ""
    failed: dict[str, str] = {}
    commands: dict[str, str] = {}


class Result(msgspec.Struct, frozen=True):
    """One run."""

    at_ms: int
    machine: dict[str, Any]
    setup: Setup
    lines: list[Line]
    peers: list[PeerReport] = []
    command: str = ""


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    memory = next((int(line.split()[1]) // 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model, "cores": os.cpu_count(), "memory_mib": memory, "kernel": platform.release(),
        "python": platform.python_version(), "singles": single.tool(),
    }  # fmt: skip


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def result(lines: list[Line], setup: Setup, peers: list[PeerReport], command: str) -> Result:
    # where somebody's disk is mounted is nobody else's business
    return Result(SystemClock().wall_ms(), machine(), msgspec.structs.replace(setup, folder=""), lines, peers, command)


def write(found: Result) -> Path:
    """All of a run, named by its time."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{found.at_ms}.json"
    save(found, path)
    return path


def save(found: Result, path: Path) -> None:
    """As JSON; medians are written beside the values, for who reads the file by eye."""
    told = msgspec.to_builtins(found)
    told["lines"] = [{**each, "median": line.median} for each, line in zip(told["lines"], found.lines, strict=True)]
    path.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")


def read(path: Path) -> Result:
    return msgspec.json.decode(path.read_bytes(), type=Result)


def compared(line: Line, by_name: dict[str, Line]) -> float | None:
    """The figure that the line's aim, if any, is held against: its median, or ratio or difference to its limit."""
    limit = by_name.get(line.limit)
    of = line.aim.of if line.aim is not None else "ratio"
    if of == "value":
        return line.median
    if limit is None:
        return None
    return line.median - limit.median if of == "difference" else line.median / limit.median if limit.median else None


def met(aim: Aim, figure: float) -> bool:
    return (aim.at_least is None or figure >= aim.at_least) and (aim.at_most is None or figure <= aim.at_most)


def aim_text(aim: Aim) -> str:
    """`>= 4x`, `<= limit + 0.8`, `<= 2`."""
    before, after = ("limit + " if aim.of == "difference" else ""), SIGNS[aim.of]
    bounds = ((">=", aim.at_least), ("<=", aim.at_most))
    return ", ".join(f"{sign} {before}{bound:,.15g}{after}" for sign, bound in bounds if bound is not None)


def table(found: Result) -> None:
    """On stdout: a row a line, and what could not be measured."""
    by_name = {line.name: line for line in found.lines}
    about = found.machine
    show.table(
        ["", ">median", "unit", ">of the limit", ">aim", "", "limit", ">least", ">most"],
        [_row(line, by_name) for line in found.lines],
        title=f"{found.setup.message_bytes:,} B messages; {about['cores']} x {about['cpu']}; "
        f"single requests by {about['singles']}",
    )
    gone = [(peer.title, "", peer.missing) for peer in found.peers if peer.missing]
    gone += [(peer.title, work, why) for peer in found.peers for work, why in peer.failed.items()]
    if gone:
        show.table(["could not be measured", "", "why"], gone)


def _row(line: Line, by_name: dict[str, Line]) -> list[object]:
    limit = by_name.get(line.limit)
    ratio = f"{line.median / limit.median:.2f}x" if limit is not None and limit.median else None
    figure = compared(line, by_name)
    aim = held = ""
    if line.aim is not None:
        aim = aim_text(line.aim)
        held = "-" if figure is None else "yes" if met(line.aim, figure) else "no"
    return [
        line.name, round(line.median, 2), line.unit, ratio, aim, held, line.limit or None, min(line.values),
        max(line.values),
    ]  # fmt: skip
