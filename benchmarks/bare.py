"""The SDK around a flush: what no queue that this SDK speaks to over HTTP can pass here, in Python.

A process of its own answers the SDK's producer and consumer with what they must have. It keeps the bytes that are
posted (one write, one fdatasync by the kernel or in a thread, as the store does) and gives the bodies, as they stood in
the request, to the receive that waits, in an Arrow answer of which all else is always the same. What was sent is
neither decoded nor checked, nothing is indexed, leased, remembered or acked, there is one client, and no tenant. The
other side is the load of `latency` itself.
"""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import uvloop
from aiohttp import web

from benchmarks import limits
from benchmarks.handover import Keeper
from millpond.client.connection import ARROW, Connection
from millpond.client.groups import Group, GroupFilter
from millpond.client.load import batched
from millpond.client.load.figures import Times
from millpond.core.arrow import END_OF_STREAM
from millpond.core.schema import TIER_SCHEMA

NAME = "the SDK around a flush"
_ATTEMPT = pa.field("delivery_attempt", pa.int32(), nullable=False)


async def latency(folder: str, message_bytes: int, queues: int, *, seconds: float, per_second: int) -> Times:
    """As `batched.latency` of a service."""
    with tempfile.TemporaryDirectory(dir=folder or None) as place:
        async with (
            limits.answering("benchmarks.bare", place, str(message_bytes), str(queues)) as handler,
            Connection(handler.url) as connection,
        ):
            return await batched.latency(
                connection, "bare", "latency", message_bytes, seconds=seconds, per_second=per_second
            )


class _Bare:
    def __init__(self, place: str, message_bytes: int, queues: int) -> None:
        self._keeper = Keeper(place)
        self._bytes = message_bytes
        self._queues = [{"queue": n, "start_offset": 0, "tiered_to": 0, "end_offset": 0} for n in range(queues)]

    async def handle(self, request: web.BaseRequest) -> web.Response:
        data = await request.read()
        if request.method == "POST":
            if request.path.endswith("/receive"):
                return web.Response(body=await self._take(), content_type=ARROW)
            if request.path.endswith("/ack"):
                settled = sum(map(len, msgspec.json.decode(data).values()))
                return _answer({"results": [{"status": "ok"}] * settled})
            part = msgspec.json.decode(request.headers["Millpond-Producer"])
            return _answer(await self._put(data, part["queue"], 1 + part["last"] - part["first"]))
        if request.path.endswith("/queues"):
            return _answer({"queues": self._queues})
        return _answer(Group("latency", "bare", "latest", GroupFilter(), 1, 1_000, 0))

    async def _put(self, data: bytes, queue: int, count: int) -> dict[str, object]:
        whole = data.rjust(count * self._bytes + len(END_OF_STREAM))  # what warms it up is shorter
        end = len(whole) - len(END_OF_STREAM)
        bodies = [whole[at : at + self._bytes] for at in range(end - count * self._bytes, end, self._bytes)]
        await self._keeper.keep(data, bodies)
        return {"ranges": [{"queue": queue, "first_offset": 0, "count": count}]}

    async def _take(self) -> bytes:
        kept = await self._keeper.take()
        before, after = _around(len(kept), self._bytes)
        return b"".join((before, *kept, after))


@cache
def _around(count: int, message_bytes: int) -> tuple[bytes, bytes]:
    """What stands before the bodies of an answer of so many messages, and behind them."""
    mark = b"\x01" * message_bytes * count
    columns: dict[str, Any] = {
        "queue": np.zeros(count, np.int32),
        "offset": np.arange(count),
        "store_ts": np.zeros(count, np.int64),
        "body": [b"\x01" * message_bytes] * count,
    }
    rows = [
        pa.array(columns[field.name]).cast(field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in TIER_SCHEMA
    ]
    receipts = {"receipts": [{"receipt": "bare", "queue": 0, "rows": f"0-{count - 1}" if count > 1 else "0"}]}
    schema = TIER_SCHEMA.append(_ATTEMPT).with_metadata({"millpond": msgspec.json.encode(receipts)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.record_batch([*rows, pa.array(np.ones(count, np.int32))], schema=schema))
    before, _, after = bytes(sink.getvalue()).partition(mark)
    return before, after


def _answer(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


if __name__ == "__main__":
    uvloop.run(limits.answer(_Bare(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).handle))
