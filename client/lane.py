"""A `Lane` takes one queue's pieces to the service, in order, one request in flight, none of them twice.

Every request is a *part* of a producer session: `{id, queue, previous, first, last}` in `Millpond-Producer`, with
sequence numbers counted by this lane. A part is tried again with the same boundaries until it is answered or its
time is over, and the service answers a repeat with the first one's offsets. While a part is in flight, pieces
gather, so batches grow with the load by themselves.

When a part is given up or refused, an earlier try of it may have arrived, or yet arrive. So its numbers are not used
again: the next part names the same previous one, and is out of order when the lost one is there after all; then the
lane goes on in a new session. One that comes later still is a repeat to the service, which drops it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import msgspec

from millpond.client.connection import ARROW, JSON, Connection, path_of
from millpond.client.errors import Closed, UnknownProblem
from millpond.client.outbox import Piece, SentRange
from millpond.client.rows import compressed_stream, stream
from millpond.client.topics import QueueState
from millpond.core import limits
from millpond.core.errors import Conflict, MillpondError
from millpond.core.http.wire import Buffers

log = logging.getLogger("millpond.client")


class _Range(msgspec.Struct):
    queue: int
    first_offset: int
    count: int


class _Ranges(msgspec.Struct):
    ranges: list[_Range]


class LaneSettings(msgspec.Struct, frozen=True):
    """`batch_*` bound one request; `send_ms` is how long one is tried; `compression` none, lz4 or zstd."""

    batch_bytes: int = limits.CLIENT_BATCH_BYTES
    batch_messages: int = limits.BATCH_MESSAGES
    send_ms: int = limits.CLIENT_SEND_MS
    compression: str = "none"


class Lane:
    """`done` is told of every piece that was acknowledged or failed; `free` is called before the next request is
    gathered, or none: it may put more."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        queue: QueueState,
        session_id: str,
        settings: LaneSettings,
        done: Callable[[Piece], None],
        free: Callable[[], None],
    ) -> None:
        self.queue = queue.queue
        self.session_id = session_id
        self._id_prefix = queue.id_prefix
        self.pending_bytes = 0
        self._connection = connection
        self._path = path_of("topics", topic, "messages")
        self._settings = settings
        self._done = done
        self._free = free
        self._pending: deque[Piece] = deque()
        self._task: asyncio.Task[None] | None = None
        self._previous: int | None = None
        self._next = 0

    @property
    def idle(self) -> bool:
        return self._task is None

    def put(self, piece: Piece) -> None:
        """Send `piece` after those put before."""
        self._pending.append(piece)
        self.pending_bytes += piece.bytes
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"millpond lane {self.queue}")
            self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Give up what is still pending: those pieces fail with `Closed`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nothing that waits on this lane may wait for ever, should its task have been cancelled or have died."""
        if not task.cancelled() and task.exception() is None:
            return
        self._task = None
        error: MillpondError = Closed("the producer was closed before the message was sent")
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("a producer's lane died", exc_info=bug)
            error = _died(bug)
        while self._pending:
            self._fail(self._pending.popleft(), error)
        self._free()

    async def _run(self) -> None:
        while self._pending:
            pieces = self._gather()
            try:
                await self._send(pieces)
            except MillpondError as error:
                for piece in pieces:
                    self._fail(piece, error)
            except BaseException as error:
                closed = Closed("the producer was closed while the message was being sent")
                reason = closed if isinstance(error, asyncio.CancelledError) else _died(error)
                for piece in pieces:
                    if not piece.done:
                        self._fail(piece, reason)
                raise
            self._free()
        self._task = None  # here and not in a callback: what is put from now on needs a task of its own

    def _gather(self) -> list[Piece]:
        """The next pieces that make one request: of one schema, within the bounds; at least one.

        What has gathered while the last request was in flight goes together, beyond one batch's size: the more there
        is to catch up with, the less each message costs.
        """
        most_bytes = min(limits.CLIENT_BATCHES_AT_ONCE * self._settings.batch_bytes, limits.BATCH_BYTES)
        pieces = [self._pending.popleft()]
        names = pieces[0].rows.names
        size, count = pieces[0].bytes, pieces[0].count
        while self._pending:
            following = self._pending[0]
            size += following.bytes
            count += following.count
            too_much = size > most_bytes or count > self._settings.batch_messages
            if too_much or following.rows.names != names:
                break
            pieces.append(self._pending.popleft())
        return pieces

    async def _send(self, pieces: list[Piece]) -> None:
        rows = [piece.rows for piece in pieces]
        count = sum(map(len, rows))
        compression = self._settings.compression
        data = stream(rows) if compression == "none" else compressed_stream(rows, compression)
        try:
            ranges = await self._post(data, count)
        except Conflict as error:
            if error.code not in {"out_of_order", "unknown_producer"}:
                raise
            log.warning("queue %d: a new session of this producer begins (%s)", self.queue, error.detail)
            self.session_id = self._connection.random.bytes(12).hex()
            self._previous = None
            ranges = await self._post(data, count)
        self._share(pieces, ranges)

    async def _post(self, data: Buffers, count: int) -> list[_Range]:
        first, self._next = self._next, self._next + count
        last = self._next - 1
        part = {"id": self.session_id, "queue": self.queue, "previous": self._previous, "first": first, "last": last}
        headers = {
            "Millpond-Queue": str(self.queue),
            "Millpond-Producer": msgspec.json.encode(part).decode(),
            "Prefer": "return=minimal",
        }
        answer = await self._connection.call(
            "POST", self._path, data, content_type=ARROW, accept=JSON, headers=headers,
            repeatable=True, retry_seconds=self._settings.send_ms / 1000,
        )  # fmt: skip
        ranges = answer.decode(_Ranges).ranges
        if sum(r.count for r in ranges) != count:
            raise UnknownProblem(f"{count} messages were sent and the answer is about {sum(r.count for r in ranges)}")
        self._previous = last
        return ranges

    def _share(self, pieces: list[Piece], ranges: list[_Range]) -> None:
        """Hand each piece the ranges of its own rows."""
        rest = deque(ranges)
        used = 0
        for piece in pieces:
            row, count, own = 0, piece.count, []
            while row < count:
                head = rest[0]
                taken = min(head.count - used, count - row)
                own.append(SentRange(head.queue, head.first_offset + used, taken, row, self._id_prefix))
                row, used = row + taken, used + taken
                if used == head.count:
                    rest.popleft()
                    used = 0
            piece.settle(own)
            self._finish(piece)

    def _fail(self, piece: Piece, error: MillpondError) -> None:
        piece.fail(error)
        self._finish(piece)

    def _finish(self, piece: Piece) -> None:
        self.pending_bytes -= piece.bytes
        self._done(piece)


def _died(bug: BaseException) -> MillpondError:
    return UnknownProblem(f"the producer's lane died: {bug!r}")
