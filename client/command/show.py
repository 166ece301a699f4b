"""What commands print: tables for people on stdout, or JSON with `--json`; errors on stderr with the remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from millpond.client.command.exits import Failure

if TYPE_CHECKING:
    from rich.progress import Progress

WIDE = 500  # columns, where stdout is no terminal: a file or a pipe has no width to fit

OUT = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
ERR = Console(stderr=True, highlight=False)


def as_json(value: object) -> None:
    """`value` as one line of JSON."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """A table; columns named `>name` are aligned to the right."""
    shown = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        shown.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        shown.add_row(*(cell(value) for value in row))
    OUT.print(shown)


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return str(value)


def failure(told: Failure, machine: bool) -> None:
    if machine:
        as_json(told)
        return
    ERR.print(f"[red]error:[/red] {escape(told.error)}", soft_wrap=True)
    if told.remedy:
        ERR.print(f"[yellow]what to do:[/yellow] {escape(told.remedy)}", soft_wrap=True)


def escape(text: str) -> str:
    return text.replace("[", "\\[")


def progress(machine: bool, bytes_: bool = False) -> Progress:
    """A progress bar on stderr; none for machines, nor where stderr is no terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    counts: list[Any] = [TransferSpeedColumn()] if bytes_ else [MofNCompleteColumn()]
    return Progress(
        TextColumn("{task.description}"), BarColumn(), *counts, TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
        console=ERR, transient=True, disable=machine or not ERR.is_terminal,
    )  # fmt: skip
