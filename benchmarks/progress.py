"""What a run shows while it goes on: a bar on a terminal, a line a step elsewhere; and each kind's figures as soon as
they are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from benchmarks.harness import Line


class Progress:
    """`step` a kind or peer, `tell` what goes on in it, `lines` what it found."""

    def __init__(self, steps: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Bar(
            SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
            console=self._console, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=steps)
        self._name = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self._name = name
        self.tell("begins")
        yield
        self._bar.advance(self._task)

    def tell(self, text: str) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=f"{self._name}: {text}", refresh=True)
        else:
            self._console.print(f"{self._name}: {text}", markup=False, soft_wrap=True)

    def lines(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._console.print(
                f"  {line.name}: {line.median:,.2f} {line.unit}", markup=False, soft_wrap=True, style="bold"
            )
