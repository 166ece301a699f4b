"""The least that a service does for JSON in batches of 1,000, as a limit of the machine: a process of its own that
keeps nothing (`python -m benchmarks.json_least FILE`).

    receive   answers with the bytes in FILE, a service's own answer
    ack       decodes the lease ids, and encodes that each of them is ok
    produce   decodes the messages
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from benchmarks import limits

_JSON = "application/json"


class _Acks(msgspec.Struct):
    acks: list[str]


class _Message(msgspec.Struct):
    body: str


class _Messages(msgspec.Struct):
    messages: list[_Message]


class _Settled(msgspec.Struct):
    status: str
    lease_id: str


class _Results(msgspec.Struct):
    results: list[_Settled]


async def _answer(received: bytes) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        data = await request.content.read()
        if request.path.endswith("/receive"):
            return web.Response(body=received, content_type=_JSON)
        if request.path.endswith("/ack"):
            ids = msgspec.json.decode(data, type=_Acks).acks
            results = _Results([_Settled("ok", lease_id) for lease_id in ids])
            return web.Response(body=msgspec.json.encode(results), content_type=_JSON)
        count = len(msgspec.json.decode(data, type=_Messages).messages)
        return web.Response(body=b'{"ranges":[{"count":%d}]}' % count, content_type=_JSON)

    await limits.answer(handle)


if __name__ == "__main__":
    uvloop.run(_answer(Path(sys.argv[1]).read_bytes()))
