"""Heads that come again: nothing is parsed for them, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from millpond.core.http import again as again_module
from millpond.core.http import connection as connection_module
from millpond.core.http.again import HEAD_BYTES, VALUE_BYTES, Again, Taken
from millpond.core.http.call import Call
from millpond.core.http.connection import STRANGE_EACH, STRANGE_MOST
from millpond.core.http.prompt import PROMPT_BYTES, Prompt, PromptCall
from millpond.core.http.routing import Route
from millpond.core.limits import TARGET_CHARS

from .conftest import OpenGate, Raw, Serve, Somebody, until


class Echo:
    """Answers with what it was sent: promptly, or the usual way a body that begins with `u`."""

    def prompt(self, call: PromptCall[None]) -> Prompt | None:
        body = bytes(call.body)
        if body.startswith(b"u"):
            return None
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        future.set_result(self._told(call.params, call.headers.get("X-Name", "nobody"), body))
        return Prompt(future, bytes, "text/plain")

    async def usual(self, call: Call[None]) -> web.Response:
        body = bytes(await call.body(1_000_000))
        return web.Response(body=self._told(call.params, call.request.headers.get("X-Name", "nobody"), body))

    @staticmethod
    def _told(params: dict[str, str], name: str, body: bytes) -> bytes:
        return f"{params['to']} {name} ".encode() + body

    @property
    def route(self) -> Route:
        return Route(method="POST", path="/echo/{to}", handler=self.usual, prompt=self.prompt, scope="produce")


def post(body: bytes, *headers: str, to: str = "a", length: str | None = None) -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    said = f"Content-Length: {len(body) if length is None else length}"
    return f"POST /echo/{to} HTTP/1.1\r\nHost: h\r\n{said}\r\n{lines}\r\n".encode() + body


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was given to aiohttp."""
    given: list[bytes] = []
    usual = web.RequestHandler.data_received

    def data_received(self: web.RequestHandler, data: bytes) -> None:
        given.append(data)
        usual(self, data)

    monkeypatch.setattr(web.RequestHandler, "data_received", data_received)
    return given


async def asked(raw: Raw, data: bytes) -> bytes:
    await raw.send(data)
    return (await raw.answer())[2]


async def test_a_head_that_comes_again_is_not_parsed(serve: Serve, parsed: list[bytes]) -> None:
    """Whatever the body, its length and the target; another head is, and then that one may come again."""
    server = await serve([Echo().route])
    raw = await Raw.open(server)
    for body in (b"one", b"three", b"", b"x" * 10_000):
        assert await asked(raw, post(body)) == b"a nobody " + body
    for to in ("b", "longer", "a"):
        assert await asked(raw, post(b"one", to=to)) == to.encode() + b" nobody one"
    assert parsed == [post(b"one")]
    for body in (b"one", b"two"):
        assert await asked(raw, post(body, "X-Name: n", to="b")) == b"b n " + body
    assert parsed[1:] == [post(b"one", "X-Name: n", to="b")]
    assert server.requests[200] == 9
    await raw.close()


async def test_what_cannot_be_answered_so_goes_the_usual_way(serve: Serve, parsed: list[bytes]) -> None:
    """With its body, and what follows is answered as ever."""
    raw = await Raw.open(await serve([Echo().route]))
    for body in (b"one", b"usual", b"two", b"three"):
        assert await asked(raw, post(body)) == b"a nobody " + body
    assert parsed == [post(b"one"), post(b"usual"), post(b"two")]
    await raw.close()


def of(value: str, body: bytes = b"one", to: str = "a", before: str = "X-Name: ", behind: str = "") -> bytes:
    """With a header that varies before the length."""
    lines = f"Host: h\r\n{before}{value}\r\nContent-Length: {len(body)}\r\n{behind}\r\n"
    return f"POST /echo/{to} HTTP/1.1\r\n{lines}".encode() + body


