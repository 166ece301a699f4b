"""What `millpond bench` found, as a table and as JSON; beside another system, with ratios and what is unfair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millpond.client.load.figures import Rate, Single, Times

Figure = Rate | Times | Single
Figures = Mapping[str, Figure]
COLUMNS = ["", ">messages/s", ">MB/s", ">messages", ">p50 ms", ">p99 ms", ">p99.9 ms"]
SIDE_COLUMNS = ["", "unit", ">Millpond", ">{}", ">Millpond is", ""]


def rows(found: Figures) -> list[list[object]]:
    """For COLUMNS."""
    return [_row(name, figure) for name, figure in found.items()]


def _row(name: str, figure: Figure) -> list[object]:
    if isinstance(figure, Single):
        return [*_row(name, figure.rate)[:4], *_times(figure.times)]
    if isinstance(figure, Rate):
        return [name, round(figure.per_second), figure.megabytes_per_second, figure.count, None, None, None]
    return [name, None, None, figure.count, *_times(figure)]


def _times(times: Times) -> list[object]:
    return [times.p50_ms, times.p99_ms, times.p999_ms]


def middle(figures: Sequence[Figure]) -> Figure:
    """The one of the middle round: by rate, else by its median time."""
    ordered = sorted(figures, key=lambda figure: figure.p50_ms if isinstance(figure, Times) else _rate(figure))
    return ordered[len(ordered) // 2]


def _rate(figure: Rate | Single) -> float:
    return (figure.rate if isinstance(figure, Single) else figure).per_second


def side_by_side(ours: Figures, theirs: Figures) -> list[list[object]]:
    """For SIDE_COLUMNS: each measure of each work that both did."""
    found: list[list[object]] = []
    for name in ours:
        if name in theirs:
            other = dict(_measures(theirs[name]))
            for unit, value in _measures(ours[name]):
                found.append([name, unit, _shown(value), _shown(other[unit]), *_judged(unit, value, other[unit])])
    return found


def _measures(figure: Figure) -> list[tuple[str, float]]:
    times = figure.times if isinstance(figure, Single) else figure
    found = [] if isinstance(figure, Times) else [("messages/s", _rate(figure))]
    if isinstance(times, Times):
        found += [("p50 ms", times.p50_ms), ("p99 ms", times.p99_ms)]
    return found


def _shown(value: float) -> int | float:
    return round(value) if value >= 1000 else value


def _judged(unit: str, ours: float, theirs: float) -> tuple[str, str]:
    if not ours or not theirs:
        return "-", ""
    ratio = ours / theirs
    if unit == "messages/s":
        return f"{ratio:.2f} x", "more is better"
    return f"{ratio:.2f} x", "less is better"


def as_builtins(found: Figures) -> dict[str, dict[str, Any]]:
    """For JSON: every figure with what follows from it."""
    return {name: _plain(figure) for name, figure in found.items()}


def _plain(figure: Figure) -> dict[str, Any]:
    if isinstance(figure, Single):
        return {**_plain(figure.rate), **_plain_times(figure.times), "errors": figure.errors,
                "connections": figure.connections}  # fmt: skip
    if isinstance(figure, Rate):
        return {
            "messages": figure.count,
            "seconds": round(figure.seconds, 3),
            "per_second": round(figure.per_second, 1),
            "megabytes_per_second": round(figure.megabytes_per_second, 2),
        }
    return {"messages": figure.count, **_plain_times(figure)}


def _plain_times(times: Times) -> dict[str, float]:
    return {"p50_ms": times.p50_ms, "p99_ms": times.p99_ms, "p999_ms": times.p999_ms, "most_ms": times.most_ms}


def ratios(ours: Figures, theirs: Figures) -> dict[str, dict[str, float]]:
    """Ours divided by theirs."""
    found: dict[str, dict[str, float]] = {}
    for name in ours:
        if name in theirs:
            other = dict(_measures(theirs[name]))
            found[name] = {unit.replace("messages/s", "per_second").replace(" ", "_"): round(value / other[unit], 3)
                           for unit, value in _measures(ours[name]) if other[unit]}  # fmt: skip
    return found
