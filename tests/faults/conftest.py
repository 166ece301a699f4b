"""Processes of these tests end with their test, whatever happened."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cuts import SmallDisk, unavailable
from support.load import Http
from support.processes import Apart, Process, standalone


@pytest.fixture
def small_disk(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    """An ext4 of 192 MiB of its own. Asked for before `start`, so that its users are ended first."""
    if reason := unavailable(tmp_path_factory.getbasetemp()):
        pytest.skip(reason)
    with SmallDisk(tmp_path / "disk", 192) as disk:
        yield disk


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """`start(*flags, name=..., **kind)`: a standalone process that is not launched yet, closed after the test."""
    made: list[Process] = []

    def make(*flags: str, name: str = "one", **kind: Any) -> Process:
        made.append(standalone(tmp_path / name, *flags, **kind))
        return made[-1]

    yield make
    for process in made:
        process.close()


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Callable[..., Apart]]:
    """`apart(*store_flags)`: the parts as three processes, not launched yet, closed after the test."""
    made: list[Apart] = []

    def make(*store_flags: str) -> Apart:
        made.append(Apart(tmp_path / f"apart{len(made)}", *store_flags))
        return made[-1]

    yield make
    for parts in made:
        parts.close()


@pytest.fixture
async def client() -> AsyncIterator[Callable[[Process | Apart], Http]]:
    """`client(service)`: an HTTP client of a service that is ready, closed after the test."""
    made: list[Http] = []

    def make(service: Process | Apart) -> Http:
        made.append(Http(service.url))
        return made[-1]

    yield make
    for one in made:
        await one.close()
