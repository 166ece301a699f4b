"""Topics, queues and groups that come, grow and go while they are used, with kill -9 and clean ends in between.

What a call is answered depends on what is there by then; but it is never an error of ours, and every start is ready.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.load import Http
from support.processes import Process

CALLERS = 24
TOPICS, GROUPS, KEYS = 6, 2, 20
SMALL = (
    "--segment-bytes", str(4 << 20), "--local-bytes", str(24 << 20), "--checkpoint-bytes", str(1 << 20),
    "--seal-bytes", str(1 << 20), "--seal-age-ms", "3000", "--seal-trickle-ms", "5000",
)  # fmt: skip


class Calls:
    """`CALLERS` at a time, at random, until they are cancelled. `answers`: how many of each status and code."""

    def __init__(self, http: Http, seed: int) -> None:
        self._http = http
        self._random = random.Random(seed)  # noqa: S311  # a seed reproduces the calls
        self.answers: Counter[tuple[int, str]] = Counter()
        self.faults: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._calls() for _ in range(CALLERS)))

    async def _calls(self) -> None:
        kinds = {
            self._produce: 32, self._receive: 35, self._put: 8, self._delete: 4, self._grow: 2, self._delete_group: 2,
            self._flush: 2, self._seek: 3, self._look: 12,
        }  # fmt: skip
        while True:
            [kind] = self._random.choices(list(kinds), list(kinds.values()))
            await kind(f"/v1/topics/t{self._random.randrange(TOPICS)}")

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer when it is a success."""
        answer = await self._http.call(method, path, body)
        self.answers[answer.status, answer.code] += 1
        if answer.code in {"internal", "corrupt_range", "tier_corrupt", "metadata_corrupt"}:
            self.faults.append(f"{method} {path} {body}: {answer}")
        if not answer.status:
            await asyncio.sleep(0.05)  # the service is away
        return answer.body if answer.outcome == "ok" else None

    def _group(self, topic: str) -> str:
        return f"{topic}/groups/g{self._random.randrange(GROUPS)}"

    async def _produce(self, topic: str) -> None:
        some = self._random
        messages = [
            {"body": "x" * some.choice([10, 1_000]), "key": f"k{some.randrange(KEYS)}"}
            | ({"dedup_id": str(some.randrange(1_000))} if some.random() < 0.2 else {})
            for _ in range(some.choice([1, 1, 10, 200]))
        ]
        await self._call("POST", f"{topic}/messages", {"messages": messages})

    async def _receive(self, topic: str) -> None:
        some, at = self._random, f"{self._group(topic)}/messages"
        wanted = {"start": "earliest", "max_messages": some.choice([1, 100, 1_000]), "wait_ms": some.choice([0, 500])}
        got = await self._call("POST", f"{at}/receive", wanted | {"lease_ms": some.choice([1_000, 30_000])})
        if got and some.random() < 0.8:
            settled = [{"receipt": one["receipt"], "rows": one["rows"]} for one in got["receipts"]]
            await self._call("POST", f"{at}/ack", {some.choice(["acks", "acks", "nacks"]): settled})

    async def _put(self, topic: str) -> None:
        settings = {
            "queues": self._random.choice([1, 2, 4]),
            "durability": self._random.choice(["flush", "memory"]),
            "retention": self._random.choice([{}, {"ms": 3_000}, {"bytes": 200_000}]),
        }
        await self._call("PUT", topic, settings)

    async def _grow(self, topic: str) -> None:
        await self._call("PATCH", topic, {"queues": self._random.choice([2, 4, 5])})

    async def _delete(self, topic: str) -> None:
        await self._call("DELETE", topic)

    async def _delete_group(self, topic: str) -> None:
        await self._call("DELETE", self._group(topic))

    async def _flush(self, topic: str) -> None:
        await self._call("POST", f"{topic}/flush")

    async def _seek(self, topic: str) -> None:
        await self._call("POST", f"{self._group(topic)}/seek", {"to": self._random.choice(["earliest", "latest"])})

    async def _look(self, topic: str) -> None:
        paths = [
            f"{topic}/queues/0/messages?tail=5",
            f"{topic}/messages?key=k{self._random.randrange(KEYS)}",
            f"{self._group(topic)}/lag",
            f"{topic}/history",
        ]
        await self._call("GET", self._random.choice(paths))


async def lives(service: Process, http: Http, ends: int, seed: int, seconds: float) -> None:
    """`ends` ends of the service, every other one by kill -9, so many seconds apart."""
    calls = Calls(http, seed)
    running = asyncio.create_task(calls.run())
    for number in range(ends):
        await asyncio.wait([running], timeout=seconds)
        if number % 2:
            assert await service.stop() == 0
        else:
            assert service.kill() == -signal.SIGKILL
        await service.start()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    print(f"\nseed {seed}: {dict(calls.answers)}")
    assert not calls.faults, calls.faults
    assert calls.answers[200, ""] > 100 * ends, "there was next to nothing to go wrong"


async def test_topics_and_groups_that_come_and_go(
    start: Callable[..., Process], client: Callable[[Process], Http]
) -> None:
    """Two ends, three seconds apart."""
    service = await start(*SMALL).start()
    await lives(service, client(service), ends=2, seed=1, seconds=3)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_topics_and_groups_that_come_and_go_for_minutes(
    start: Callable[..., Process], client: Callable[[Process], Http]
) -> None:
    """Thirty ends, five seconds apart, on one data directory."""
    service = await start(*SMALL).start()
    await lives(service, client(service), ends=30, seed=2, seconds=5)
