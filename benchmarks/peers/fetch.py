"""Gets peers by the ordinary package clients, each once, into a cache folder outside the repository.

`$XDG_CACHE_HOME/millpond-bench` (default `~/.cache`): jars by `mvn`, Go programs by `go`, Debian's packages by
`apt-get` and `dpkg`, unpacked there and not installed, so that nothing of the machine changes and no root is needed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from pathlib import Path

from benchmarks.children import ToolFailed, place

SECONDS = 900.0
DONE = ".done"


class CannotBeHad(Exception):
    """A peer is not here and cannot be fetched; says why."""


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "millpond-bench"


def tool(*names: str) -> str:
    """The first of these commands that is here. Raises CannotBeHad."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise CannotBeHad(f"needs {' or '.join(names)}, which is not here")
    return found


async def maven(name: str, artifacts: Sequence[str], tell: Callable[[str], None]) -> Path:
    """The folder with the jars of `group:artifact:version`s and all they need."""
    tool("java")

    async def make(folder: Path) -> None:
        pom = folder / "pom.xml"
        pom.write_text(_pom(artifacts))
        await _run(tool("mvn"), "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", "-DoutputDirectory=jars")

    return await _once(name, ["maven", *artifacts], make, tell) / "jars"


async def go(name: str, source: Path, programs: Sequence[str], tell: Callable[[str], None]) -> Path:
    """The folder with `programs` (packages) built in the module at `source`, at the versions its go.mod names."""
    what = ["go", *programs, *_texts(source)]

    async def make(folder: Path) -> None:
        (folder / "bin").mkdir()
        command = tool("go", "/usr/local/go/bin/go")
        await _run(command, "-C", str(source), "build", "-mod=readonly", "-o", str(folder / "bin") + "/", *programs)

    return await _once(name, what, make, tell) / "bin"


async def debian(name: str, packages: Sequence[str], tell: Callable[[str], None]) -> Path:
    """A root folder with these packages, and what they need and the machine has not, unpacked."""

    async def make(folder: Path) -> None:
        apt, dpkg = tool("apt-get"), tool("dpkg")
        lists, archives = folder / "lists", folder / "archives"
        for each in (lists, archives):
            (each / "partial").mkdir(parents=True)
        options = [f"Dir::State::lists={lists}", f"Dir::Cache={folder}", f"Dir::Cache::archives={archives}"]
        common = ["-qq", "-o", "Debug::NoLocking=1", *(word for option in options for word in ("-o", option))]
        await _run(apt, *common, "update")
        await _run(
            apt, *common, "-y", "--no-install-recommends", "--reinstall", "--download-only", "install", *packages
        )
        for archive in sorted(archives.glob("*.deb")):
            await _run(dpkg, "-x", str(archive), str(folder / "root"))
        shutil.rmtree(lists)
        shutil.rmtree(archives)

    return await _once(name, ["debian", *packages], make, tell) / "root"


async def _once(
    name: str, what: Sequence[str], make: Callable[[Path], Awaitable[None]], tell: Callable[[str], None]
) -> Path:
    """The cache's folder for `what`, made now unless it was made completely before."""
    folder = cache() / f"{name}-{sha256(chr(0).join(what).encode()).hexdigest()[:12]}"
    if (folder / DONE).exists():
        return folder
    tell(f"fetching {name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        await make(folder)
    except ToolFailed as error:
        raise CannotBeHad(str(error)) from error
    (folder / DONE).touch()
    return folder


async def _run(*argv: str) -> str:
    async with place("") as here:
        return await here.prepare(*argv, seconds=SECONDS)


def _texts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir()) if path.is_file()]


def _pom(artifacts: Sequence[str]) -> str:
    wanted = "".join(
        "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>".format(
            *artifact.split(":")
        )
        for artifact in artifacts
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>bench</groupId><artifactId>peers</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{wanted}</dependencies></project>\n"
    )
