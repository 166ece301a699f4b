"""`python -m benchmarks.page [RESULT.json ..]`: docs/benchmarks.md and its charts, from what runs wrote.

Several results of one machine become one page. Rounds of a command that ran more than once count together, however many
it was told to make and of which works; else a later figure of the same name replaces an earlier one, except what the
host took and the disk's pauses, where each run's stay, and the most memory that a load took, where the greatest does.
Together they are kept as benchmarks/results/latest.json, which is also what is read when none is named. Every figure on
the page is out of that file, but for how the aims did in the runs kept beside it.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks import charts, report
from benchmarks.charts import Bar, Panel, figure
from benchmarks.compare import OURS
from benchmarks.harness import Line
from benchmarks.memory import MOST
from benchmarks.ours import WORKS
from benchmarks.paused import LONGEST, PAUSED
from benchmarks.report import PeerReport, Result
from benchmarks.stolen import TAKEN

ROOT = Path(__file__).parent.parent
LATEST = report.RESULTS / "latest.json"
LESS_IS_BETTER = {"ms", "s", "MiB", "% of a core"}
CHARTS = {
    "batched": ("Batched produce", ("batched produce",)),
    "single": ("Single requests", ("single requests",)),
    "consume": ("Consume", ("direct read", "lease + ack")),
    "latency": ("Produce to consume", ("latency",)),
    "topics": ("Many topics", ("many topics",)),
}
HEAD = """# Benchmarks

<!-- Made by `python -m benchmarks.page` from benchmarks/results/latest.json; do not edit. -->

Figures of one machine, client and servers sharing its cores. Each is the median of the rounds that its command below
asks for (3 of 4 s where it does not say; all of them where it ran more than once),
interleaved with what it is compared with (A B A B ..) after a round that is not counted; before each round the disk has
what was written, and the processes have come to rest. A ratio counts more than a figure. To see yours:
`make bench`, and with peers `make bench PEERS="kafka rocketmq nats redis rabbitmq elasticmq"`. Where the time goes, and
what was tried: [performance.md](performance.md).
"""


def merged(results: Sequence[Result]) -> Result:
    """All of them as one. Raises ValueError when they are of different machines."""
    last = results[-1]
    if any(one.machine != last.machine for one in results):
        raise ValueError("results of different machines do not make one page")
    lines: dict[str, Line] = {}
    asked: dict[str, list[str]] = {}
    for work, line in ((_work(one.command), line) for one in results for line in one.lines):
        values, before = line.values, lines.get(line.name)
        if before is not None and line.name.startswith(MOST):
            values = [max(*before.values, *values)]
        elif before is not None and (line.name.startswith((TAKEN, PAUSED, LONGEST)) or asked[line.name] == work):
            values = [*before.values, *values]
        lines[line.name] = msgspec.structs.replace(line, values=values)
        asked[line.name] = work
    peers: dict[str, PeerReport] = {}
    for peer in (peer for one in results for peer in one.peers):
        earlier = peers.get(peer.key)
        peers[peer.key] = peer if earlier is None else _both(earlier, peer)
    times = Counter(one.command for one in results if one.command)
    commands = [text if count == 1 else f"{text}  # {count} times" for text, count in times.items()]
    return msgspec.structs.replace(
        last, lines=list(lines.values()), peers=list(peers.values()), command="\n".join(commands)
    )


def _work(command: str) -> list[str]:
    """The command but for how often it measures, and which works beside a peer."""
    words = shlex.split(command)
    left_out = [at for at, word in enumerate(words) if word in ("--rounds", "--works")]
    return [word for at, word in enumerate(words) if at not in left_out and at - 1 not in left_out]


def _both(before: PeerReport, after: PeerReport) -> PeerReport:
    """The report on a peer of two runs: what failed in the first and was not tried again in the second stays told."""
    failed = {work: why for work, why in before.failed.items() if work not in after.commands} | after.failed
    return msgspec.structs.replace(after, failed=failed, commands=before.commands | after.commands)


def page(found: Result, kept: Sequence[Result] = ()) -> str:
    """The text of docs/benchmarks.md. `kept`: other runs, of any machine."""
    titles = titles_of(found)
    parts = [
        HEAD,
        _machine(found), _aims(found, titles, kept), _charts(found), _lines(found), _missing(found), _unfair(found),
        _commands(found),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def pictures(found: Result) -> dict[str, str]:
    """The charts, by file name."""
    titles = titles_of(found)
    made = {}
    for key, (title, beginnings) in CHARTS.items():
        panels = [panel(found, work, titles) for work in _works(found) if work.startswith(beginnings)]
        if panels:
            made[f"{key}.svg"] = charts.chart(title, panels)
    return made


def panel(found: Result, work: str, titles: dict[str, str]) -> Panel:
    """A work's bars, the best first; ours is the median of all the rounds beside all peers."""
    rounds: dict[str, list[float]] = {}
    unit = ""
    for line in found.lines:
        if line.work == work:
            rounds.setdefault(line.who, []).extend(line.values)
            unit = line.unit
    less = unit in LESS_IS_BETTER
    bars = [
        Bar(titles.get(who, who), statistics.median(values), min(values), max(values), who == OURS)
        for who, values in rounds.items()
    ]
    bars.sort(key=lambda bar: bar.value, reverse=not less)
    told = next((f", {compared.told}" for name, compared in WORKS.items() if work.startswith(name)), "")
    return Panel(work, f"{unit}{told}: {'less' if less else 'more'} is better", bars)


