"""Waiting calls between a proxy and a store: the grammar of their one WebSocket.

    message    u32 id | u32 kind | body as in `core.http.rpc`       binary, little endian, either direction

    kind         from     body
    1 receive    proxy    the arguments of `StoreClient.receive`
    2 read       proxy    the arguments of `StoreClient.read`
    3 cancel     proxy    none: nobody waits for `id` any more
    4 answer     store    the answer
    5 error      store    ErrorInfo
    6 ended      store    none: `id` was cancelled before it had an answer

Every call gets exactly one of 4, 5, 6, also when it was cancelled: so a proxy that gets the answer of a cancelled
receive knows that its leases must be given back. A call is a credit for one answer of at most its own `max_bytes`;
WAITERS bounds them. When the socket closes all its calls are cancelled.
"""

from __future__ import annotations

import struct
from typing import Any

from millpond.core.errors import ErrorInfo
from millpond.core.http import rpc
from millpond.store.client import ReceiveRequest, ReceiveResult, Settle, SettleRequest, StoreClient

PATH = "/internal/v1/store/waiting"
RECEIVE, READ, CANCEL, ANSWER, ERROR, ENDED = 1, 2, 3, 4, 5, 6
METHODS = {RECEIVE: "receive", READ: "read"}
HEARTBEAT_SECONDS = 20.0  # a peer that is silent for half as long again is gone
RELEASE_MS = 5_000  # deadline of giving leases back; when it fails they run out by themselves

_HEAD = struct.Struct("<II")
error_decoder = rpc.Decoder(ErrorInfo)


def join(number: int, kind: int, segments: rpc.Segments | None = None) -> bytes:
    return b"".join([_HEAD.pack(number, kind), *(segments or ())])


def split(message: bytes) -> tuple[int, int, bytes]:
    """(id, kind, body). Raises ValueError."""
    if len(message) < _HEAD.size:
        raise ValueError("a message without a head")
    number, kind = _HEAD.unpack_from(message)
    return number, kind, message[_HEAD.size :]


async def release(store: StoreClient, request: Any, answer: Any) -> None:
    """Give back the leases of a receive that reached nobody. Raises what `settle` raises."""
    if isinstance(request, ReceiveRequest) and isinstance(answer, ReceiveResult) and answer.grants:
        settles = [Settle(g.queue_id, g.generation, g.lease, "release", offsets=g.offsets) for g in answer.grants]
        await store.settle(SettleRequest(request.group, settles, "memory", RELEASE_MS))
