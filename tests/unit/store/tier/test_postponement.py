"""When full runs wait for a quieter moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from millpond.core.limits import SEAL_BUSY_BYTES_PER_SECOND, SEAL_POSTPONE_SECONDS
from millpond.store.tier.postponement import Postponement

if TYPE_CHECKING:
    from conftest import World

FAST = 2 * SEAL_BUSY_BYTES_PER_SECOND
NOON = 1_700_049_600_000  # as in conftest


def test_full_runs_wait_while_bytes_come_fast() -> None:
    """And no longer once they do not."""
    wait = Postponement(1 << 40)
    assert [wait.waits(second, second * FAST) for second in range(4)] == [False, True, True, True]
    assert not wait.waits(4, 3 * FAST)


def test_a_load_that_stays_is_sealed_beside_it() -> None:
    """The wait ends in time, and no other begins before a quieter moment."""
    wait = Postponement(1 << 40)
    waited = [wait.waits(second, second * FAST) for second in range(3 * SEAL_POSTPONE_SECONDS)]
    assert waited == [False] + [True] * (SEAL_POSTPONE_SECONDS - 1) + [False] * (2 * SEAL_POSTPONE_SECONDS)
    last = 3 * SEAL_POSTPONE_SECONDS
    assert not wait.waits(last, (last - 1) * FAST)
    assert wait.waits(last + 1, last * FAST)


def test_bytes_of_a_burst_before_a_rest_do_not_count_for_the_next() -> None:
    """Also when nobody looked while nothing came: its topic had been deleted."""
    wait = Postponement(3 * FAST)
    assert [wait.waits(second, second * FAST) for second in range(3)] == [False, True, True]
    wait.begin(1_000, 2 * FAST)
    assert [wait.waits(1_000 + second, (2 + second) * FAST) for second in range(1, 4)] == [True, True, False]


def test_a_burst_after_a_rest_is_seen_from_its_beginning() -> None:
    """Not as the average over the rest and it."""
    wait = Postponement(1 << 40)
    assert not wait.waits(0, 0)
    assert (wait.stale(0.1), wait.stale(1_000)) == (False, True)
    wait.begin(1_000, 0)
    assert not wait.stale(1_000)
    assert wait.waits(1_001, FAST)


def test_a_wait_is_bounded_in_bytes() -> None:
    """However fast they come."""
    wait = Postponement(3 * FAST)
    assert [wait.waits(second, second * FAST) for second in range(5)] == [False, True, True, False, False]


async def test_only_full_runs_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that is due for its age, and what is asked for, are sealed under any load; a full one afterwards."""
    world.config = msgspec.structs.replace(world.config, seal_bytes=1_000)
    sealer = await world.restart()
    world.source.append(0, [bytes(1_000)])
    monkeypatch.setattr(sealer._postponement, "waits", lambda now, appended: True)
    assert await sealer.seal_once(NOON) == 0
    assert (await sealer.seal_topic(world.topic.topic_id))[world.queue_id(0)] == 1
    world.source.append(0, [b"small"])
    assert await sealer.seal_once(NOON + world.config.seal_age_ms) == 1
    world.source.append(0, [bytes(1_000)])
    monkeypatch.setattr(sealer._postponement, "waits", lambda now, appended: False)
    assert await sealer.seal_once(NOON) == 1
