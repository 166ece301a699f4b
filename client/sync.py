"""The SDK without async: the same classes, run on an event loop in a thread of their own.

>>> from millpond.client import sync
>>> with sync.Producer("orders") as producer:
...     producer.send(b"one coffee", key="table-7")
>>> with sync.Consumer("orders", "kitchen") as consumer:
...     for message in consumer:
...         print(message.body)
>>> with sync.Admin() as admin:
...     admin.create_topic("orders", queues=8)

Each object has its own thread and may be used from any thread, one call at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa

from millpond.client import connection as async_connection
from millpond.client import consumer as async_consumer
from millpond.client import producer as async_producer
from millpond.client.connection import Connection
from millpond.client.errors import Closed
from millpond.client.groups import Group, Groups, Lag, QueueSeek
from millpond.client.message import Message
from millpond.client.outbox import Sent, SentRange
from millpond.client.received import MessageBatch, ReceivedMessage
from millpond.client.topics import Topic, Topics

__all__ = ["Admin", "Consumer", "Producer"]
Result = TypeVar("Result")


class _Loop:
    """An event loop in a thread. `run` waits for a coroutine; Ctrl-C while waiting cancels it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        if self._loop.is_closed():
            coroutine.close()
            raise Closed("it is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class _Facade:
    """Opened by `with` or by the first use; `close` ends its thread. Idempotent."""

    def __init__(self, name: str) -> None:
        self._loop = _Loop(name)

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Start; called by `with`."""

    async def _end(self) -> None:
        raise AssertionError("each facade ends its own object")

    def close(self) -> None:
        try:
            self._loop.run(self._end())
        except Closed:
            return
        finally:
            self._loop.stop()


class Producer(_Facade):
    """`millpond.client.Producer`, blocking. The settings are the same."""

    def __init__(self, topic: str, **settings: Any) -> None:
        super().__init__(f"millpond producer {topic}")
        self._producer = self._loop.run(_made(async_producer.Producer, topic, **settings))

    def open(self) -> None:
        self._loop.run(self._producer.start())

    async def _end(self) -> None:
        await self._producer.close()

    def send(
        self,
        body: bytes | str,
        key: bytes | str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        born_ts: int | None = None,
    ) -> Sent:
        """Send a message and wait for its acknowledgement. At rate, use `send_many`."""
        return self._loop.run(self._producer.send(body, key, tag, properties, born_ts))

    def send_many(self, messages: Sequence[Message | bytes | str], queue: int | None = None) -> list[Sent]:
        """Send many and wait for all; one answer for each, in order."""
        return self._loop.run(self._producer.send_many(messages, queue))

    def send_batch(self, messages: pa.RecordBatch | pa.Table, queue: int | None = None) -> list[SentRange]:
        """Send an Arrow batch or table and wait."""
        return self._loop.run(self._producer.send_batch(messages, queue))


class Consumer(_Facade):
    """`millpond.client.Consumer`, blocking. Messages have `ack()` and so on as coroutines; use this object's."""

    def __init__(self, topic: str, group: str, **settings: Any) -> None:
        super().__init__(f"millpond consumer {topic} {group}")
        self._consumer = self._loop.run(_made(async_consumer.Consumer, topic, group, **settings))

    def open(self) -> None:
        self._loop.run(self._consumer.start())

    async def _end(self) -> None:
        await self._consumer.close()

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Messages; each is acked when the loop asks for the next one, unless it was settled."""
        while True:
            try:
                yield self._loop.run(_next(self._consumer))
            except _End:
                return

    def batches(self) -> Iterator[MessageBatch]:
        """Arrow batches; each is acked when the next one is asked for."""
        while (batch := self.receive()) is not None:
            yield batch
            self._loop.run(_call(batch.ack_soon))

    def receive(self, timeout_seconds: float | None = None) -> MessageBatch | None:
        """The next batch, or None after `timeout_seconds`; nothing is acked by itself."""
        return self._loop.run(self._consumer.receive(timeout_seconds))

    def ack(self, message: ReceivedMessage | MessageBatch) -> str:
        return self._loop.run(message.ack())

    def nack(self, message: ReceivedMessage | MessageBatch, delay_ms: int = 0) -> str:
        """Hand it out again after `delay_ms`."""
        return self._loop.run(message.nack(delay_ms))


class Admin(_Facade):
    """Topics and groups, blocking."""

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        super().__init__("millpond admin")
        self._connection: Connection = self._loop.run(_made(async_connection.Connection, url, api_key))
        self._topics = Topics(self._connection)

    async def _end(self) -> None:
        await self._connection.close()

    def create_topic(self, topic: str, **settings: Any) -> Topic:
        """Settings as in `Topics.create`."""
        return self._loop.run(self._topics.create(topic, **settings))

    def topics(self) -> list[Topic]:
        async def all_() -> list[Topic]:
            return [topic async for topic in self._topics.list()]

        return self._loop.run(all_())

    def delete_topic(self, topic: str) -> None:
        self._loop.run(self._topics.delete(topic))

    def flush(self, topic: str) -> dict[str, Any]:
        """Bring everything confirmed to the tier."""
        return self._loop.run(self._topics.flush(topic))

    def create_group(self, topic: str, group: str, **settings: Any) -> Group:
        """Settings as in `Groups.create`."""
        return self._loop.run(Groups(self._connection, topic).create(group, **settings))

    def lag(self, topic: str, group: str) -> Lag:
        return self._loop.run(Groups(self._connection, topic).lag(group))

    def seek(self, topic: str, group: str, **where: Any) -> list[QueueSeek]:
        """`where` as in `Groups.seek`."""
        return self._loop.run(Groups(self._connection, topic).seek(group, **where))


async def _made(kind: type[Result], *arguments: Any, **settings: Any) -> Result:
    """Make an object on the loop that it belongs to."""
    return kind(*arguments, **settings)


async def _next(consumer: async_consumer.Consumer) -> ReceivedMessage:
    try:
        return await anext(consumer)
    except StopAsyncIteration as end:
        raise _End from end


async def _call(function: Any) -> None:
    function()


class _End(Exception):
    """The consumer was closed: StopIteration itself cannot leave a coroutine."""
