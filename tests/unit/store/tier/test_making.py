"""What makes objects of runs: several under way, and what becomes of one that cannot be made."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import pyarrow.parquet as pq
import pytest

from millpond.core.errors import Unavailable
from millpond.core.limits import MIB, ROW_GROUP_BYTES
from millpond.core.tier.directory import StagedFile
from millpond.core.tier.layout import parse_footer
from millpond.store.tier.making import LocalWork
from millpond.store.tier.run import Wanted
from millpond.store.tier.work import Begun, Job

if TYPE_CHECKING:
    from conftest import World

NOON = 1_700_049_600_000  # 2023-11-15 12:00 UTC, as in conftest
BODIES = [np.random.default_rng(number).bytes(700_000) for number in range(12)]


@pytest.fixture(name="work")
async def _work(world: World) -> AsyncIterator[LocalWork]:
    """Over a queue of twelve messages that do not compress."""
    for body in BODIES:
        world.source.append(0, [body])
    work = LocalWork(world.source, world.objects)
    yield work
    await work.close()


async def begin(world: World, work: LocalWork, first: int, end: int) -> Begun:
    """The run of these offsets."""
    ref = world.source.ref(0)
    wanted = Wanted([ref], {ref.queue_id: first}, {ref.queue_id: 0}, {ref.queue_id: end}, 0, 0)
    begun = await work.begin(Job(world.topic.topic_id, 1, wanted, NOON, 64 * MIB))
    assert begun is not None
    return begun


async def test_a_run_begins_before_the_last_is_finished(world: World, work: LocalWork) -> None:
    """Each object has the rows of its own run, and the checksum that is told is that of its bytes."""
    begun = [await begin(world, work, first, first + 4) for first in (0, 4, 8)]
    for number, one in enumerate(begun):
        made = await work.finish(one.number)
        await work.put(made, f"{number}.parquet")
        path = world.folder / "tier" / f"{number}.parquet"
        assert made.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert pq.read_table(path)["body"].to_pylist() == BODIES[4 * number : 4 * number + 4]
        await work.drop(one.number)


async def test_each_row_group_has_the_checksum_of_its_bytes(world: World, work: LocalWork) -> None:
    """Also one that the encoder hands on in several pieces, and the last, which is there when the footer is written."""
    world.source.append(0, [np.random.default_rng(12).bytes(9 * MIB)])
    begun = await begin(world, work, 0, 13)
    made = await work.finish(begun.number)
    await work.put(made, "object.parquet")
    data = (world.folder / "tier" / "object.parquet").read_bytes()
    footer, _ = parse_footer(data[-made.footer_bytes :])
    assert len(footer.groups) > 2
    for group in footer.groups:
        assert google_crc32c.value(data[group.at : group.at + group.bytes]) == group.crc32c
    assert max(group.bytes for group in footer.groups) > 2 * ROW_GROUP_BYTES


async def test_what_cannot_be_written_at_last_is_gone(
    world: World, work: LocalWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was read to its end when the disk refuses: whoever finishes it is told, and nothing temporary stays."""
    write, paths = StagedFile.write, []

    def full_at_last(self: StagedFile, data: memoryview) -> None:
        if paths:
            raise Unavailable("tier_unavailable", "no space left")
        write(self, data)
        paths.append(self._path)
        assert self._path is not None and self._path.exists()

    monkeypatch.setattr(StagedFile, "write", full_at_last)
    begun = await begin(world, work, 0, 12)
    with pytest.raises(Unavailable, match="no space left"):
        await work.finish(begun.number)
    monkeypatch.undo()
    await work.finish((await begin(world, work, 0, 12)).number)  # which is written behind it
    assert [path.exists() for path in paths] == [False]


async def test_a_run_that_nobody_wants_is_gone(world: World, work: LocalWork) -> None:
    """Dropped before it is finished, and again: another one is made as ever, and nothing else stays."""
    begun = await begin(world, work, 0, 12)
    stream = work._runs[begun.number].stream
    await work.drop(begun.number)
    await work.drop(begun.number)
    under_way = list(stream._under_way)
    stream.write(memoryview(bytes(2 * MIB)))  # as a writer does that is collected
    assert list(stream._under_way) == under_way
    made = await work.finish((await begin(world, work, 0, 12)).number)
    await work.put(made, "one.parquet")
    await work.drop(made.number)
    assert list((world.folder / "tier" / ".tmp").iterdir()) == []
    assert pq.read_table(world.folder / "tier" / "one.parquet")["body"].to_pylist() == BODIES
