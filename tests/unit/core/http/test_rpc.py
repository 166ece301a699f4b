from __future__ import annotations

import asyncio
from typing import Any, Literal, Protocol

import msgspec
import pyarrow as pa
import pytest

from millpond.core.errors import BadRequest, BelowLocal, FieldError, Internal, Unavailable
from millpond.core.http import rpc
from millpond.core.http.connection import Bounds
from millpond.core.http.secret import SecretGate

from .conftest import Serve

SECRET = "s" * 40


class Part(msgspec.Struct, frozen=True):
    name: str
    data: pa.Buffer
    more: pa.Buffer | None = None


class Request(msgspec.Struct, frozen=True):
    parts: list[Part]
    deadline_ms: int = 1_000
    kind: Literal["a", "b"] = "a"


class ThingClient(Protocol):
    async def swap(self, request: Request) -> list[Part]: ...

    async def put(self, number: int, changes: dict[str, object], mark: str = "none") -> tuple[int, str]: ...

    async def positions(self, ids: list[int]) -> dict[int, int]: ...

    async def fail(self, how: str) -> None: ...

    async def hang(self, deadline_ms: int) -> None: ...

    async def close(self) -> None: ...


class Thing:
    def __init__(self) -> None:
        self.closed = False
        self.changes: dict[str, object] = {}

    async def swap(self, request: Request) -> list[Part]:
        return [Part(part.name.upper(), part.more or pa.py_buffer(b""), part.data) for part in request.parts]

    async def put(self, number: int, changes: dict[str, object], mark: str = "none") -> tuple[int, str]:
        self.changes = changes
        return number + 1, mark

    async def positions(self, ids: list[int]) -> dict[int, int]:
        return {number: number * 2 for number in ids}

    async def fail(self, how: str) -> None:
        if how == "known":
            raise BelowLocal("below_local", "gone", first_local_offset=7)
        if how == "fields":
            raise BadRequest("invalid_request", "bad", fields=[FieldError("a.b", "a number", "x")])
        raise KeyError("a bug")

    async def hang(self, deadline_ms: int) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True


def in_process(thing: Thing) -> ThingClient:
    return rpc.through_codec(ThingClient, thing)  # type: ignore[type-abstract]  # the interface itself is meant


async def over_http(serve: Serve, thing: Thing, secret: str = SECRET) -> ThingClient:
    routes = rpc.serve(ThingClient, thing)  # type: ignore[type-abstract]  # the interface itself is meant
    server = await serve(routes, Bounds(), SecretGate(SECRET))
    caller = rpc.Caller(server.address, secret)
    return rpc.remote(ThingClient, caller)  # type: ignore[type-abstract]  # the interface itself is meant


@pytest.fixture(params=["codec", "http"])
async def client(request: pytest.FixtureRequest, serve: Serve) -> Any:
    thing = Thing()
    made = in_process(thing) if request.param == "codec" else await over_http(serve, thing)
    yield made
    await made.close()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100_000])
async def test_buffers_arrive_whole(client: ThingClient, size: int) -> None:
    """Buffers of any length, absent ones and empty ones, arrive as they were, also many and large ones."""
    parts = [Part("a", pa.py_buffer(b"x" * size), pa.py_buffer(b"y" * (size + 3))), Part("b", pa.py_buffer(b"z"))]
    answer = await client.swap(Request(parts))
    assert [part.name for part in answer] == ["A", "B"]
    assert answer[0].data.to_pybytes() == b"y" * (size + 3)
    assert answer[0].more is not None
    assert answer[0].more.to_pybytes() == b"x" * size
    assert answer[1].data.size == 0


async def test_buffers_are_aligned(client: ThingClient) -> None:
    """An i64 buffer can be viewed in place, wherever it stands in the body."""
    parts = [Part("a", pa.py_buffer(b"123"), pa.py_buffer(b"\1" * 16))]
    answer = await client.swap(Request(parts))
    assert answer[0].data.address % 8 == 0


async def test_defaults_names_and_free_values(client: ThingClient) -> None:
    """Arguments by name, defaults, and values of any JSON kind come through; tuples stay tuples."""
    assert await client.put(1, {"a": None, "b": [1, "x"], "c": {"d": 2.5}}) == (2, "none")
    assert await client.put(1, changes={}, mark="m") == (2, "m")


