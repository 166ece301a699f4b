"""What a store does, as an interface: `StoreClient`, its requests and its answers.

Two implementations: `store.local.LocalStore` (direct calls, imported by the launcher only) and
`RemoteStore` below (HTTP, through `core.http.rpc`). One behaviour suite runs on both. Arguments are frozen
structs and `pyarrow.Buffer`s; errors are `MillpondError`s and travel by code; the deadline is an argument
(milliseconds from now); an accepted call outlives its caller, except `receive` and a waiting `read`, which
end with it.

Offsets are per queue; `queue_id` is global (log, disk), `queue` is the number in the topic (API, Parquet).
Times are milliseconds since 1970 UTC of the store's clock. "Confirmed" means fsynced on enough replicas:
no answer ever shows anything above it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

import msgspec
import pyarrow as pa

from millpond.core.errors import ErrorInfo
from millpond.core.frame import ProducerPart

Durability = Literal["flush", "memory"]
Start = Literal["earliest", "latest"]
SettleStatus = Literal["ok", "already", "redelivered", "void", "unknown"]
SETTLE_STATUSES: tuple[SettleStatus, ...] = ("ok", "already", "redelivered", "void", "unknown")


class QueueRef(msgspec.Struct, frozen=True):
    """A queue, and whose it is. A store learns a queue from the first append or receive that names it."""

    tenant_id: int
    topic_id: int
    queue_id: int
    queue: int


# -- append ---------------------------------------------------------------------------------------------------


class QueueAppend(msgspec.Struct, frozen=True):
    """Messages of one queue, as they will stand in one frame.

    `payload` is one Arrow IPC record batch message of `message_schema(columns)`, compressed by `codec` inside;
    `sidecar` is `pack_sidecar` of the same rows, without parts. The proxy has validated both.
    """

    queue: QueueRef
    count: int
    columns: int
    codec: int
    sidecar: pa.Buffer
    payload: pa.Buffer
    payload_crc: int
    payload_size: int
    durability: Durability
    parts: list[ProducerPart] = []
    dedup_window_ms: int = 0


class Duplicate(msgspec.Struct, frozen=True):
    """Row `row` of an append repeats the message at `offset`; `mismatch`: with another body."""

    row: int
    offset: int
    store_ts: int
    mismatch: bool = False


class AppendOutcome(msgspec.Struct, frozen=True):
    """One `QueueAppend`'s answer.

    Appended: rows stand at `first_offset` .. + count. When `duplicates` is not empty *nothing* was appended:
    it names every duplicate row, and the proxy submits the others once more. `error` says why nothing was.
    """

    first_offset: int = -1
    store_ts: int = 0
    duplicates: list[Duplicate] = []
    error: ErrorInfo | None = None


class AppendRequest(msgspec.Struct, frozen=True):
    appends: list[QueueAppend]
    deadline_ms: int


class AppendResult(msgspec.Struct, frozen=True):
    outcomes: list[AppendOutcome]
    epoch: int


# -- read -----------------------------------------------------------------------------------------------------


class StoredFrame(msgspec.Struct, frozen=True):
    """A messages frame as read: its checksums hold. `position` and the store's epoch name it in caches."""

    queue_id: int
    position: int
    first_offset: int
    count: int
    columns: int
    codec: int
    store_ts: int
    payload_size: int
    sidecar: pa.Buffer
    payload: pa.Buffer


class ReadRequest(msgspec.Struct, frozen=True):
    """Frames of one queue from the one that holds `offset` on; whole frames, in order, without a gap.

    At least one frame when there is one, then as many as fit `max_messages` (counted from `offset`) and
    `max_bytes`. At the end it waits up to `wait_ms` for one more. With `tag_hashes`, frames without a
    matching row are left out, and `next_offset` says how far it has looked.
    """

    queue_id: int
    offset: int
    max_messages: int
    max_bytes: int
    wait_ms: int = 0
    tag_hashes: list[int] | None = None


class QueueEnds(msgspec.Struct, frozen=True):
    """start_offset: first not deleted; local_offset: first on this disk; end_offset: confirmed end."""

    queue_id: int
    start_offset: int
    local_offset: int
    end_offset: int
    last_ts: int


class ReadResult(msgspec.Struct, frozen=True):
    frames: list[StoredFrame]
    next_offset: int
    ends: QueueEnds


class FindRequest(msgspec.Struct, frozen=True):
    """Frames whose index names `key_hash` (preselection: compare the key once the frame is open)."""

    queue_ids: list[int]
    key_hash: int
    from_ts: int
    to_ts: int
    max_frames: int


