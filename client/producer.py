"""`Producer`: sends messages to a topic, in batches, each exactly once.

    send, send_nowait -> Intake --(1 MiB, 10,000 messages or 5 ms)--> split by queue -> Lane of each queue -> service

Messages with a key go to queue murmur3(key) mod n, so that one key's messages stay in order; the keyless ones of
an intake all go to one queue, the next in turn, so that batches are large. Retries never duplicate (`lane`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.connection import Connection, path_of
from millpond.client.errors import BufferFull, Closed
from millpond.client.lane import Lane, LaneSettings
from millpond.client.message import Message, as_bytes
from millpond.client.outbox import Delivery, Intake, Piece, Sent, SentRange
from millpond.client.rows import ROW_BYTES, Rows, in_message_schema
from millpond.client.topics import QueueState, Topics
from millpond.core import limits
from millpond.core.errors import BadRequest, MillpondError, TooLarge
from millpond.core.hashing import hash_binary

log = logging.getLogger("millpond.client")
LARGEST_BYTES = limits.MESSAGE_BYTES + ROW_BYTES
CLOSE_SECONDS = 2.0  # for closing sessions: politeness, not a duty
STICKY_SECONDS = 0.1  # few keyless messages stay with one queue for so long
ROUTE_SECONDS = 60  # how long the number of queues is believed


class Producer:
    """Sends to one topic. Topic is all it needs; the rest has defaults.

    >>> async with Producer("orders") as producer:
    ...     sent = await producer.send(b"one coffee", key="table-7", tag="drinks")
    ...     for body in bodies:                      # at rate: no await for each message
    ...         if not producer.has_room:
    ...             await producer.ready()
    ...         producer.send_nowait(body)
    ...     await producer.flush()                   # raises what failed

    `batch_bytes` and `linger_ms` close a batch, whichever is first (while each queue has a request under way, not
    before the first of them is answered); `buffer_bytes` bounds what is taken and not yet answered; `send_ms` is how
    long a batch is tried; `compression` is none, lz4 or zstd.
    """

    def __init__(
        self,
        topic: str,
        *,
        url: str | None = None,
        api_key: str | None = None,
        connection: Connection | None = None,
        batch_bytes: int = limits.CLIENT_BATCH_BYTES,
        batch_messages: int = limits.BATCH_MESSAGES,
        linger_ms: float = limits.CLIENT_LINGER_MS,
        buffer_bytes: int = limits.CLIENT_BUFFER_BYTES,
        send_ms: int = limits.CLIENT_SEND_MS,
        compression: str = "none",
    ) -> None:
        if compression not in {"none", "lz4", "zstd"}:
            raise BadRequest.field("compression", "none, lz4 or zstd", compression)
        if not 1 <= batch_messages <= limits.BATCH_MESSAGES:
            raise BadRequest.field("batch_messages", f"1 to {limits.BATCH_MESSAGES}", batch_messages)
        if not 1 <= batch_bytes <= limits.BATCH_BYTES // 2:
            raise BadRequest.field("batch_bytes", f"1 to {limits.BATCH_BYTES // 2}", batch_bytes)
        self.topic = topic
        self._own_connection = connection is None
        self._connection = connection or Connection(url, api_key)
        self._settings = LaneSettings(batch_bytes, batch_messages, send_ms, compression)
        self._linger_seconds = linger_ms / 1000
        self._buffer_bytes = buffer_bytes
        self._lanes: dict[int, Lane] = {}
        self._queues: list[QueueState] = []
        self._session_id = self._connection.random.bytes(12).hex()
        self._routed_at = 0.0
        self._routing: asyncio.Task[None] | None = None
        self._queue = -1  # of the last keyless batch
        self._turn_until = 0.0
        self._few_bytes = batch_bytes // 4
        self._intake = Intake()
        self._intake_bytes_most = batch_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = False  # the intake's timer is over, and it goes with the first lane that is free
        self._drained_bytes = 0  # on the lanes; the buffer holds these and the intake's
        self._pieces: set[Piece] = set()
        self._room_waiters: list[asyncio.Future[None]] = []
        self._error: MillpondError | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Learn the topic's queues. Raises NotFound(topic_not_found) and whatever a connection raises."""
        if not self._queues:
            await self._route()

    # -- sending ----------------------------------------------------------------------------------------------

    def send_nowait(
        self,
        body: bytes | str,
        key: bytes | str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        born_ts: int | None = None,
    ) -> Delivery:
        """Take a message; the answer may be awaited, now, later or never. Raises BufferFull, TooLarge, Closed."""
        intake = self._intake
        row = len(intake.bodies)
        if type(body) is bytes and tag is None and properties is None and born_ts is None:
            size = intake.bytes + len(body) + ROW_BYTES
            if key is None:
                if size < intake.room_bytes and row < intake.room_rows:
                    intake.bodies.append(body)
                    intake.bytes = size
                    return Delivery(intake, row)
            elif type(key) is bytes and len(key) <= limits.KEY_BYTES and len(intake.keys) == row:
                size += len(key)
                if size < intake.room_bytes and row < intake.room_rows:
                    intake.keys.append(key)
                    intake.bodies.append(body)
                    intake.bytes = size
                    return Delivery(intake, row)
        return self._take(body, key, tag, properties, born_ts)

    def _take(
        self,
        body: bytes | str,
        key: bytes | str | None,
        tag: str | None,
        properties: Mapping[str, str] | None,
        born_ts: int | None,
    ) -> Delivery:
        """A message that opens an intake, may fill it, or has more than a body."""
        body = as_bytes("body", body)
        size = len(body) + ROW_BYTES
        intake = self._intake
        if self._drained_bytes + intake.bytes + size > self._buffer_bytes or size > LARGEST_BYTES:
            self._refuse(size)
        row = len(intake.bodies)
        if row == 0:
            self._check_open()
        if key is not None or tag is not None or properties is not None or born_ts is not None:
            intake.add_columns(row, key, tag, properties, born_ts)
        intake.bodies.append(body)
        intake.bytes += size
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger_seconds, self._linger_over)
            left = self._buffer_bytes - self._drained_bytes  # what is drained only leaves while this intake gathers
            intake.open(min(self._intake_bytes_most, left, LARGEST_BYTES), self._settings.batch_messages - 1)
        if intake.bytes >= self._intake_bytes_most or row + 1 >= self._settings.batch_messages:
            self._drain()
        return Delivery(intake, row)

    async def send(
        self,
        body: bytes | str,
        key: bytes | str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        born_ts: int | None = None,
    ) -> Sent:
        """Send a message and wait for its acknowledgement; waits for room when the buffer is full."""
        while True:
            try:
                delivery = self.send_nowait(body, key, tag, properties, born_ts)
                break
            except BufferFull:
                await self.ready()
        return await delivery

    async def send_many(self, messages: Sequence[Message | bytes | str], queue: int | None = None) -> list[Sent]:
        """Send many and wait for all; one answer for each, in order. `queue` sends all of them there.

        Raises the first error once all are answered; `send_batch` takes Arrow.
        """
        if isinstance(messages, pa.Table | pa.RecordBatch):
            raise BadRequest.field("messages", "a sequence; send_batch takes Arrow", type(messages).__name__)
        if queue is not None:
            return await self._send_to(messages, queue)
        deliveries = []
        for message in messages:
            if not self.has_room:
                await self.ready()
            if isinstance(message, bytes | str):
                deliveries.append(self.send_nowait(message))
            else:
                deliveries.append(self.send_nowait(*msgspec.structs.astuple(message)))
        self._drain()
        for intake in {delivery.intake for delivery in deliveries}:
            intake.observe()
        return await _all(deliveries)

    async def _send_to(self, messages: Sequence[Message | bytes | str], queue: int) -> list[Sent]:
        parts: list[Rows] = []
        intake = Intake()
        for message in messages:
            one = Message(message) if isinstance(message, bytes | str) else message
            body, row = as_bytes("body", one.body), len(intake.bodies)
            intake.add_columns(row, one.key, one.tag, one.properties, one.born_ts)
            intake.bodies.append(body)
            intake.bytes += len(body) + ROW_BYTES
            if intake.bytes >= self._settings.batch_bytes or row + 1 == self._settings.batch_messages:
                parts.append(intake.to_rows())
                intake = Intake()
        if intake.bodies:
            parts.append(intake.to_rows())
        pieces = [piece for part in parts for piece in await self._put_observed({queue: part})]
        return [found.sent(found.row + i) for found in await _answers(pieces) for i in range(found.count)]

    async def send_batch(self, messages: pa.RecordBatch | pa.Table, queue: int | None = None) -> list[SentRange]:
        """Send an Arrow batch or table: `body`, and any of `key`, `tag`, `properties`, `born_ts`; and wait for all.

        Answered as ranges, in order within each queue. `queue` sends all of them there.
        """
        from millpond.core.tier.rows import cut  # loads Arrow's functions, 33 ms: only for who sends Arrow

        settings = self._settings
        batches = messages.combine_chunks().to_batches() if isinstance(messages, pa.Table) else [messages]
        pieces: list[Piece] = []
        for batch in batches:
            for part in cut(in_message_schema(batch), settings.batch_bytes, settings.batch_messages):
                pieces += await self._put_observed({queue: Rows.of_batch(part)} if queue is not None else part)
        return await _answers(pieces)

    async def _put_observed(self, parts: pa.RecordBatch | dict[int, Rows]) -> list[Piece]:
        """Put rows by queue, or a batch that is still to be split, once there is room; their caller sees the answer."""
        if not self.has_room:
            await self.ready()
        self._drain()  # what was taken before goes before
        split = parts if isinstance(parts, dict) else self._split_batch(parts)
        pieces = [self._put(number, part) for number, part in split.items()]
        for piece in pieces:
            piece.observed = True  # whatever becomes of it is raised there
        return pieces

    # -- room, flush, close -----------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether half the buffer and more is free, so that `send_nowait` will take messages."""
        return self._drained_bytes + self._intake.bytes <= self._buffer_bytes // 2

    @property
    def failed(self) -> bool:
        """Whether something could not be sent that nobody awaited; `flush` raises why."""
        return self._error is not None

    async def ready(self) -> None:
        """Wait until `has_room`."""
        while not self.has_room:
            if not self._pieces:
                self._drain()
            await self._piece_done()

    async def flush(self) -> None:
        """Send what is held and wait until all is answered. Raises the first failure that nobody awaited."""
        self._drain()
        while self._pieces or self._intake.bodies:
            await self._piece_done()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    async def close(self) -> None:
        """Flush, then close. What cannot be sent fails. Raises the first failure that nobody awaited."""
        if self._closed:
            return
        try:
            await self.flush()
        finally:
            self._closed = True
            if self._routing is not None:
                self._routing.cancel()
                await asyncio.wait([self._routing])
            await asyncio.gather(*(lane.close() for lane in self._lanes.values()))
            await self._close_sessions()
            if self._own_connection:
                await self._connection.close()

    async def _close_sessions(self) -> None:
        """Tell the service that they are over, so that it need not keep them for a week; it is fine if it cannot."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for session_id in {lane.session_id for lane in self._lanes.values()}:
                    await self._connection.call(
                        "DELETE", path_of("topics", self.topic, "producers", session_id), repeatable=False
                    )
        except (MillpondError, TimeoutError) as error:
            log.debug("producer sessions of %s stay open: %s", self.topic, error)

    async def _piece_done(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._room_waiters.append(waiter)
        await waiter

    # -- from intake to lanes ---------------------------------------------------------------------------------

    def _refuse(self, size: int) -> None:
        if size > LARGEST_BYTES:
            raise TooLarge("message_too_large", f"a body has at most {limits.MESSAGE_BYTES} bytes")
        if self._pieces or self._intake.bodies:
            raise BufferFull(f"{self._buffer_bytes} bytes are on their way: await producer.ready()")

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the producer is closed")
        if not self._queues:
            raise Closed("the producer was not started: use `async with`, or await start()")

    def _linger_over(self) -> None:
        """What was taken has waited for others long enough. Where it would only wait for a request under way, cut up
        already, more may join it: while every lane is busy, or that of the queue which it goes to."""
        if len(self._lanes) == len(self._queues) and not any(lane.idle for lane in self._lanes.values()):
            self._overdue = True
        elif (seconds := self._turn_left()) > 0:
            self._overdue = True
            self._timer = asyncio.get_running_loop().call_later(seconds, self._drain)
        else:
            self._drain()

    def _turn_left(self) -> float:
        """How long a request under way keeps others back that go to its queue, keyless and few; 0: none does."""
        lane, intake = self._lanes.get(self._queue), self._intake
        if lane is None or lane.idle or intake.keys or lane.pending_bytes + intake.bytes > self._few_bytes:
            return 0.0
        return self._turn_until - self._connection.clock.monotonic()

    def _lane_free(self) -> None:
        if self._overdue and not self._closed:
            self._drain()

    def _drain(self) -> None:
        """Hand what was taken to the lanes."""
        intake = self._intake
        self._overdue = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not intake.bodies:
            return
        self._intake = Intake()
        if self._connection.clock.monotonic() - self._routed_at > ROUTE_SECONDS and self._routing is None:
            self._routing = asyncio.get_running_loop().create_task(self._route(), name="millpond route")
            self._routing.add_done_callback(self._rerouted)
        parts, which, row_in_part = self._split(intake.to_rows())
        # more queues share an intake of keyed messages: a larger one keeps their batches large
        self._intake_bytes_most = min(self._settings.batch_bytes * min(len(parts), 4), limits.BATCH_BYTES // 2)
        intake.drained([self._put(queue, part) for queue, part in parts.items()], which, row_in_part)

    def _split(self, rows: Rows) -> tuple[dict[int, Rows], npt.NDArray[np.intp] | None, npt.NDArray[np.intp] | None]:
        """`rows` by queue, and for each row which part it is in and where; None, None: all in the only part."""
        if rows.beside is None or "key" not in rows.names or len(self._queues) == 1:
            return {self._next_queue(): rows}, None, None
        queues, order, numbers, starts = self._by_queue(rows.beside.column("key"))
        ends = np.append(starts[1:], len(order))
        parts = {
            int(number): rows.take(order[start:end]) for number, start, end in zip(numbers, starts, ends, strict=True)
        }
        row_in_part = np.empty(len(order), np.intp)
        row_in_part[order] = np.arange(len(order)) - np.repeat(starts, ends - starts)
        return parts, np.searchsorted(numbers, queues), row_in_part

    def _split_batch(self, batch: pa.RecordBatch) -> dict[int, Rows]:
        """Of Arrow: where each row is in the end is told by ranges, in order within each queue."""
        if "key" not in batch.schema.names or len(self._queues) == 1:
            return {self._next_queue(): Rows.of_batch(batch)}
        _, order, numbers, starts = self._by_queue(batch.column("key"))
        ends = np.append(starts[1:], len(order))
        return {
            int(number): Rows.of_batch(batch.take(pa.array(order[start:end])))
            for number, start, end in zip(numbers, starts, ends, strict=True)
        }

    def _by_queue(self, keys: pa.Array) -> tuple[npt.NDArray[np.intp], ...]:
        """Each row's queue; the rows in order of their queues; the queues there are, and where each begins in that."""
        queues = (hash_binary(keys) % len(self._queues)).astype(np.intp)
        if keys.null_count:
            queues = np.where(np.asarray(keys.is_null()), self._next_queue(), queues)
        order = np.argsort(queues, kind="stable")
        numbers, starts = np.unique(queues[order], return_index=True)
        return queues, order, numbers, starts

    def _next_queue(self) -> int:
        """The queue of the next keyless batch: while little waits, the same one for a short while, so that what is sent
        during a request goes together with the next; else in turn, an idle one first or the one with least to send."""
        now = self._connection.clock.monotonic()
        if now < self._turn_until and self._pending_bytes(self._queue) <= self._few_bytes:
            return self._queue
        count = len(self._queues)
        turns = [(self._queue + step) % count for step in range(1, count + 1)]
        idle = [queue for queue in turns if queue not in self._lanes or self._lanes[queue].idle]
        self._queue = idle[0] if idle else min(turns, key=self._pending_bytes)
        self._turn_until = now + STICKY_SECONDS
        return self._queue

    def _pending_bytes(self, queue: int) -> int:
        return self._lanes[queue].pending_bytes if queue in self._lanes else 0

    def _put(self, queue: int, rows: Rows) -> Piece:
        lane = self._lanes.get(queue)
        if lane is None:
            if not 0 <= queue < len(self._queues):
                raise BadRequest.field("queue", f"0 to {len(self._queues) - 1}", queue)
            state, settings = self._queues[queue], self._settings
            lane = Lane(
                self._connection, self.topic, state, self._session_id, settings, self._piece_ended, self._lane_free
            )
            self._lanes[queue] = lane
        piece = Piece(rows)
        self._drained_bytes += piece.bytes
        self._pieces.add(piece)
        lane.put(piece)
        return piece

    def _piece_ended(self, piece: Piece) -> None:
        self._drained_bytes -= piece.bytes
        self._pieces.discard(piece)
        if piece.error is not None and not piece.observed:
            self._error = self._error or piece.error
        self._wake()

    def _wake(self) -> None:
        for waiter in self._room_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._room_waiters.clear()

    # -- route ------------------------------------------------------------------------------------------------

    async def _route(self) -> None:
        self._queues = sorted(await Topics(self._connection).queues(self.topic), key=lambda state: state.queue)
        self._routed_at = self._connection.clock.monotonic()

    def _rerouted(self, task: asyncio.Task[None]) -> None:
        """A refresh that failed is no reason to stop: the known queues stay, and the next drain tries again."""
        self._routing = None
        if not task.cancelled():
            task.exception()


async def _answers(pieces: list[Piece]) -> list[SentRange]:
    """All ranges in order; the first error once all are answered."""
    for piece in pieces:
        await piece.wait()
    found: list[SentRange] = []
    for piece in pieces:
        if piece.error is not None:
            raise piece.error
        found += piece.ranges or []
    return found


async def _all(deliveries: list[Delivery]) -> list[Sent]:
    """Every answer in order; the first error once all are answered."""
    answers, first = [], None
    for delivery in deliveries:
        try:
            answers.append(await delivery)
        except MillpondError as error:
            first = first or error
    if first is not None:
        raise first
    return answers
