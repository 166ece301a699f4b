from __future__ import annotations

import asyncio
import logging

import pytest

from millpond.core.tasks import Tasks


async def forever() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise KeyError("why")


async def test_a_death_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """A task that raises is logged and told to its owner by name."""
    deaths: list[tuple[str, BaseException]] = []
    tasks = Tasks(lambda name, error: deaths.append((name, error)))
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([tasks.spawn(fails(), "the task")])
    await asyncio.sleep(0)
    assert [(name, type(error)) for name, error in deaths] == [("the task", KeyError)]
    assert "the task" in caplog.text


async def test_close_cancels_and_waits() -> None:
    """After `close` nothing runs, and nothing was called a death."""
    deaths: list[str] = []
    tasks = Tasks(lambda name, _: deaths.append(name))
    task = tasks.spawn(forever(), "waits")
    await tasks.close()
    assert task.cancelled()
    assert (len(tasks), deaths) == (0, [])


async def test_a_closed_owner_starts_nothing() -> None:
    """A task that would have no owner is refused."""
    tasks = Tasks()
    await tasks.close()
    with pytest.raises(RuntimeError, match="late"):
        tasks.spawn(forever(), "late")


async def test_finish_waits_for_what_ends_in_time() -> None:
    """What ends by itself is not cancelled; what does not is, once the time is over."""
    tasks, go_on = Tasks(), asyncio.Event()
    ends, stays = tasks.spawn(go_on.wait(), "ends"), tasks.spawn(forever(), "stays")
    finishing = asyncio.create_task(tasks.finish(0.05))
    await asyncio.sleep(0)
    go_on.set()
    await finishing
    assert ends.result() is True
    assert stays.cancelled()


async def test_finish_waits_for_what_its_tasks_start() -> None:
    """A task that hands over to another one as it ends leaves nothing half done."""
    tasks, hand_over, go_on = Tasks(), asyncio.Event(), asyncio.Event()
    second: list[asyncio.Task[bool]] = []

    async def first() -> None:
        await hand_over.wait()
        second.append(tasks.spawn(go_on.wait(), "second"))

    tasks.spawn(first(), "first")
    finishing = asyncio.create_task(tasks.finish(60))
    await asyncio.sleep(0)
    hand_over.set()
    for _ in range(10):  # turns of the loop: the first has ended, and whoever waits for it alone has gone on
        await asyncio.sleep(0)
    go_on.set()
    await finishing
    assert second[0].result() is True
