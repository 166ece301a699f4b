"""The page and its charts are what one result says. To write the expected files anew after a change that was meant:
`python -m tests.unit.benchmarks.test_page`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks import charts, page, report
from benchmarks.harness import Aim, Line, Setup
from benchmarks.report import PeerReport, Result

GOLDEN = Path(__file__).parent / "golden"
WORK = "batched produce, memory"
RESULT = Result(
    at_ms=1_790_000_000_000,
    machine={
        "cpu": "Some CPU", "cores": 2, "memory_mib": 24_000, "kernel": "6.1", "python": "3.11.7", "singles": "wrk",
    },
    setup=Setup(seconds=4, rounds=3),
    lines=[
        Line(f"{WORK}: kafka", "messages/s", [200_000, 210_000, 190_000], work=WORK, who="kafka"),
        Line(
            f"{WORK}: millpond beside kafka", "messages/s", [900_000, 1_000_000, 800_000], f"{WORK}: kafka",
            aim=Aim(at_least=4), work=WORK,
        ),
        Line("latency, flush p99: kafka", "ms", [5, 6, 7], work="latency, flush p99", who="kafka"),
        Line(
            "latency, flush p99: millpond beside kafka", "ms", [9.25, 9.5, 9.75], "latency, flush p99: kafka",
            aim=Aim(at_most=1), work="latency, flush p99",
        ),
        Line("fdatasync 4 KiB", "ms", [0.09, 0.1, 0.11]),
        Line("latency p50", "ms", [0.7, 0.7, 0.7], "fdatasync 4 KiB", aim=Aim(at_most=0.8, of="difference")),
        Line("ready after kill -9", "s", [1.5, 1.6, 1.4], note="10,000 queues", aim=Aim(at_most=2, of="value")),
    ],
    peers=[
        PeerReport(
            "kafka", "Kafka", "4.1.0", "To Kafka: a cold JVM.", failed={"many topics": "a | b\nc"},
            commands={WORK: "java -cp '$CACHE/*' ProducerPerformance"},
        ),
        PeerReport("nats", "NATS", "2", "To us: compiled.", missing="needs go, which is not here"),
    ],
    command="python -m benchmarks --peers 'kafka nats'",
)  # fmt: skip


BESIDE = msgspec.structs.replace(
    RESULT,
    lines=[
        Line(f"{WORK}: kafka", "messages/s", [250_000], work=WORK, who="kafka"),
        Line(f"{WORK}: millpond beside kafka", "messages/s", [750_000], f"{WORK}: kafka", work=WORK),
        Line("ready after kill -9", "s", [1.2], aim=Aim(at_most=1, of="value")),
    ],
)


def files() -> dict[str, str]:
    return {"benchmarks.md": page.page(RESULT, [BESIDE]), **page.pictures(RESULT)}


def aims(kept: Sequence[Result] = ()) -> list[list[str]]:
    """The cells of the table, row by row."""
    table = page.page(RESULT, kept).split("## Aims")[1].split("## ")[0]
    return [row.split("|")[1:-1] for row in table.strip().splitlines() if row.startswith("|")][2:]


def test_page_and_charts_are_the_golden_ones() -> None:
    """Byte for byte."""
    assert files() == {path.name: path.read_text() for path in GOLDEN.iterdir()}


def test_every_figure_of_the_aims_is_judged() -> None:
    """Held, missed by ratio, held by difference and by value."""
    assert [row[6] for row in aims()] == ["yes", "**no**", "yes", "yes"]


def test_aims_are_told_of_all_runs() -> None:
    """The ends, the median and how many held, by the aim of today; a run without the figure does not count."""
    assert [row[7:] for row in aims([BESIDE, BESIDE])] == [
        ["3.00 to 4.50", "3.00", "1 of 3"], ["1.58 to 1.58", "1.58", "0 of 1"],
        ["0.60 to 0.60", "0.60", "1 of 1"], ["1.20 to 1.50", "1.20", "3 of 3"],
    ]  # fmt: skip


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    """So that the page can be made again from what is committed."""
    report.save(RESULT, tmp_path / "a.json")
    assert report.read(tmp_path / "a.json") == RESULT


def test_results_of_one_machine_are_merged() -> None:
    """A later figure replaces an earlier one of the same name; all commands are told."""
    again = msgspec.structs.replace(RESULT, lines=[Line("fdatasync 4 KiB", "ms", [0.2])], command="second")
    both = page.merged([RESULT, again])
    assert [line.values for line in both.lines if line.name == "fdatasync 4 KiB"] == [[0.2]]
    assert len(both.lines) == len(RESULT.lines)
    assert both.command.splitlines() == [RESULT.command, "second"]


def test_rounds_of_a_command_that_ran_twice_count_together() -> None:
    """Two hours say more than one, and none of them is chosen."""
    one, other, two = (
        msgspec.structs.replace(RESULT, lines=[Line("fdatasync 4 KiB", "ms", [value])], command=command)
        for value, command in ((0.3, "second"), (0.1, "first"), (0.2, "first"))
    )
    both = page.merged([one, other, two])
    assert [line.values for line in both.lines] == [[0.1, 0.2]]
    assert both.command.splitlines() == ["second", "first  # 2 times"]


@pytest.mark.parametrize(
    ("again", "values"),
    [
        ("limits --rounds 9 --peers kafka --works 'latency, flush'", [0.3, 0.1]),
        ("limits --seconds 1 --peers kafka", [0.1]),
    ],
)
def test_more_rounds_of_the_same_work_count_with_those_before(again: str, values: list[float]) -> None:
    """Rounds of another length, or of other messages, do not."""
    results = [
        msgspec.structs.replace(RESULT, lines=[Line("fdatasync 4 KiB", "ms", [value])], command=command)
        for value, command in ((0.3, "limits --peers kafka"), (0.1, again))
    ]
    assert [line.values for line in page.merged(results).lines] == [values]


@pytest.mark.parametrize(
    "mood", ["taken by the host under", "paused: the disk under", "longest pause of the disk under"]
)
def test_mood_of_the_machine_in_each_run_is_told(mood: str) -> None:
    """A calm run does not hide a disturbed one, whose other figures stay on the page."""
    one, two = (
        msgspec.structs.replace(RESULT, lines=[Line(f"{mood} produce", "% of the cores", [value])], command=command)
        for value, command in ((12.0, "produce"), (0.5, "produce read"))
    )
    assert [line.values for line in page.merged([one, two]).lines] == [[12.0, 0.5]]


@pytest.mark.parametrize(("one", "two"), [(420.0, 96.0), (96.0, 420.0)])
def test_the_most_memory_of_all_runs_is_told(one: float, two: float) -> None:
    """A run of one work does not hide what another work of that kind took."""
    name = "memory, most under comparison with kafka (RssAnon)"
    results = [msgspec.structs.replace(RESULT, lines=[Line(name, "MiB", [value])]) for value in (one, two)]
    assert [line.values for line in page.merged(results).lines] == [[420.0]]


def test_results_of_two_machines_are_not_merged() -> None:
    """Their figures cannot be compared."""
    other = msgspec.structs.replace(RESULT, machine={**RESULT.machine, "cpu": "another"})
    with pytest.raises(ValueError, match="different machines"):
        page.merged([RESULT, other])


def test_less_is_better_for_times() -> None:
    """The best bar stands first."""
    slow_first = page.panel(RESULT, "latency, flush p99", {"millpond": "Millpond"})
    assert [bar.value for bar in slow_first.bars] == [6, 9.5]
    assert "less is better" in slow_first.unit
    assert [bar.ours for bar in page.panel(RESULT, WORK, {}).bars] == [True, False]


def test_charts_stay_inside_their_picture() -> None:
    """Also the spread of a noisy figure."""
    text = charts.chart("t", [charts.Panel("a & b", "u", [charts.Bar("<x>", 1.0, 0.5, 9.0, False)])])
    root = ElementTree.fromstring(text)  # noqa: S314 (our own text)
    ends = [float(line.attrib["x2"]) for line in root.iter("{http://www.w3.org/2000/svg}line")]
    assert max(ends) <= charts.WIDTH - charts.VALUE_WIDTH
    assert "prefers-color-scheme: dark" in text


def test_old_charts_go(tmp_path: Path) -> None:
    """A page never shows a work that is not in its result."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "old.svg").write_text("x")
    page.write(RESULT, tmp_path)
    shown = set(re.findall(r"\(benchmarks/(\w+\.svg)\)", (tmp_path / "benchmarks.md").read_text()))
    assert shown == {path.name for path in (tmp_path / "benchmarks").iterdir()} == {"batched.svg", "latency.svg"}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, text in files().items():
        (GOLDEN / name).write_text(text)


if __name__ == "__main__":
    main()