# -- groups: cursors and leases -------------------------------------------------------------------------------


class GroupRef(msgspec.Struct, frozen=True):
    tenant_id: int
    topic_id: int
    group_id: int


class ReceiveRequest(msgspec.Struct, frozen=True):
    """Lease up to `max_messages` of these queues to one consumer.

    `start` is where a group that has no cursor here begins. `tag_hashes` filters on the index. A repeat with
    the same `attempt_id` within a minute gets the same unsettled leases. Waits up to `wait_ms` when empty.
    """

    group: GroupRef
    queues: list[QueueRef]
    start: Start
    max_messages: int
    max_bytes: int
    lease_ms: int
    wait_ms: int = 0
    tag_hashes: list[int] | None = None
    attempt_id: str | None = None
    max_in_flight: int = 100_000


class Grant(msgspec.Struct, frozen=True):
    """Messages of one queue leased together. `offsets` i64[n] ascending, `attempts` u32[n] (1: first delivery).

    `frames` holds those frames that travel along; the others are read by the proxy (`read`), and rows below
    `local_offset` come from the tier. Each offset belongs to exactly one of them.
    """

    queue_id: int
    generation: int
    lease: int
    offsets: pa.Buffer
    attempts: pa.Buffer
    lease_until_ts: int
    local_offset: int
    frames: list[StoredFrame]


class Claim(msgspec.Struct, frozen=True):
    """A cold range that must be read and filtered by the proxy before it is leased (`lease`). 5 s, no attempt."""

    queue_id: int
    generation: int
    claim: int
    first: int
    end: int


class ReceiveResult(msgspec.Struct, frozen=True):
    """`reason` says why it is empty when that is not obvious: `in_flight_full`, `paused`."""

    grants: list[Grant]
    claims: list[Claim] = []
    reason: str | None = None
    created: bool = False


class LeaseRequest(msgspec.Struct, frozen=True):
    """What the proxy took of a claimed range: lease these offsets (i64[n]), skip the others below `end`."""

    group: GroupRef
    queue_id: int
    generation: int
    claim: int
    take: pa.Buffer
    end: int
    lease_ms: int


class Settle(msgspec.Struct, frozen=True):
    """Settle rows of one lease in one queue.

    `action` ack: done; nack: hand out again after `delay_ms`; extend: the lease ends `delay_ms` from now;
    skip: the filter does not want it; release: it was never delivered, hand it out again with the same attempt.
    `offsets` i64[n]. When `ranges` is given instead: i64[2k], pairs of first and end, all of the lease's rows
    inside them.
    """

    queue_id: int
    generation: int
    lease: int
    action: Literal["ack", "nack", "extend", "skip", "release"]
    offsets: pa.Buffer | None = None
    ranges: pa.Buffer | None = None
    delay_ms: int = 0


class SettleRequest(msgspec.Struct, frozen=True):
    group: GroupRef
    settles: list[Settle]
    durability: Durability
    deadline_ms: int


class SettleOutcome(msgspec.Struct, frozen=True):
    """`statuses` u8[n], an index into SETTLE_STATUSES for each offset; for ranges one status for the whole
    and `rows`, how many of its rows were settled now."""

    statuses: pa.Buffer
    rows: int


class SettleResult(msgspec.Struct, frozen=True):
    outcomes: list[SettleOutcome]


class SeekRequest(msgspec.Struct, frozen=True):
    """Move the group's cursor of each queue to `offsets[i]`; idempotent by `seek_id`.

    `others`: the topic's other queues in this store. A group that has not begun here begins in all of them, at `start`;
    that may be all that is asked.
    """

    group: GroupRef
    queues: list[QueueRef]
    offsets: list[int]
    seek_id: str
    dry_run: bool
    keep_retries: bool = False
    start: Start = "latest"
    others: list[QueueRef] = []


class SeekOutcome(msgspec.Struct, frozen=True):
    queue_id: int
    from_offset: int
    to_offset: int


class SeekResult(msgspec.Struct, frozen=True):
    queues: list[SeekOutcome]


class LagRequest(msgspec.Struct, frozen=True):
    group: GroupRef
    queues: list[QueueRef]
    start: Start = "latest"


class QueueLag(msgspec.Struct, frozen=True):
    """committed: least unsettled offset, else head; skipped: messages lost to expiry before being handed out.

    `exists` is False when the group has no cursor here yet. `oldest_ts` is the store timestamp of the message
    at `committed` (-1: none, or no longer local).
    """

    queue_id: int
    start_offset: int
    committed: int
    head: int
    end_offset: int
    in_flight: int
    oldest_ts: int
    skipped: int
    exists: bool


