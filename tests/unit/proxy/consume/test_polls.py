"""A receive without a request's task: `Poll`, on a receiver and a parked wait that do what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millpond.core.errors import NotFound
from millpond.core.tasks import Tasks
from millpond.proxy.polls import Poll


class Fake:
    """Receiver, what it holds, and the wait that it parks; `gate`: serving waits for it, `flush`: showing does."""

    def __init__(self, *, parks: bool = True) -> None:
        self.parks = parks
        self.held = self
        self.full = False
        self.calls: list[str] = []
        self.releases = Tasks()
        self.gate = asyncio.Event()
        self.flush = asyncio.Event()
        self.flush.set()
        self.rises: Callable[[bool | Exception], None] = lambda how: None

    def park(self, rises: Callable[[bool | Exception], None]) -> Any:
        self.rises = rises
        return self if self.parks else None

    def leave(self) -> None:
        self.calls.append("left")

    async def release(self) -> None:
        self.calls.append("released")

    async def shown(self) -> None:
        await self.flush.wait()

    async def serve(self, _receiver: Any) -> list[Any]:
        self.calls.append("served")
        await self.gate.wait()
        return [b"answer"]

    def poll(self) -> Poll:
        receiver: Any = self
        return Poll(receiver, [b"nothing"], self.serve, self.releases)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_wait_that_is_over_is_answered_without_a_task() -> None:
    """With the answer that says so."""
    fake = Fake()
    poll = fake.poll()
    fake.rises(False)
    assert (await poll.future, fake.calls) == ([b"nothing"], [])


async def test_one_that_is_woken_is_served() -> None:
    """And what was parked is left in the end."""
    fake = Fake()
    poll = fake.poll()
    fake.gate.set()
    fake.rises(True)
    assert await poll.future == [b"answer"]
    await turns()
    assert fake.calls == ["served", "left"]


async def test_one_of_a_full_group_says_why() -> None:
    """The usual receive knows the reason."""
    fake = Fake()
    fake.full = True
    poll = fake.poll()
    fake.gate.set()
    fake.rises(False)
    assert await poll.future == [b"answer"]


async def test_what_need_not_wait_is_served_at_once() -> None:
    """Without being woken."""
    fake = Fake(parks=False)
    fake.gate.set()
    assert await fake.poll().future == [b"answer"]


async def test_the_error_of_the_wait_is_that_of_the_poll() -> None:
    """A group that is deleted."""
    fake = Fake()
    poll = fake.poll()
    fake.rises(NotFound("group_not_found", "gone"))
    with pytest.raises(NotFound):
        await poll.future


@pytest.mark.parametrize("when", ["waits", "woken", "begun", "served"])
async def test_a_client_that_goes(when: str) -> None:
    """Whenever that is, what was parked is left, and nothing goes on."""
    fake = Fake()
    poll = fake.poll()
    if when != "waits":
        fake.rises(True)
    if when == "begun":
        await asyncio.sleep(0)  # the task is there and has not run
    if when == "served":
        await turns()
    poll.leave()
    await turns()
    fake.gate.set()
    await turns()
    assert set(fake.calls) == ({"served", "left"} if when in {"begun", "served"} else {"left"})


async def test_nothing_is_answered_before_it_may_be_shown() -> None:
    """The answer is made, and waits for the flush."""
    fake = Fake()
    poll = fake.poll()
    fake.flush.clear()
    fake.gate.set()
    fake.rises(True)
    await turns()
    assert (fake.calls, poll.future.done()) == (["served"], False)
    fake.flush.set()
    assert await poll.future == [b"answer"]


async def test_an_answer_that_is_lost_is_handed_back() -> None:
    """What was leased for it."""
    fake = Fake(parks=False)
    poll = fake.poll()
    fake.gate.set()
    await poll.future
    poll.lost()
    await turns()
    assert fake.calls == ["served", "released"]
