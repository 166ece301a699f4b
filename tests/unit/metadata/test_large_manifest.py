"""The manifest stays fast when it is large. Counted in steps of SQLite's machine, which do not depend on the load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, Engine

from millpond.metadata import catalog, manifest
from millpond.metadata.client import TierObject, TopicSettings
from millpond.metadata.engine import make_engine
from millpond.metadata.tables import HEAD, METADATA, QUEUES, TIER_OBJECTS, TIER_RANGES

OBJECTS = 100_000
QUEUES_HERE = 4
ROWS = 100  # of each object, all of one queue
STEPS = 2_000  # a view of a few objects, or one commit; reading every object takes millions
Answer = TypeVar("Answer")


def _fill(connection: Connection) -> None:
    """100,000 committed objects, in turn of four queues."""
    catalog.make_tenant(connection, "default", 0)
    topic, _ = catalog.put_topic(connection, "default", "orders", TopicSettings(queues=QUEUES_HERE), 0)
    objects, ranges = [], []
    for number in range(OBJECTS):
        queue, first = number % QUEUES_HERE, number // QUEUES_HERE * ROWS
        name = f"v1/{number:08}.parquet"
        described = {"object_no": number + 1, "object_id": name, "topic_id": topic.topic_id, "path": name}
        described |= {"store_group": "a", "epoch": 1, "bytes": 1, "sha256": "", "footer_bytes": 1, "changed_ms": 0}
        objects.append(described | {"state": "COMMITTED", "tier_version": number + 1})
        held = {"object_no": number + 1, "queue_id": topic.queues[queue].queue_id, "queue": queue, "committed": 1}
        ranges.append(held | {"first": first, "end": first + ROWS, "rows": ROWS, "min_store_ts": 0, "max_store_ts": 0})
    connection.execute(TIER_OBJECTS.insert(), objects)
    connection.execute(TIER_RANGES.insert(), ranges)
    connection.execute(QUEUES.update().values(tiered_to=OBJECTS // QUEUES_HERE * ROWS))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = tmp_path_factory.mktemp("large") / "metadata.db"
    engine = make_engine(f"sqlite:///{path}", 1_000, 60_000)
    with engine.begin() as connection:
        METADATA.create_all(connection)
        connection.execute(HEAD.insert().values(one=1, schema_version=1, version=1, floor=0))
        _fill(connection)
    yield engine
    engine.dispose()


def counted(engine: Engine, call: Callable[[Connection], Answer]) -> tuple[Answer, int]:
    """What `call` answers, and how many steps of SQLite's machine it took, to the next hundred."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 100

    with engine.begin() as connection:
        driver: Any = connection.connection.dbapi_connection
        driver.set_progress_handler(step, 100)
        try:
            return call(connection), steps
        finally:
            driver.set_progress_handler(None, 0)


@pytest.mark.parametrize("middle", [0, 1_250_000, 2_499_000])
def test_view_of_a_few_offsets(engine: Engine, middle: int) -> None:
    """A window anywhere in a queue finds its objects without walking over the others."""

    def view(connection: Connection) -> list[TierObject]:
        return manifest.tier_view(connection, 1, [2], middle, middle + 250).objects

    objects, steps = counted(engine, view)
    assert [obj.ranges[0].first for obj in objects] == [middle, middle + 100, middle + 200]
    assert all(obj.ranges[0].queue == 1 for obj in objects)
    assert steps < STEPS


def test_view_of_the_tail(engine: Engine) -> None:
    """An open-ended window near the end costs what it holds."""
    end = OBJECTS // QUEUES_HERE * ROWS
    view, steps = counted(engine, lambda c: manifest.tier_view(c, 1, [1, 2], end - 150, None))
    assert len(view.objects) == 4
    assert steps < STEPS


def test_whole_view(engine: Engine) -> None:
    """Everything of a topic is there, in the order of paths."""
    view, _ = counted(engine, lambda c: manifest.tier_view(c, 1, None, 0, None))
    paths = [obj.path for obj in view.objects]
    assert len(paths) == OBJECTS
    assert paths == sorted(paths)