class LagResult(msgspec.Struct, frozen=True):
    queues: list[QueueLag]
    now_ts: int


class TimeRequest(msgspec.Struct, frozen=True):
    """The first local offset of each queue whose message has a clock value >= `ts`."""

    queue_ids: list[int]
    ts: int
    clock: Literal["store", "born"] = "store"


class TimeResult(msgspec.Struct, frozen=True):
    """offsets[i]; end_offset when all are older. `local[i]` False: the answer may lie in the tier, below
    `local_offset` (store clock: the time is before the first local message; born clock: always possible)."""

    offsets: list[int]
    local: list[bool]


# -- producers ------------------------------------------------------------------------------------------------


class ProducerState(msgspec.Struct, frozen=True):
    queue_id: int
    last: int
    last_ts: int


class StoreStatus(msgspec.Struct, frozen=True):
    """For /readyz, /metrics and `millpond` commands. `states`: e.g. disk_full, quarantined ranges as text."""

    group: str
    epoch: int
    end_position: int
    confirmed_position: int
    first_position: int
    checkpoint_position: int
    queues: int
    ready: bool
    disk_full: bool
    quarantined: list[tuple[int, int]]
    counters: dict[str, float]


class StoreClient(Protocol):
    """One store group's primary. Every method may raise `Unavailable` and `Internal`."""

    async def append(self, request: AppendRequest) -> AppendResult:
        """Answers when every append's durability holds, or with its error. Never half of one `QueueAppend`."""
        ...

    async def read(self, request: ReadRequest) -> ReadResult:
        """Raises OffsetExpired, OffsetOutOfRange, BelowLocal (the tier has it), Internal(corrupt_range)."""
        ...

    async def queues(self, queue_ids: list[int]) -> list[QueueEnds]:
        """Ends of queues; one this store has never seen is empty (all offsets 0)."""
        ...

    async def offsets_at(self, request: TimeRequest) -> TimeResult: ...

    async def find(self, request: FindRequest) -> list[StoredFrame]: ...

    async def receive(self, request: ReceiveRequest) -> ReceiveResult: ...

    async def lease(self, request: LeaseRequest) -> Grant:
        """Raises Conflict when the claim has run out or the group was sought."""
        ...

    async def settle(self, request: SettleRequest) -> SettleResult: ...

    async def seek(self, request: SeekRequest) -> SeekResult: ...

    async def lag(self, request: LagRequest) -> LagResult: ...

    async def producers(self, queue_ids: list[int], producer_id: str) -> list[ProducerState]:
        """Where a session stands in each of the queues that know it (confirmed state only)."""
        ...

    async def close_producer(self, queue_ids: list[int], producer_id: str) -> None: ...

    async def seal(self, topic_id: int, deadline_ms: int) -> dict[int, int]:
        """Seal all confirmed messages of the topic now; queue id -> tiered_to. Raises Unavailable(tier_unavailable)."""
        ...

    async def delete_topic(self, topic_id: int) -> None:
        """Forget the topic's queues: their messages are expired, their cursors dropped."""
        ...

    async def delete_group(self, group: GroupRef) -> None: ...

    async def status(self) -> StoreStatus: ...


Risen: TypeAlias = bool | Exception
"""How a wait ends: True, woken; False, its time is over; or the error that it ends with."""


class ParkedReceive(Protocol):
    """A receive that waits without a task."""

    @property
    def woken(self) -> bool:
        """Whether it may be served: then `receive` or `leave` must follow."""
        ...

    @property
    def full(self) -> bool:
        """Its group holds more than it may: why there is nothing."""
        ...

    async def receive(self) -> ReceiveResult:
        """Once, after it was woken: as `StoreClient.receive`. Its messages may still be on their way to the disk:
        nobody sees any of them before `shown`."""
        ...

    async def shown(self) -> None:
        """Until what `receive` gave may be shown. Raises Unavailable: it never may."""
        ...

    def leave(self) -> None:
        """Nobody wants the answer any more."""
        ...


class Parks(Protocol):
    """What a store in the same process can do besides."""

    def park(self, request: ReceiveRequest, rises: Callable[[Risen], None]) -> ParkedReceive | None:
        """None unless all that this receive can do now is wait. `rises` is told once how that ends, perhaps before
        this returns, and in the midst of what ends it, so it may only note what is to be done.
        It knows a list of queues that it has seen before by its identity."""
        ...
