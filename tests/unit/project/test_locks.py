"""The lock files hold what pyproject.toml asks for, hashed, once, and nothing of this or any other machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
LOCKS = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("*.lock")}
PINNED = re.compile(r"^([a-z0-9.-]+)==(\S+)([^\\\n]*)\\$", re.MULTILINE)


def packages(lock: str) -> set[str]:
    return {name for name, _, _ in PINNED.findall(LOCKS[lock])}


def asked(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", one)[0].lower() for one in requirements}


def test_every_package_is_in_one_lock() -> None:
    """So that no two files can disagree."""
    names = [name for lock in LOCKS for name in packages(lock)]
    assert len(names) == len(set(names))


def test_locks_hold_what_is_asked_for() -> None:
    """Each purpose has its packages, in its own file or in those it is installed upon."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    service = packages("service")
    assert asked(project["project"]["dependencies"]) | asked(extras["postgresql"]) <= service
    run = service | packages("run")
    assert asked(extras["spark"]) | asked(extras["demo"]) <= run
    dev = run | packages("dev")
    assert asked(groups["dev"]) <= dev
    assert asked(groups["long"]) <= dev | packages("long")
    assert asked(groups["build"]) == packages("build")
    assert asked(extras["java"]) == packages("java")
    assert asked(groups["bench"]) == packages("bench")


def test_every_pin_has_hashes() -> None:
    """`--require-hashes` would refuse the others, and only at install time."""
    for text in LOCKS.values():
        for entry in re.split(r"(?m)^(?=[a-z0-9])", text)[1:]:
            assert "--hash=sha256:" in entry


def test_locks_name_no_machine() -> None:
    """No index, no host, no path."""
    for text in LOCKS.values():
        assert not re.search(r"://|--index-url|--extra-index-url|--find-links|(?m:^/)", text)
