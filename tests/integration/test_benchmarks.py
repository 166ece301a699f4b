"""Kinds of work come to their end where they are small; what they say of a machine is not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.__main__ import KINDS, measure_of
from benchmarks.harness import Setup
from benchmarks.ours import WORKS, Ours
from millpond.client.connection import Connection

LARGE = {"limits", "produce", "topics", "cold", "waiting", "memory", "sealing"}  # half a minute and more, or gigabytes


@pytest.mark.parametrize("kind", sorted(set(KINDS) - LARGE))
async def test_a_kind_of_work_is_measured(kind: str, tmp_path: Path) -> None:
    """Its services start and end, every line of it has a figure for each round, and nothing stays on the disk."""
    setup = Setup(0.2, 1, 256, 2, folder=str(tmp_path), fill_queues=4, fill_messages=400, backlog=1_000)
    lines = await measure_of(kind)(setup, lambda _what: None)
    assert lines
    assert all(value > 0 for line in lines for value in line.values)
    assert all(line.values for line in lines)
    assert not list(tmp_path.iterdir())


async def test_our_side_of_each_compared_work(tmp_path: Path) -> None:
    """All of them on one service, as beside a peer; they raise where a message is missing."""
    setup = Setup(0.2, 1, 256, 2, connections=4, folder=str(tmp_path))
    async with harness.service(setup.folder) as service, Connection(service.url) as connection:
        ours = Ours(service.url, connection, setup)
        for name, work in WORKS.items():
            figures = await work.run(ours)
            assert figures and all(value > 0 for value in figures.values()), name