def titles_of(found: Result) -> dict[str, str]:
    return {OURS: "Millpond", **{peer.key: f"{peer.title} {peer.version}".strip() for peer in found.peers}}


def _works(found: Result) -> list[str]:
    return list(dict.fromkeys(line.work for line in found.lines if line.work))


def _table(head: str, rows: Sequence[Sequence[str]]) -> str:
    columns = head.split("|")
    rule = "|".join("---:" if column.startswith(">") else "---" for column in columns)
    lines = ["|".join(column.removeprefix(">") for column in columns), rule, *("|".join(row) for row in rows)]
    return "\n".join(f"|{line}|" for line in lines) + "\n"


def _machine(found: Result) -> str:
    about = found.machine
    at = datetime.fromtimestamp(found.at_ms / 1000, UTC)
    rows = [
        ("when", f"{at:%Y-%m-%d %H:%M} UTC"),
        ("processor", f"{about['cores']} cores of {about['cpu']}"),
        ("memory", f"{about['memory_mib'] / 1024:.1f} GiB"),
        ("Linux", str(about["kernel"])),
        ("Python", str(about["python"])),
        ("messages", f"{found.setup.message_bytes:,} bytes of random uppercase letters, where no line says otherwise"),
        ("single requests", f"by {about['singles']}, {found.setup.connections} connections"),
        *((peer.title, peer.version + (" (not measured: see below)" if peer.missing else "")) for peer in found.peers),
    ]  # fmt: skip
    return "## Machine and versions\n\n" + _table("|", rows)


def _aims(found: Result, titles: dict[str, str], kept: Sequence[Result]) -> str:
    runs = [{line.name: line for line in one.lines} for one in (found, *kept)]
    rows = [[*_aim(line, runs[0], titles), *_in_all(line, runs)] for line in found.lines if line.aim is not None]
    if not rows:
        return ""
    about = (
        "The last three columns are of all runs that are kept (benchmarks/results/), this one among them, whatever "
        "the code,\nthe hour, the machine: the least to the most of what the aim is held against, their median, and "
        "in how\nmany it held.\n"
    )
    head = "work|>ours|beside|>that|>ratio|>aim|held|>all runs|>median|>held in"
    return "\n".join(["## Aims", "", about, _table(head, rows)])


def _in_all(line: Line, runs: Sequence[dict[str, Line]]) -> list[str]:
    """Of all runs that have this figure: the least and the most, the median, and in how many the aim held."""
    aim = line.aim
    assert aim is not None
    of_run = [(msgspec.structs.replace(run[line.name], aim=aim), run) for run in runs if line.name in run]
    values = [value for one, run in of_run if (value := report.compared(one, run)) is not None]
    if not values:
        return ["", "", ""]
    least, middle, most = (
        figure(value) if aim.of == "value" else f"{value:.2f}"
        for value in (min(values), statistics.median(values), max(values))
    )
    return [f"{least} to {most}", middle, f"{sum(report.met(aim, value) for value in values)} of {len(values)}"]


