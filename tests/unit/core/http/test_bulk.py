"""Large answers go in slices, in turn, and with pauses while there are other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
import pytest
from aiohttp import web

from millpond.core.http.bulk import PAUSE_SECONDS, SLICE_BYTES, Bulk, sliced
from millpond.core.http.call import Call
from millpond.core.http.routing import Route
from millpond.core.http.server import HttpServer
from millpond.core.http.whole import pieces, whole

Serve = Callable[..., Awaitable[HttpServer]]
Connect = Callable[..., Awaitable[Any]]
LARGE = bytes(range(256)) * (5 * SLICE_BYTES // 512)


async def large(call: Call[Any]) -> web.StreamResponse:
    half = len(LARGE) // 2
    return pieces(call.request, [LARGE[:half], pa.py_buffer(LARGE).slice(half)], "application/octet-stream")


async def small(call: Call[Any]) -> web.StreamResponse:
    return whole(call.request, b"{}")


ROUTES = [
    Route(method="GET", path="/large", handler=large, bulk=True),
    Route(method="GET", path="/small", handler=small),
]


@pytest.fixture(name="pauses")
def _pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each slice was paused after."""
    asked: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float, result: Any = None) -> Any:
        asked.append(seconds)
        return await sleep(seconds, result)

    class Module:
        """asyncio as `bulk.py` sees it."""

        Lock = asyncio.Lock
        get_running_loop = staticmethod(asyncio.get_running_loop)

    Module.sleep = staticmethod(record)  # type: ignore[attr-defined]  # what the class is for
    monkeypatch.setattr("millpond.core.http.bulk.asyncio", Module)
    return asked


def request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.parametrize("sizes", [[0], [1], [SLICE_BYTES], [SLICE_BYTES, 1], [3, 2 * SLICE_BYTES + 5, 7, SLICE_BYTES]])
def test_slices_hold_the_same_bytes(sizes: list[int]) -> None:
    """None is larger than it may be, all but the last are full, and nothing is lost."""
    whole_body = [bytes([at + 1]) * size for at, size in enumerate(sizes)]
    parts = [b"".join(part) for part in sliced(whole_body)]
    assert b"".join(parts) == b"".join(whole_body)
    assert all(len(part) == SLICE_BYTES for part in parts[:-1])
    assert len(parts[-1]) <= SLICE_BYTES


async def test_a_large_answer_comes_whole(serve: Serve, connect: Connect) -> None:
    """Twice over one connection, behind each other."""
    raw = await connect(await serve(ROUTES))
    for _ in range(2):
        await raw.send(request("/large"))
        status, _, body = await raw.answer()
        assert status == 200
        assert body == LARGE


async def test_alone_it_is_not_held_up(serve: Serve, connect: Connect, pauses: list[float]) -> None:
    """Nobody else is there: the loop gets a turn behind each slice but the last, and that is all."""
    raw = await connect(await serve(ROUTES))
    await raw.send(request("/large"))
    await raw.answer()
    assert pauses == [0] * (len(LARGE) // SLICE_BYTES)


async def test_beside_other_requests_it_pauses(serve: Serve, connect: Connect, pauses: list[float]) -> None:
    """A small request has just been there."""
    raw = await connect(await serve(ROUTES))
    await raw.send(request("/small"))
    await raw.answer()
    await raw.send(request("/large"))
    await raw.answer()
    assert pauses == [PAUSE_SECONDS] * (len(LARGE) // SLICE_BYTES)


@pytest.mark.parametrize(("path", "beside", "expected"), [
    ("/steps", True, [PAUSE_SECONDS] * 3), ("/steps", False, [0] * 3), ("/quick", True, [])
])  # fmt: skip
async def test_work_on_a_large_answer_pauses_too(
    serve: Serve, connect: Connect, pauses: list[float], path: str, beside: bool, expected: list[float]
) -> None:
    """As its slices do. What another route does has a turn of the loop between its steps, and no pause."""

    async def steps(call: Call[Any]) -> web.StreamResponse:
        for _ in range(3):
            await call.pause()
        return whole(call.request, b"{}")

    routes = [Route(method="GET", path="/steps", handler=steps, bulk=True)]
    raw = await connect(await serve([*ROUTES, *routes, Route(method="GET", path="/quick", handler=steps)]))
    for one in ["/small"] * beside + [path]:
        await raw.send(request(one))
        await raw.answer()
    assert pauses == expected


async def test_large_answers_take_turns() -> None:
    """However many there are, one goes on in a turn of the loop."""
    bulk, turns = Bulk(), 0
    written: list[tuple[int, str]] = []

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def answer(name: str) -> None:
        for _ in range(3):
            await bulk.pause()
            written.append((turns, name))

    counting = asyncio.create_task(count())
    await asyncio.gather(answer("a"), answer("b"))
    counting.cancel()
    assert len({turn for turn, _ in written}) == 6
    assert "".join(name for _, name in written) == "ababab"


async def test_a_client_that_goes_ends_it(serve: Serve, connect: Connect) -> None:
    """What is left of the answer is dropped, and others are answered."""
    server = await serve(ROUTES)
    gone = await connect(server)
    await gone.send(request("/large"))
    gone.writer.transport.abort()
    raw = await connect(server)
    await raw.send(request("/large"))
    assert (await raw.answer())[2] == LARGE
