"""What the host takes is told beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import stolen


def test_the_share_of_the_time_between(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of all that the cores did since then, idle time included and guests' not counted twice."""
    monkeypatch.setattr(stolen, "STAT", tmp_path / "stat")
    stolen.STAT.write_text("cpu  100 0 50 1000 5 0 5 40 7 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    measured = stolen.Stolen()
    stolen.STAT.write_text("cpu  150 0 60 1010 5 0 5 60 57 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    [line] = measured.under("load")
    assert (line.name, line.unit, line.median) == ("taken by the host under load", "% of the cores", 100 * 20 / 90)


def test_no_line_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that does not say is not taken for a host that takes nothing."""
    monkeypatch.setattr(stolen, "STAT", tmp_path / "none")
    assert stolen.Stolen().under("load") == []
