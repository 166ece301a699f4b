"""`paced`: each message once, in order, never before it is due, by the kernel's timer and by a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millpond.client.load import pace
from millpond.core.clock import SystemClock

By = Callable[[pace.Sends], Awaitable[None]]
PER_SECOND = 2000


async def by_kernel(sends: pace.Sends) -> None:
    await pace.by_kernel(sends, pace.KernelTimer())


BOTH = pytest.mark.parametrize("by", [by_kernel, pace.by_thread])


class Taken:
    def __init__(self, fails_at: int | None = None, busy_at: int | None = None) -> None:
        self.clock = SystemClock()
        self.fails_at, self.busy_at = fails_at, busy_at
        self.numbers: list[int] = []
        self.due: list[float] = []
        self.early: list[int] = []

    def send(self, number: int, due: float) -> None:
        if number == self.fails_at:
            raise ValueError("no room")
        self.numbers.append(number)
        self.due.append(due)
        if self.clock.monotonic() < due:
            self.early.append(number)
        while number == self.busy_at and self.clock.monotonic() < due + 5 / PER_SECOND:
            pass

    def sends(self, total: int) -> pace.Sends:
        return pace.Sends(self.clock, total, PER_SECOND, self.send)


@BOTH
async def test_each_is_sent_once_in_order_and_none_early(by: By) -> None:
    taken = Taken()
    await by(taken.sends(40))
    assert (taken.numbers, taken.early) == (list(range(40)), [])


@BOTH
async def test_they_are_due_at_the_rate_whatever_the_loop_was_busy_with(by: By) -> None:
    taken = Taken(busy_at=10)
    await by(taken.sends(40))
    assert [due - taken.due[0] for due in taken.due] == pytest.approx([n / PER_SECOND for n in range(40)])


@BOTH
async def test_none_of_none_ends(by: By) -> None:
    taken = Taken()
    await asyncio.wait_for(asyncio.ensure_future(by(taken.sends(0))), 10)
    assert taken.numbers == []


@BOTH
async def test_what_a_send_raises_is_raised_and_nothing_follows_it(by: By) -> None:
    taken = Taken(fails_at=3)
    with pytest.raises(ValueError, match="no room"):
        await by(taken.sends(40))
    assert taken.numbers == [0, 1, 2]


async def test_where_the_kernel_has_no_such_timer_a_thread_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> pace.KernelTimer:
        raise OSError

    monkeypatch.setattr(pace, "KernelTimer", none)
    taken = Taken()
    await pace.paced(taken.clock, 5, PER_SECOND, taken.send)
    assert taken.numbers == list(range(5))