async def test_a_head_of_which_one_header_varies_is_not_parsed(serve: Serve, parsed: list[bytes]) -> None:
    """Each request has its own value, whatever its length, the body and the target; nothing of another is seen."""
    seen: list[dict[str, Any]] = []

    def prompt(call: PromptCall[None]) -> Prompt | None:
        assert call.headers["host"] == "h" and len(call.headers) == 3
        seen.append(dict(call.seen))
        call.seen["name"] = call.headers["x-name"]
        return Echo().prompt(call)

    raw = await Raw.open(await serve([replace(Echo().route, prompt=prompt, varies="x-name")]))
    for value, body, to in (("1", b"one", "a"), ('{"a": 2}', b"two", "a"), ("3", b"", "b"), ("3", b"x" * 10_000, "b")):
        assert await asked(raw, of(value, body, to)) == f"{to} {value} ".encode() + body
    assert parsed == [of("1")]
    assert seen == [{}] * 4
    await raw.close()


@pytest.mark.parametrize(
    "another",
    [
        of(""),
        of(" 2"),
        of("2 "),
        of("2\t3"),
        of("\u00e9"),
        of("2\x01"),
        of("2\n"),
        of("2\rX-Other: 3"),
        of("v" * (VALUE_BYTES + 1)),
        of("2\r\nX-Other: 3"),
        of("2", before="X-Name : "),
        of("2", before="X-Nam: "),
        of("2", behind="X-Name: 3\r\n"),
    ],
)
async def test_another_value_that_is_not_plain_is_parsed(serve: Serve, parsed: list[bytes], another: bytes) -> None:
    """As it would be without what is remembered, also where it is refused."""
    answers = []
    for first in (of("1"), post(b"one")):  # the second leaves nothing that `another` could be taken for
        raw = await Raw.open(await serve([replace(Echo().route, varies="X-Name")]))
        for _ in range(2):
            await asked(raw, first)
        parsed.clear()
        await raw.send(another)
        answers.append((await raw.answer())[::2])
        assert parsed == [another]
        await raw.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (post(b"one", "X-Name: 1"), post(b"one", "X-Name: 2")),
        (of("1", before="X-Name: 0\r\nX-Name: "), of("1", before="X-Name: 2\r\nX-Name: ")),
        (of("1", before="X-Other: "), of("2", before="X-Other: ")),
    ],
)
async def test_what_cannot_vary_comes_again_as_it_is(
    serve: Serve, parsed: list[bytes], first: bytes, other: bytes
) -> None:
    """A header behind the length, one that stands there twice, or none: with the very same head nothing is parsed."""
    raw = await Raw.open(await serve([replace(Echo().route, varies="X-Name")]))
    for data in (first, first, other, first):
        await asked(raw, data)
    assert parsed == [first, other, first]
    await raw.close()


async def test_what_was_seen_in_a_head_stays_with_it(serve: Serve) -> None:
    """While it comes again on its connection; another head, and another connection, begin with nothing."""
    told: list[int] = []

    def counts(call: PromptCall[None]) -> Prompt | None:
        call.seen["times"] = call.seen.get("times", 0) + 1
        told.append(call.seen["times"])
        return Echo().prompt(call)

    server = await serve([replace(Echo().route, prompt=counts)])
    for _ in range(2):
        raw = await Raw.open(server)
        for headers in ([], [], [], ["X-Name: n"], ["X-Name: n"], []):
            await asked(raw, post(b"one", *headers))
        await raw.close()
    assert told == [1, 2, 3, 1, 2, 1] * 2


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/echo/%61", 200),  # percent-encoded
        ("/echo/a?x=1", 200),  # a query
        ("http://h/echo/a", 200),  # absolute
        ("/echo//a", 404),  # nothing is there
        ("/echo/" + "a" * TARGET_CHARS, 200),
        ("/usual/a", 200),  # a route that answers none promptly
        ("/echo/a HTTP/1.1 ", 400),
        ("/echo/\u00e9", 400),
    ],
)
async def test_other_targets_that_are_parsed(serve: Serve, parsed: list[bytes], target: str, status: int) -> None:
    """Those of which a parser could make something else, that are long, or that another handler answers."""
    echo = Echo()
    raw = await Raw.open(await serve([echo.route, replace(echo.route, path="/usual/{to}", prompt=None)]))
    await asked(raw, post(b"one"))
    data = post(b"one").replace(b"/echo/a", target.encode())
    await raw.send(data)
    assert (await raw.answer())[0] == status
    assert parsed == [post(b"one"), data]
    await raw.close()


