"""`Consumer`: receives a topic's messages for a group, ahead of need, and settles them in batches.

    receive loop --(batches, one for each lease)--> buffer --> async for message / batches() --> Settler

Leases of what is buffered or in hand are extended while the consumer lives; closing hands what was not settled
back at once. A message counts as done when the loop asks for the next one: leave the loop by `break` or an
exception and the one in hand is handed out again, unless it was acked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

import msgspec

from millpond.client.connection import ARROW, Answer, Connection, path_of
from millpond.client.errors import Closed, UnknownProblem
from millpond.client.groups import Groups
from millpond.client.received import MessageBatch, ReceivedMessage, decode_receive
from millpond.client.settler import Settler
from millpond.client.topics import Topics
from millpond.core import limits
from millpond.core.errors import BadRequest, MillpondError

FEW_MESSAGES = 16
MANY_BYTES = 256 * limits.KIB  # of an answer: the next receives do not wait until it is decoded
RECEIVES_FOLLOWING = 2  # so that the service always has one to work at; one of a single queue: see UNSETTLED_ROWS


class Ahead:
    """How many messages are fetched ahead: a fixed number, or by how fast the program handles them, so that a slow one
    does not hold what others of its group could do, and a quick one does not wait for one receive after another."""

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._begun: tuple[int, float] | None = None
        self.messages = fixed or limits.CLIENT_PREFETCH_MESSAGES

    def begins(self, messages: int, now: float) -> None:
        """A batch of so many was handed out, in monotonic seconds."""
        self._begun = messages, now

    def handled(self, now: float) -> None:
        """The next batch is asked for: the one before is done with."""
        if self._begun is None or self._fixed is not None:
            return
        (messages, since), self._begun = self._begun, None
        seconds = max(now - since, 1e-6)
        within = messages * limits.CLIENT_PREFETCH_SECONDS / seconds
        self.messages = int(min(max(within, limits.CLIENT_PREFETCH_MESSAGES), limits.CLIENT_PREFETCH_MOST))


class Consumer:
    """Topic and group are all it needs.

    >>> async with Consumer("orders", "kitchen") as consumer:
    ...     async for message in consumer:           # acked when the loop asks for the next one
    ...         cook(message.body)

    >>> async with Consumer("orders", "kitchen", tag="drinks || food", start="earliest") as consumer:
    ...     async for batch in consumer.batches():   # Arrow; acked likewise
    ...         total += batch.batch.num_rows

    `tag` is the group's filter and `start` where a new group begins; both matter when the group is created, which is
    when the consumer is started: what is sent from then on, it gets. `prefetch` bounds the messages fetched ahead;
    without it they are 2,000, or what the program handles in a quarter of a second when that is more. A handler may
    take long: leases are extended, for 12 h at most. When the group is deleted, the consumer ends with NotFound.
    """

    def __init__(
        self,
        topic: str,
        group: str,
        *,
        tag: str | None = None,
        start: Literal["earliest", "latest"] = "latest",
        url: str | None = None,
        api_key: str | None = None,
        connection: Connection | None = None,
        prefetch: int | None = None,
        lease_ms: int = limits.LEASE_MS,
        wait_ms: int = 20_000,
        receive_bytes: int = limits.RECEIVE_BYTES,
        retry_seconds: float = limits.CLIENT_RETRY_SECONDS,
    ) -> None:
        if prefetch is not None and prefetch < 1:
            raise BadRequest.field("prefetch", "at least 1", prefetch)
        self.topic, self.group = topic, group
        self._path = path_of("topics", topic, "groups", group, "messages", "receive")
        self._tag, self._start_at = tag, start
        self._own_connection = connection is None
        self._connection = connection or Connection(url, api_key)
        self._ahead = Ahead(prefetch)
        self._lease_ms, self._wait_ms = lease_ms, wait_ms
        self._receive_bytes, self._retry_seconds = receive_bytes, retry_seconds
        self._id_prefixes: dict[int, str] = {}
        self._settler = Settler(self._connection, topic, group)
        self._buffer: deque[MessageBatch] = deque()
        self._buffered = self._buffered_bytes = 0
        self._open: list[MessageBatch] = []  # every batch with rows that are not settled
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None
        self._closed = False
        self._messages: Iterator[ReceivedMessage] = iter(())
        self._in_hand: ReceivedMessage | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Create the group if it is not there, and begin to receive. Raises NotFound, Conflict(filter_differs)."""
        if self._closed:
            raise Closed("the consumer is closed")
        if self._tasks:
            return
        await Groups(self._connection, self.topic).ensure(self.group, start=self._start_at, tag=self._tag)
        await self._learn_queues()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._receive_loop(), name="millpond receive"),
            loop.create_task(self._extend_loop(), name="millpond extend"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop receiving, send the acks there are, and hand back what was not settled. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._arrived.set()
        with suppress(MillpondError):  # nobody answers: the leases end by themselves
            await asyncio.gather(*(batch.nack(0) for batch in self._open if not batch.settled))
        await self._settler.close()
        if self._own_connection:
            await self._connection.close()

    # -- handing out ------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedMessage:
        """The next message; the one before is acked unless it was settled. Raises what made receiving stop."""
        if self._in_hand is not None:
            self._in_hand.ack_soon()
            self._in_hand = None
        while True:
            message = next(self._messages, None)
            if message is not None:
                self._in_hand = message
                return message
            self._messages = iter((await self._next_batch()).messages())

    async def batches(self) -> AsyncIterator[MessageBatch]:
        """Batch by batch, each of one queue and lease; acked when the next one is asked for, unless settled."""
        while True:
            try:
                batch = await self._next_batch()
            except StopAsyncIteration:
                return
            yield batch
            batch.ack_soon()

    async def receive(self, timeout_seconds: float | None = None) -> MessageBatch | None:
        """The next batch, or None after `timeout_seconds`; nothing is acked by itself."""
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._next_batch()
        except (TimeoutError, StopAsyncIteration):
            return None

    async def _next_batch(self) -> MessageBatch:
        clock = self._connection.clock
        self._ahead.handled(clock.monotonic())
        while not self._buffer:
            if self._closed:
                raise StopAsyncIteration
            if not self._tasks:
                raise Closed("the consumer was not started: use `async with`, or await start()")
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        batch = self._buffer.popleft()
        self._buffered -= len(batch)
        self._buffered_bytes -= batch.answer_bytes
        self._room.set()
        self._ahead.begins(len(batch), clock.monotonic())
        return batch

    # -- receiving --------------------------------------------------------------------------------------------

    async def _learn_queues(self) -> None:
        states = await Topics(self._connection).queues(self.topic)
        self._id_prefixes = {state.queue: state.id_prefix for state in states}

    async def _receive_loop(self) -> None:
        following: deque[asyncio.Task[Answer]] = deque()
        most_following = min(RECEIVES_FOLLOWING, len(self._id_prefixes))
        try:
            while True:
                if not following:
                    while not self._wanted():
                        self._room.clear()
                        await self._room.wait()
                    answer = await self._ask(self._wanted())
                else:
                    answer = await _first_of(following)
                until = self._connection.clock.monotonic() + self._lease_ms / 1000
                if len(answer.body) >= MANY_BYTES:
                    while len(following) < most_following and (wanted := self._wanted(answer, len(following))):
                        following.append(asyncio.create_task(self._ask(wanted), name="millpond receive"))
                    await asyncio.sleep(0)  # they are on their way while this one is decoded
                await self._take(answer, until)
        finally:
            for one in following:
                one.cancel()
            await asyncio.gather(*following, return_exceptions=True)

    def _wanted(self, undecoded: Answer | None = None, following: int = 0) -> int:
        """How many messages may be asked for now, with an answer at hand, and so many on their way, that may have as
        many as any."""
        buffered, buffered_bytes = self._buffered, self._buffered_bytes
        if undecoded is not None:
            buffered += (1 + following) * limits.RECEIVE_ROWS
            buffered_bytes += (1 + following) * len(undecoded.body)
        if buffered_bytes >= limits.CLIENT_PREFETCH_BYTES:
            return 0
        return max(0, min(limits.RECEIVE_ROWS, self._ahead.messages - buffered))

    async def _ask(self, wanted: int) -> Answer:
        asked = {
            "max_messages": wanted,
            "max_bytes": self._receive_bytes,
            "wait_ms": self._wait_ms,
            "lease_ms": self._lease_ms,
            "attempt_id": self._connection.random.bytes(12).hex(),
            "create": False,  # one that was deleted would begin anew, without its filter
        }
        return await self._connection.call(
            "POST", self._path, msgspec.json.encode(asked), accept=ARROW, repeatable=True,
            timeout_seconds=self._wait_ms / 1000 + 10, retry_seconds=self._retry_seconds,
        )  # fmt: skip

    async def _take(self, answer: Answer, until: float) -> None:
        """Hand out what came; `until`: when its leases end."""
        batches, reason = decode_receive(answer.body, self._settler, until, self._id_prefixes)
        unknown = [batch for batch in batches if not batch.id_prefix and batch.queue not in self._id_prefixes]
        if unknown:  # the topic has got more queues
            with suppress(MillpondError):  # only ids of messages need it
                await self._learn_queues()
            for batch in unknown:
                batch.id_prefix = self._id_prefixes.get(batch.queue, "")
        if reason == "in_flight_full":  # others of the group hold too much: it will not change at once
            await asyncio.sleep(self._connection.random.uniform(0.2, 0.5))
        self._open = [batch for batch in self._open if not batch.settled] + batches
        self._buffer.extend(batches)
        for batch in batches:
            self._buffered += len(batch)
            self._buffered_bytes += batch.answer_bytes
        if batches:
            self._arrived.set()
            if self._buffered <= FEW_MESSAGES:
                await asyncio.sleep(0)  # few are wanted at once; of many, the next ones are asked for first

    async def _extend_loop(self) -> None:
        """Before two thirds of a lease are over, extend it; for 12 h after it was given at most."""
        step_seconds = self._lease_ms / 3000
        while True:
            await asyncio.sleep(step_seconds)
            self._open = [batch for batch in self._open if not batch.settled]
            now, most_seconds = self._connection.clock.monotonic(), limits.LEASE_MS_MOST / 1000
            await self._extend(
                [one for one in self._open if one.until - 2 * step_seconds < now <= one.first_until + most_seconds], now
            )

    async def _extend(self, batches: list[MessageBatch], now: float) -> None:
        """All together, so that they share calls: one after another they may take longer than a lease."""
        answers = await asyncio.gather(*(one.extend(self._lease_ms) for one in batches), return_exceptions=True)
        for batch, error in zip(batches, answers, strict=True):
            if error is None:
                batch.until = now + self._lease_ms / 1000
            elif not isinstance(error, MillpondError):  # the settler has said in the log what that was about
                raise error

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A loop that stopped stops the consumer: whoever waits for a message is told why."""
        if not task.cancelled():
            self._error = task.exception() or UnknownProblem("the consumer stopped")
            self._arrived.set()


async def _first_of(following: deque[asyncio.Task[Answer]]) -> Answer:
    """The first answer there is, of the oldest receive that has one; a later one may be answered while it waits."""
    if len(following) > 1:
        await asyncio.wait(following, return_when=asyncio.FIRST_COMPLETED)
    done = next((one for one in following if one.done()), following[0])
    following.remove(done)
    return await done
