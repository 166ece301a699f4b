"""What a consumer receives: `MessageBatch`, the rows of one lease in one queue, and `ReceivedMessage`, one of them.

A batch stays columns (Arrow) until somebody asks for its messages. It knows which of its rows are still open, so
that leases can be extended and released; settling itself is the `Settler`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from millpond.client.answers import METADATA_KEY, Opened, opened, opened_again
from millpond.client.columns import Columns, Row, each
from millpond.client.errors import UnknownProblem
from millpond.client.settler import Settler
from millpond.core.limits import KIB

LARGE_BYTES = 128 * KIB
"""Record batches of so much on average are handed out as they are; smaller ones are put together first."""


class _Receipt(msgspec.Struct):
    receipt: str
    queue: int
    rows: str


class _Beside(msgspec.Struct):
    receipts: list[_Receipt] = []
    reason: str | None = None


class ReceivedMessage(Row, gc=False, eq=False):
    """A message and its lease. Times are milliseconds since 1970 UTC; `delivery_attempt` is 1 at first."""

    _columns: MessageBatch

    @property
    def delivery_attempt(self) -> int:
        value: int = self._columns.value("delivery_attempt", self._row)
        return value

    @property
    def message_id(self) -> str:
        return f"{self._columns.id_prefix}{self.offset}"

    @property
    def settled(self) -> bool:
        return not self._columns.is_open[self._row]

    async def ack(self) -> str:
        """Done with it; waits for the answer: ok, already, redelivered, void or unknown."""
        return await self._columns.settler.ack_one(self._columns.lease_id(self._settle()))

    async def nack(self, delay_ms: int = 0) -> str:
        """Hand it out again, after `delay_ms`."""
        return await self._columns.settler.nack_one(self._columns.lease_id(self._settle()), delay_ms)

    async def extend(self, lease_ms: int) -> str:
        """Its lease ends `lease_ms` from now. (Consumers extend leases by themselves.)"""
        return await self._columns.settler.extend_one(self._columns.lease_id(self._row), lease_ms)

    def ack_soon(self) -> None:
        """Done with it; the ack travels with others shortly. Does nothing when it was settled before."""
        if self._columns.is_open[self._row]:
            self._columns.settler.ack_rows(self._columns.receipt, [self._columns.relative[self._settle()]])

    def _settle(self) -> int:
        self._columns.is_open[self._row] = 0
        return self._row


class MessageBatch(Columns):
    """Rows of one lease. `batch`: columns of TIER_SCHEMA and `delivery_attempt`; `relative[i]`: row i's number in
    the receipt; `until`: when the lease ends, in the client's monotonic seconds; `id_prefix`: of its message ids;
    `answer_bytes`: its share of the answer that it came in."""

    def __init__(
        self,
        batch: pa.RecordBatch,
        receipt: str,
        relative: Sequence[int],
        settler: Settler,
        until: float,
        id_prefix: str,
        answer_bytes: int,
    ) -> None:
        super().__init__(batch)
        self.receipt = receipt
        self.relative = relative
        self.id_prefix = id_prefix
        self.answer_bytes = answer_bytes
        self.settler = settler
        self.first_until = self.until = until
        self.is_open = bytearray(b"\x01" * batch.num_rows)

    def __len__(self) -> int:
        return len(self.is_open)

    @property
    def queue(self) -> int:
        return int(self.batch.column("queue")[0].as_py())

    @property
    def settled(self) -> bool:
        return 1 not in self.is_open

    def lease_id(self, row: int) -> str:
        return f"{self.receipt}.{self.relative[row]}"

    def open_rows(self) -> Sequence[int]:
        """Rows not yet acked or nacked, as numbers in the receipt."""
        if 0 not in self.is_open:
            return self.relative
        return [number for number, is_open in zip(self.relative, self.is_open, strict=True) if is_open]

    async def ack(self) -> str:
        """Done with all rows that are still open, in one item; waits for the answer."""
        return await self.settler.ack_receipt(self.receipt, self._close())

    async def nack(self, delay_ms: int = 0) -> str:
        """Hand the rows that are still open out again, after `delay_ms`."""
        return await self.settler.nack_rows(self.receipt, self._close(), delay_ms)

    async def extend(self, lease_ms: int) -> None:
        """The lease of the rows that are still open ends `lease_ms` from now."""
        await self.settler.extend_rows(self.receipt, self.open_rows(), lease_ms)

    def ack_soon(self) -> None:
        """As `ack`, without waiting."""
        self.settler.ack_rows(self.receipt, self._close())

    def _close(self) -> Sequence[int]:
        rows = self.open_rows()
        self.is_open = bytearray(len(self.is_open))
        return rows

    def messages(self) -> Iterator[ReceivedMessage]:
        """Its rows one by one."""
        return each(ReceivedMessage, self)


def decode_receive(
    body: bytes, settler: Settler, until: float, id_prefixes: Mapping[int, str]
) -> tuple[list[MessageBatch], str | None]:
    """A receive's Arrow answer as batches, each of one receipt, and why it is empty if it says so."""

    def alone(found: Opened, beside: _Beside) -> MessageBatch | None:
        """Of one batch and one receipt, as messages that come one by one have: a table costs half of this."""
        if len(found.batches) != 1 or len(beside.receipts) != 1:
            return None
        [batch], [receipt] = found.batches, beside.receipts
        relative = numbers(receipt.rows)
        prefix = id_prefixes.get(receipt.queue, "")
        fits = batch.num_rows == len(relative)
        return MessageBatch(batch, receipt.receipt, relative, settler, until, prefix, len(body)) if fits else None

    try:
        again = opened_again(body)
        if again is not None:
            beside = msgspec.json.decode(again.beside, type=_Beside)
            if (batch := alone(again, beside)) is not None:
                return [batch], beside.reason
        found = opened(body)
        beside = msgspec.json.decode(found.beside, type=_Beside)
    except (pa.ArrowException, msgspec.DecodeError) as error:
        raise UnknownProblem(f"an answer that is not as expected: {error}") from error
    if (batch := alone(found, beside)) is not None:
        return [batch], beside.reason
    table = pa.Table.from_batches(found.batches, found.schema)
    batches = []
    at = 0
    for receipt in beside.receipts:
        relative = numbers(receipt.rows)
        rows = table.slice(at, len(relative))
        if rows.num_rows != len(relative):
            raise UnknownProblem("an answer whose receipts name more messages than it holds")
        prefix = id_prefixes.get(receipt.queue, "")
        first = 0
        for batch in _batches(rows):
            some = relative[first : first + batch.num_rows]
            share = len(body) * batch.num_rows // table.num_rows
            batches.append(MessageBatch(batch, receipt.receipt, some, settler, until, prefix, share))
            first += batch.num_rows
        at += first
    return batches, beside.reason


def _batches(rows: pa.Table) -> list[pa.RecordBatch]:
    """Large record batches as they came, for nothing is copied then; many small ones as one."""
    batches: list[pa.RecordBatch] = rows.to_batches()
    if len(batches) > 1 and rows.nbytes < LARGE_BYTES * len(batches):
        batches = rows.combine_chunks().to_batches()
    return batches


def numbers(rows: str) -> Sequence[int]:
    """`0-2,7` as [0, 1, 2, 7]; a range when it is one."""
    found: list[int] = []
    for part in rows.split(",") if rows else []:
        first, _, last = part.partition("-")
        run = range(int(first), int(last or first) + 1)
        if len(part) == len(rows):
            return run
        found.extend(run)
    return found


def beside_of(table: pa.Table) -> dict[str, Any]:
    """What an Arrow answer says beside its rows."""
    found = msgspec.json.decode((table.schema.metadata or {}).get(METADATA_KEY, b"{}"))
    return found if isinstance(found, dict) else {}
