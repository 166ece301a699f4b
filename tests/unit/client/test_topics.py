"""Topics of the SDK."""

from __future__ import annotations

import pytest
from aiohttp import web

from millpond.client import topics
from millpond.client.connection import Connection
from millpond.client.topics import Topics
from millpond.core.errors import Unavailable

from .conftest import FakeService, problem


async def test_a_long_flush_is_waited_for(service: FakeService) -> None:
    """The service says that it has not ended in time, and goes on: the call asks again until it has."""
    for _ in range(2):
        service.faults.append(lambda _: problem(503, "deadline_exceeded", "the outcome is unknown"))
    service.faults.append(lambda _: web.json_response({"queues": []}))
    async with Connection(service.url, retry_seconds=0) as connection:
        assert await Topics(connection).flush("t") == {"queues": []}
    assert [each.path for each in service.requests] == ["/v1/topics/t/flush"] * 3


@pytest.mark.parametrize(("code", "seconds"), [("tier_unavailable", 1_800), ("deadline_exceeded", 0)])
async def test_a_flush_that_does_not_end(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, code: str, seconds: float
) -> None:
    """What else is wrong is told at once, and so is a flush that takes longer than anyone should wait."""
    monkeypatch.setattr(topics, "FLUSH_SECONDS", seconds)
    service.faults.append(lambda _: problem(503, code, "no"))
    async with Connection(service.url, retry_seconds=0, timeout_seconds=5) as connection:
        with pytest.raises(Unavailable) as told:
            await Topics(connection).flush("t")
    assert told.value.code == code
    assert len(service.requests) == 1
