"""What README.md tells a reader to type works, and answers what it says there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "http://127.0.0.1:8080"
STEP_SECONDS = 40


class Step(NamedTuple):
    """Lines of shell, and pieces of what they print, in this order."""

    shell: str
    pieces: list[str]


def steps(text: str) -> list[Step]:
    """The block under "Five minutes with curl", cut after each expected answer (`#> .. ..`)."""
    block = re.search(r"## Five minutes with curl.*?```bash\n(.*?)```", text, re.DOTALL)
    assert block is not None
    found: list[Step] = []
    lines: list[str] = []
    for line in block.group(1).splitlines():
        if line.startswith("#> "):
            found.append(Step("\n".join(lines), [piece.strip() for piece in line[3:].split(" .. ")]))
            lines = []
        else:
            lines.append(line)
    return [*found, Step("\n".join(lines), [])]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "millpond", "standalone", "--data", str(tmp_path / "data"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # this program
        assert process.stdout is not None
        try:
            yield next(line.split()[1] for line in process.stdout if line.startswith("ready "))
        finally:
            process.terminate()


def test_five_minutes_with_curl(service: str, tmp_path: Path) -> None:
    """Run as one shell session, every curl succeeds (a problem only where the README shows one) and prints that."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    told = steps(README.read_text())
    assert len(told) > 15, "the README lost its answers"
    mark = "-- end of a step --"
    script = 'curl() { command curl --silent --show-error --max-time 20 "$@" && echo; }\n'
    script += "".join(f"{step.shell}\necho '{mark}'\n" for step in told).replace(ADDRESS, service)
    run = subprocess.run(  # noqa: S603  # the reader's own commands
        ["bash", "-euo", "pipefail", "-c", script],  # noqa: S607
        cwd=tmp_path, capture_output=True, text=True, timeout=STEP_SECONDS, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    printed = run.stdout.split(mark)
    assert len(printed) == len(told) + 1
    for step, output in zip(told, printed, strict=False):
        rest = output
        for piece in step.pieces:
            _, found, rest = rest.partition(piece)
            assert found, f"{step.shell}\n\nshould print {piece!r}, printed\n{output}"
        expects_problem = any('"code":' in piece for piece in step.pieces)
        assert expects_problem or '"retryable":' not in output, f"{step.shell}\n\nfailed with\n{output}"