async def test_integer_keys_stay_integers(client: ThingClient) -> None:
    """A dict by id does not come back by text."""
    assert await client.positions([1, 2]) == {1: 2, 2: 4}


async def test_errors_come_back_as_themselves(client: ThingClient) -> None:
    """Class, code, text, fields and extra of an error cross the boundary."""
    with pytest.raises(BelowLocal) as caught:
        await client.fail("known")
    assert (caught.value.code, caught.value.detail, caught.value.extra) == (
        "below_local", "gone", {"first_local_offset": 7}
    )  # fmt: skip
    with pytest.raises(BadRequest) as refused:
        await client.fail("fields")
    assert refused.value.fields == [FieldError("a.b", "a number", "x")]


async def test_a_wrong_argument_never_arrives(client: ThingClient) -> None:
    """What the annotations do not allow is refused by the receiving side."""
    with pytest.raises(BadRequest) as caught:
        await client.positions(["x"])  # type: ignore[list-item]  # the mistake under test
    assert caught.value.code == "malformed_body"


async def test_a_bug_over_http_is_internal(serve: Serve) -> None:
    """The caller learns that something failed there, not what."""
    client = await over_http(serve, Thing())
    with pytest.raises(Internal) as caught:
        await client.fail("bug")
    assert "a bug" not in caught.value.detail
    await client.close()


async def test_a_wrong_secret_is_unavailable(serve: Serve) -> None:
    """A part of another cluster is refused, and its callers see that part as away, not themselves as forbidden."""
    client = await over_http(serve, Thing(), "t" * 40)
    with pytest.raises(Unavailable, match="unauthenticated"):
        await client.positions([])
    await client.close()


async def test_nobody_there_is_unavailable() -> None:
    """A refused connection names the service that is away."""
    caller = rpc.Caller("http://127.0.0.1:1", SECRET)
    client: ThingClient = rpc.remote(ThingClient, caller)  # type: ignore[type-abstract]  # the interface is meant
    with pytest.raises(Unavailable) as caught:
        await client.positions([])
    assert caught.value.code == "store_unavailable"
    await client.close()


async def test_no_answer_in_time_is_an_unknown_outcome(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller waits for the call's deadline and a margin; then nobody knows whether it was done."""
    monkeypatch.setattr(rpc, "MARGIN_MS", 50)
    client = await over_http(serve, Thing())
    with pytest.raises(Unavailable) as caught:
        await client.hang(50)
    assert caught.value.code == "unknown_outcome"
    await client.close()


async def test_close_is_not_sent(serve: Serve) -> None:
    """Closing a remote client closes its connections, never the service."""
    thing = Thing()
    client = await over_http(serve, thing)
    await client.close()
    assert not thing.closed


@pytest.mark.parametrize("cut", ["head", "lengths", "buffer", "more", "index", "count"])
def test_what_pack_would_not_make_is_refused(cut: str) -> None:
    """A body that is short, long, or points outside itself is a ValueError, never a crash."""
    decoder = rpc.Decoder(list[Part])
    body = b"".join(rpc.pack([Part("a", pa.py_buffer(b"12345678"))]))
    assert decoder.unpack(body)[0].data.to_pybytes() == b"12345678"
    hostile = {
        "head": body[:6],
        "lengths": body[:-14],
        "buffer": body[:-1],
        "more": body + b"\0",
        "index": b"".join(rpc.pack([{"name": "a", "data": 0}])),
        "count": (4).to_bytes(4, "little") + b"\x90\0\0\0" + b"\xff" * 4,
    }[cut]
    with pytest.raises(ValueError, match="not a body"):
        decoder.unpack(hostile)


@pytest.mark.parametrize("number", [-1, 1.0, "0", None, 2**40])
def test_a_buffer_is_named_by_its_number(number: object) -> None:
    """Anything else in a buffer's place is refused."""
    segments = rpc.pack([{"name": "a", "data": number}])
    with pytest.raises(ValueError, match="not a body"):
        rpc.Decoder(list[Part]).unpack(b"".join(segments))