async def test_who_asks_is_looked_at_each_time(serve: Serve) -> None:
    """A key may be revoked between two requests."""

    class Gate(OpenGate):
        def known(self, request: Any, scope: Any) -> Any:
            keys.append(request.headers["X-Name"])
            return Somebody()

    keys: list[str] = []
    raw = await Raw.open(await serve([Echo().route], gate=Gate()))
    for _ in range(3):
        await asked(raw, post(b"one", "X-Name: n"))
    assert keys == ["n"] * 3
    await raw.close()


async def test_a_server_that_stops_takes_none(serve: Serve) -> None:
    """503, as for any other."""
    server = await serve([Echo().route])
    raw = await Raw.open(server)
    await asked(raw, post(b"one"))
    server._draining = True
    await raw.send(post(b"one"))
    _, headers, _ = await raw.answer()
    assert headers["connection"] == "close"
    await raw.close()


@pytest.mark.parametrize("seed", range(30))
async def test_answers_are_those_of_a_server_that_remembers_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of requests with equal and other heads, in any pieces, one after another or together, good and bad."""
    choose = random.Random(seed)  # noqa: S311  # so that a failure can be repeated
    pieces: list[tuple[bytes, int]] = []  # what is sent, and how many answers are waited for behind it
    for _ in range(60):
        body = choose.choice([b"", b"1", b"22", b"usual", b"y" * 3_000, post(b"inner")])
        headers = choose.choice([[], [], [], ["X-Name: n"], ["X-Name: m", "Content-Type: text/plain"]])
        to = choose.choice(["a", "a", "b", "long", "%61", "a?b"])
        data = post(body, *headers, to=to)
        if choose.randrange(2):
            data = of(choose.choice(["1", "22", "a b", "v" * VALUE_BYTES]), body, to)
        match choose.randrange(6):
            case 0:
                at = choose.randrange(len(data))
                pieces += [(data[:at], 0), (data[at:], 1)]
            case 1:
                at = choose.randrange(len(data))
                pieces += [(data + data[:at], 1), (data[at:], 1)]
            case 2:
                pieces.append((data * 3, 3))
            case _:
                pieces.append((data, 1))
    pieces.append((choose.choice([post(b"1", length="+1"), b"\0" + post(b"1"), post(b"1", "Bad header: x")]), 0))

    async def answers() -> list[bytes]:
        raw = await Raw.open(await serve([replace(Echo().route, varies="X-Name")]))
        found = []
        for data, count in pieces:
            await raw.send(data)
            for _ in range(4 if not count else 0):
                await asyncio.sleep(0)
            found += [(await raw.answer())[2] for _ in range(count)]
        status, _, _ = await raw.answer()
        await raw.close()
        return [*found, b"%d" % status]

    remembering = await answers()
    monkeypatch.setattr(connection_module, "again_of", lambda *_: None)
    assert remembering == await answers()
    assert remembering[-1] == b"400"


async def test_heads_that_are_always_new_are_seldom_remembered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one comes again."""
    remembered = 0

    def again_of(*arguments: Any) -> Again | None:
        nonlocal remembered
        remembered += 1
        return again_module.again_of(*arguments)

    monkeypatch.setattr(connection_module, "again_of", again_of)
    raw = await Raw.open(await serve([Echo().route]))
    for number in range(2 * STRANGE_EACH - 1):
        await asked(raw, post(b"one", f"X-Name: {number}"))
    assert remembered == STRANGE_MOST + 1
    for _ in range(2):
        await asked(raw, post(b"one"))
    assert remembered == STRANGE_MOST + 2
    await asked(raw, post(b"one", "X-Name: n"))
    assert remembered == STRANGE_MOST + 3
    await raw.close()


