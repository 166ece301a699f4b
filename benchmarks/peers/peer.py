"""What a peer is: had, started, worked with by its own tools, ended."""

from __future__ import annotations

import abc
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.children import Place
from benchmarks.harness import Setup
from benchmarks.peers import fetch

Figures = Mapping[str, float]  # by name ("" where there is only one) in the unit of the work
Tell = Callable[[str], None]


class Work(NamedTuple):
    """One kind of work as a peer does it: `name` is one of `ours.WORKS`; `run` is one round. Work of another client
    than the peer's own has its name in `who`."""

    name: str
    run: Callable[[], Awaitable[Figures]]
    who: str = ""


class Peer(abc.ABC):
    """One system. A new one for each server that is started: it holds what was learnt while warming up."""

    key: str  # in PEERS=
    title: str
    version: str
    unfair: str  # what in the comparison is unfair, and to whom
    servers: tuple[str, ...] = ("",)  # names of settings of the server that cannot be had in one
    warm_seconds = 0.0  # at least as long is the round that is not counted

    def __init__(self, setup: Setup, tell: Tell) -> None:
        self.setup = setup
        self.tell = tell

    @abc.abstractmethod
    async def fetch(self) -> None:
        """Make its programs be there. Raises CannotBeHad."""

    @abc.abstractmethod
    async def start(self, here: Place, server: str) -> None:
        """A server on loopback with its data in `here.folder`, ready for work."""

    @abc.abstractmethod
    def works(self, server: str) -> list[Work]:
        """What that server is compared in."""

    def short(self) -> dict[str, str]:
        """Long paths and what stands for them in the commands that are shown."""
        return {str(fetch.cache()): "$CACHE", shutil.which("java") or "java": "java"}

    @staticmethod
    def java(jars: Path, *options: str) -> list[str]:
        return [fetch.tool("java"), *options, "-cp", f"{jars}/*"]


class Paced:
    """How many messages make a round of so many seconds, for a tool that takes a number of messages: known from the
    round before."""

    def __init__(self, at_first_per_second: float) -> None:
        self._per_second = at_first_per_second

    def messages(self, seconds: float) -> int:
        return max(1000, int(self._per_second * seconds))

    def learn(self, per_second: float) -> None:
        self._per_second = per_second
