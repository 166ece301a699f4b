"""What the command says when a kind cannot be measured."""

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import __main__ as command
from millpond.core.errors import DiskFull


def test_a_full_disk_is_told_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that fills the disk ends with one sentence, not a traceback, and with exit code 1."""

    async def filled(*_: object) -> None:
        raise DiskFull("disk_full", "the store's disk is full")

    monkeypatch.setattr(command, "_measure", filled)
    app = Typer()
    app.command()(command.main)
    result = CliRunner().invoke(app, ["topics"])
    assert result.exit_code == 1
    assert result.stderr == (
        "the store's disk is full; measure on a disk with more room (--folder), or for fewer --seconds\n"
    )