def again() -> Again:
    data = post(b"one")
    between, behind = data.removeprefix(b"POST /echo/a").removesuffix(b"one").split(b"3")
    return Again(b"POST ", b"/echo/a", between, b"", behind, HERE, {})


HERE: Any = (SimpleNamespace(large=False), "the route of its target")
THERE: Any = (SimpleNamespace(large=False), "the route of another")


def find(method: str, target: str) -> Any:
    return THERE if (method, target) == ("POST", "/echo/b") else None


@pytest.mark.parametrize(
    "data",
    [
        post(b"one")[:-1],
        post(b"one") + b"x",
        post(b"one") + post(b"one"),
        post(b"one", length="+3"),
        post(b"one", length="3 "),
        post(b"one", length=""),
        post(b"one", length="\u0663"),
        post(b"one", length="0000000000003"),
        post(b"one", to="c"),
        post(b"one", to=""),
        post(b"one").replace(b" HTTP/1.1", b"  HTTP/1.1"),
        post(b"one").replace(b" HTTP/1.1", b" HTTP/1.0"),
        post(b"one").replace(b" HTTP/1.1", b""),
        post(b"one").replace(b"POST", b"PUT"),
        post(b"one", "X-Name: n"),
        post(b"one").replace(b"Host", b"host"),
        post(b"x" * PROMPT_BYTES),
        post(b"one")[:40],
        b"",
    ],
)  # fmt: skip
def test_what_is_not_the_same_head_and_a_whole_body(data: bytes) -> None:
    """Less, more, another length than it says, one that a parser may not take, a target that nothing is found at, and
    any other head."""
    assert again().taken_from(post(b"four"), find) == Taken(HERE, 4, b"four", {}, {})
    assert again().taken_from(post(b"four", to="b"), find) == Taken(THERE, 4, b"four", {}, {})
    assert again().taken_from(data, find) is None


async def remembered(serve: Serve, monkeypatch: pytest.MonkeyPatch, *pieces: bytes) -> list[Again | None]:
    """What is remembered of requests, of which the last is answered."""
    found: list[Again | None] = []

    def again_of(*arguments: Any) -> Again | None:
        found.append(again_module.again_of(*arguments))
        return found[-1]

    monkeypatch.setattr(connection_module, "again_of", again_of)
    server = await serve([Echo().route])
    raw = await Raw.open(server)
    for data in pieces:
        await raw.send(data)
        for _ in range(5):
            await asyncio.sleep(0)
    answers = max(1, sum(b"Content-Length" in data for data in pieces))
    await until(lambda: server.requests.total() == answers)
    await raw.close()
    return found


@pytest.mark.parametrize(
    "pieces",
    [
        [post(b"one", f"X-Long: {'v' * HEAD_BYTES}")],
        [post(b"one", "Upgrade: h2c", "Connection: upgrade")],
        [b"\r\n" + post(b"one")],
        [b"POST /echo/a HTTP/1.1\r\nX-Name: ", post(b"one")],
        [post(b"one") + b"POST /echo/a HTTP/1.1\r\nX-Name: ", post(b"two")],
        [b"POST /echo/a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n0\r\n\r\n"],
    ],
)  # fmt: skip
async def test_what_is_not_remembered(serve: Serve, monkeypatch: pytest.MonkeyPatch, pieces: list[bytes]) -> None:
    """Long heads, other protocols, and bytes of which it is not certain that they are all of one head."""
    assert not any(await remembered(serve, monkeypatch, *pieces))


async def test_what_is_remembered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A usual one is."""
    [found] = await remembered(serve, monkeypatch, post(b"one"))
    assert found is not None and replace(found, found=HERE, headers={}) == again()
