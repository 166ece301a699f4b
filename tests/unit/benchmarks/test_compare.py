"""A peer takes turns with ours; what cannot be had or done is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import compare, harness, peers
from benchmarks.children import Place, ToolFailed
from benchmarks.harness import Setup
from benchmarks.ours import WORKS, Compared
from benchmarks.peers import fetch
from benchmarks.peers.fetch import CannotBeHad
from benchmarks.peers.peer import Figures, Peer, Work


class Fake(Peer):
    """A peer of 100 a second in one work, that fails in another."""

    key, title, version, unfair = "kafka", "Fake", "1", "to none"
    had = True

    async def fetch(self) -> None:
        if not self.had:
            raise CannotBeHad("needs mvn, which is not here")

    async def start(self, here: Place, server: str) -> None:
        turns.append("start")

    def works(self, server: str) -> list[Work]:
        return [Work("batched produce, memory", self._work), Work("batched produce, flush", self._fails)]

    async def _work(self) -> Figures:
        turns.append(f"theirs {self.setup.seconds:g}")
        return {"": 100.0}

    async def _fails(self) -> Figures:
        raise ToolFailed("java ended with 1")


turns: list[str] = []


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """No service, no waiting: only who is asked when."""

    @asynccontextmanager
    async def service(_folder: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(url="http://127.0.0.1:1", pid=1)

    async def settled(*_pids: int) -> bool:
        return True

    async def ours(ours: Any) -> Figures:
        turns.append(f"ours {ours.setup.seconds:g}")
        return {"": 400.0}

    turns.clear()
    monkeypatch.setattr(harness, "service", service)
    monkeypatch.setattr(harness, "settled", settled)
    monkeypatch.setattr(peers, "named", lambda _name: Fake)
    monkeypatch.setattr(Fake, "had", True)
    for name in ("batched produce, memory", "batched produce, flush"):
        monkeypatch.setitem(WORKS, name, Compared("messages/s", ours, ""))


async def test_turns_are_interleaved_after_a_short_round_that_is_not_counted() -> None:
    """Ours, theirs, ours, theirs."""
    lines, _ = await compare.measure("kafka", Setup(seconds=4, rounds=2), lambda _text: None, "memory")
    assert turns == ["start", "ours 2", "theirs 2", "ours 4", "theirs 4", "ours 4", "theirs 4"]
    theirs, ours = lines[:2]
    assert (theirs.values, ours.values) == ([100.0, 100.0], [400.0, 400.0])
    assert ours.limit == theirs.name
    assert (ours.who, theirs.who, ours.work) == ("millpond", "kafka", theirs.work)
    assert ours.aim is not None
    assert ours.aim.at_least == 4


async def test_a_limit_takes_turns_with_the_two_it_is_a_limit_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is a line of its own, beside the peer's."""

    async def limit(setup: Setup) -> Figures:
        turns.append(f"limit {setup.seconds:g}")
        return {"": 250.0}

    monkeypatch.setitem(compare.LIMITS, ("batched produce, memory", "kafka"), {"a wire": limit})
    lines, _ = await compare.measure("kafka", Setup(seconds=4, rounds=1), lambda _text: None, "memory")
    assert turns == ["start", "ours 2", "theirs 2", "limit 2", "ours 4", "theirs 4", "limit 4"]
    assert [line.name for line in lines[:3]] == [
        "batched produce, memory: kafka", "batched produce, memory: millpond beside kafka", "a wire, beside kafka"
    ]  # fmt: skip
    assert (lines[2].values, lines[2].limit) == ([250.0], lines[0].name)


async def test_a_work_that_fails_is_told_and_the_rest_goes_on() -> None:
    """With its reason."""
    lines, told = await compare.measure("kafka", Setup(rounds=1), lambda _text: None)
    assert told.failed == {"batched produce, flush": "ToolFailed: java ended with 1"}
    assert [line.name for line in lines][:1] == ["batched produce, memory: kafka"]
    assert not told.missing


async def test_a_peer_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of ours is measured for it."""
    monkeypatch.setattr(Fake, "had", False)
    lines, told = await compare.measure("kafka", Setup(), lambda _text: None)
    assert (lines, told.missing, turns) == ([], "needs mvn, which is not here", [])


async def test_a_package_client_that_is_not_here_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By name; and what was begun is not taken for complete the next time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        with pytest.raises(CannotBeHad, match="needs apt-get, which is not here"):
            await fetch.debian("redis", ["redis-server"], lambda _text: None)


async def test_every_peer_does_only_works_that_ours_does() -> None:
    """So that each has something beside it; and each says what is unfair."""
    for name in peers.NAMES:
        peer = importable(name)(Setup(), lambda _text: None)
        assert peer.key == name
        assert peer.unfair
        assert {work.name for server in peer.servers for work in peer.works(server)} <= set(WORKS)


def importable(name: str) -> type[Peer]:
    from importlib import import_module

    found: type[Peer] = import_module(f"benchmarks.peers.{name}").PEER
    return found