def _aim(line: Line, by_name: dict[str, Line], titles: dict[str, str]) -> list[str]:
    assert line.aim is not None
    limit = by_name.get(line.limit)
    held = report.compared(line, by_name)
    return [
        line.work or line.name,
        f"{figure(line.median)} {line.unit}",
        _beside(limit, titles) if limit else "",
        f"{figure(limit.median)} {limit.unit}" if limit else "",
        f"{line.median / limit.median:.2f}x" if limit and limit.median else "",
        report.aim_text(line.aim) + (f" {line.unit}" if line.aim.of != "ratio" else ""),
        "not measured" if held is None else "yes" if report.met(line.aim, held) else "**no**",
    ]


def _beside(limit: Line, titles: dict[str, str]) -> str:
    return titles.get(limit.who, limit.who) if limit.work else limit.name


def _charts(found: Result) -> str:
    made = pictures(found)
    if not made:
        return ""
    shown = [f"![{CHARTS[name.removesuffix('.svg')][0]}](benchmarks/{name})\n" for name in made]
    about = (
        "Bars are medians, thin lines go from the least round to the most; ours is of the rounds beside all peers.\n"
    )
    return "\n".join(["## Side by side", "", about, *shown])


def _lines(found: Result) -> str:
    by_name = {line.name: line for line in found.lines}
    rows = [
        [
            line.name + (f" ({line.note})" if line.note else ""),
            figure(line.median), figure(min(line.values)), figure(max(line.values)), line.unit,
            _ratio(line, by_name.get(line.limit)), line.limit,
        ]
        for line in found.lines
    ]  # fmt: skip
    return "## All figures\n\n" + _table("|>median|>least|>most|unit|>ratio|to", rows)


def _ratio(line: Line, limit: Line | None) -> str:
    return f"{line.median / limit.median:.2f}x" if limit and limit.median else ""


def _missing(found: Result) -> str:
    rows = [[peer.title, "all", _cell(peer.missing)] for peer in found.peers if peer.missing]
    rows += [[peer.title, work, _cell(why)] for peer in found.peers for work, why in peer.failed.items()]
    return "## What could not be measured\n\n" + _table("|work|why", rows) if rows else ""


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _unfair(found: Result) -> str:
    there = [peer for peer in found.peers if not peer.missing and peer.unfair]
    if not there:
        return ""
    about = (
        "All: one machine's cores are shared by server and client, which favours what takes little of them; disk and "
        "page cache are shared by turns. Ours: its client is Python and its protocol plain HTTP.\n"
    )
    told = [f"- **{peer.title}.** {peer.unfair}" for peer in there]
    return "\n".join(["## What is unfair, and to whom", "", about, *told, ""])


def _commands(found: Result) -> str:
    tools = [(peer.title, work, command) for peer in found.peers for work, command in peer.commands.items() if command]
    told = "\n\n".join([found.command, *(f"# {title}: {work}\n{command}" for title, work, command in tools)])
    about = (
        "`$CACHE` is where peers are kept (`~/.cache/millpond-bench`), `$DATA` a folder made for the run; numbers of "
        "messages are those of the last round.\n"
    )
    return f"## Commands\n\n{about}\n```sh\n{told}\n```\n"


def kept_runs() -> list[Result]:
    """The runs that are in the repository beside the page's own: those that have a name, not a time."""
    paths = sorted(report.RESULTS.glob("*.json"))
    return [report.read(path) for path in paths if path != LATEST and not path.stem.isdigit()]


def write(found: Result, docs: Path, kept: Sequence[Result] = ()) -> list[Path]:
    """The page and its charts below `docs`; charts of works that are no more go."""
    folder = docs / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    made = {folder / name: text for name, text in pictures(found).items()}
    made[docs / "benchmarks.md"] = page(found, kept)
    for old in set(folder.glob("*.svg")) - set(made):
        old.unlink()
    for path, text in made.items():
        path.write_text(text)
    return list(made)


def main() -> None:
    found = merged([report.read(Path(name)) for name in sys.argv[1:] or [str(LATEST)]])
    if sys.argv[1:]:
        report.save(found, LATEST)
    for path in write(found, ROOT / "docs", kept_runs()):
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
