"""The blocking classes against the same service, which runs on a loop of its own thread."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millpond.client import sync
from millpond.client.errors import Closed
from millpond.client.message import Message
from millpond.core.errors import NotFound

from .conftest import FakeService, arrow_answer, problem


async def test_produce_and_consume(service: FakeService) -> None:
    """Messages go and come without await; the loop acks; nack hands back."""
    rows: list[dict[str, Any]] = [{"queue": 0, "offset": i, "body": b"%d" % i} for i in range(3)]
    service.receives.append(arrow_answer(rows, {"receipts": [{"receipt": "T", "queue": 0, "rows": "0-2"}]}))

    def work() -> list[bytes]:
        with sync.Producer("t", url=service.url, linger_ms=0) as producer:
            sent = producer.send("a", key="k")
            assert service.rows[sent.queue][sent.offset]["body"] == b"a"
            assert len(producer.send_many([b"b", Message(b"c")])) == 2
        seen = []
        with sync.Consumer("t", "g", url=service.url) as consumer:
            for message in consumer:
                seen.append(message.body)
                if len(seen) == 2:
                    assert consumer.nack(message, 100) == "ok"
                    break
        return seen

    assert await asyncio.to_thread(work) == [b"0", b"1"]
    assert service.settled_rows("acks") == ["T.0"]
    assert service.settled_rows("nacks") == ["T.1", "T.2"]


async def test_failures_come_out(service: FakeService) -> None:
    """Errors are raised where the call is, a failed start leaves no thread, and what is closed says so."""

    def work() -> None:
        service.faults.append(lambda _: problem(404, "topic_not_found", "none"))
        with pytest.raises(NotFound), sync.Producer("t", url=service.url):
            pass
        producer = sync.Producer("t", url=service.url)
        producer.close()
        producer.close()
        with pytest.raises(Closed):
            producer.send(b"late")

    await asyncio.to_thread(work)
