"""What several files about delivery share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.deliveries import Bench


@pytest.fixture
async def bench() -> Any:
    one = Bench()
    yield one
    for task in one.tasks:
        task.cancel()
    await asyncio.gather(*one.tasks, return_exceptions=True)
    one.delivery.close()
    assert one.delivery.waiting == 0
