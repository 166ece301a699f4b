"""The main job's verdict: equal or not, and the exit code that says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from millpond import demo


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `main` with these rows as the story, on no service."""

    def run(*rows: demo.Row) -> int:
        @contextmanager
        def nothing(data: Path, port: int) -> Iterator[tuple[str, None]]:
            yield "http://127.0.0.1:1", None

        async def tell(self: demo.Story) -> None:
            self.rows.extend(rows)

        monkeypatch.setenv("EXIT", "1")
        monkeypatch.setattr(demo, "standalone", nothing)
        monkeypatch.setattr(demo.Story, "__init__", lambda self, *_: setattr(self, "rows", []))
        monkeypatch.setattr(demo.Story, "tell", tell)
        monkeypatch.setattr(demo.signal, "signal", lambda *_: None)
        return demo.main()

    return run


def test_all_equal(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal counts end with 0, and the table shows computed rates."""
    assert told(demo.Row("published", 1_000, 1_000, 0.5, bytes=2_000_000)) == 0
    shown = capsys.readouterr().out
    assert "2,000" in shown
    assert "yes" in shown


@pytest.mark.parametrize("row", [demo.Row("published", 999, 1_000, 0.5), demo.Row("x", 5, 5, 1.0, exact=False)])
def test_any_difference(told: Any, row: demo.Row, capsys: pytest.CaptureFixture[str]) -> None:
    """A count or a content that differs ends with 1 and says NO in its row."""
    assert told(demo.Row("fine", 1, 1, 0.1), row) == 1
    assert "NO" in capsys.readouterr().out


def test_nothing_moved() -> None:
    """A step without messages or time shows no rate."""
    console = Console(record=True, width=150)
    console.print(demo.table([demo.Row("left unacked", 0, 0, 0.0)]))
    assert "left unacked" in console.export_text()
