"""How S3 is asked again, and what its refusals become: against a server that answers what it is told to."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from millpond.core.clock import SystemRandom
from millpond.core.config import TierConfig
from millpond.core.errors import BadRequest, Conflict, NotFound, Unavailable
from millpond.core.limits import OBJECT_ATTEMPTS
from millpond.core.tier.directory import DirectoryObjects
from millpond.core.tier.open import open_objects
from millpond.core.tier.s3 import S3Objects

DATA = b"some bytes"
SHA256 = hashlib.sha256(DATA).hexdigest()


class NoPause(SystemRandom):
    def uniform(self, low: float, high: float) -> float:
        return 0.0


class Script:
    """An HTTP server that gives its `answers` in turn, the last one for ever, and keeps the requests' heads.

    An answer is a status and a body, or None: the connection is cut after the request was read.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes] | None] = [(200, b"")]
        self.heads: list[str] = []
        self.extra = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if "Expect: 100-continue" in head:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
        await reader.readexactly(int(lengths[0]) if lengths else 0)
        self.heads.append(head)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            status, body = answer
            lines = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{self.extra}\r\n"
            writer.write(lines.encode() + (b"" if head.startswith("HEAD") else body))
        writer.close()


def refusal(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    script = Script()
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield script
    server.close()


@pytest.fixture
async def objects(script: Script, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3Objects]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    objects = S3Objects("pond", "pre/fix", script.endpoint, "us-east-1", NoPause())
    yield objects
    await objects.close()


async def test_what_a_put_sends(objects: S3Objects, script: Script) -> None:
    """A PUT is conditional, carries its SHA-256 for the server to verify, and is path style."""
    await objects.put_new("v1/k", DATA, SHA256)
    (head,) = script.heads
    assert head.startswith("PUT /pond/pre/fix/v1/k ")
    assert "If-None-Match: *" in head
    assert "x-amz-checksum-sha256: " in head
    assert "aws-chunked" not in head


PASSING = [(503, refusal("SlowDown")), (500, b""), (409, refusal("ConditionalRequestConflict")), None]


@pytest.mark.parametrize("trouble", [*PASSING, (400, refusal("BadDigest"))])
async def test_trouble_that_passes(objects: S3Objects, script: Script, trouble: tuple[int, bytes] | None) -> None:
    """A busy server, a lost answer, damage on the way: asked again, and it works."""
    script.answers = [trouble, trouble, (200, b"content")]
    assert await objects.get("k") == b"content"
    assert len(script.heads) == 3


async def test_trouble_that_stays(objects: S3Objects, script: Script) -> None:
    """A server that stays unavailable is tier_unavailable after a bounded number of attempts."""
    script.answers = [(503, refusal("SlowDown"))]
    with pytest.raises(Unavailable) as error:
        await objects.put_new("k", DATA, SHA256)
    assert error.value.code == "tier_unavailable"
    assert "503 SlowDown" in error.value.detail
    assert len(script.heads) == OBJECT_ATTEMPTS


@pytest.mark.parametrize(
    ("status", "code", "error", "shown"),
    [
        (403, "AccessDenied", Unavailable, "403 AccessDenied"),
        (404, "NoSuchBucket", Unavailable, "NoSuchBucket"),
        (404, "NoSuchKey", NotFound, "no such object"),
        (412, "PreconditionFailed", Conflict, "it is there"),
    ],
)
async def test_refusals_are_not_repeated(
    objects: S3Objects, script: Script, status: int, code: str, error: type[Exception], shown: str
) -> None:
    """An answer that will not change is not asked for again, and says what it was."""
    script.answers = [(status, refusal(code))]
    with pytest.raises(error, match=shown):
        await objects.put_new("k", DATA, SHA256)
    assert len(script.heads) == 1


async def test_a_replace_whose_answer_was_lost(objects: S3Objects, script: Script) -> None:
    """The connection breaks after the server took it: the refusal of the repeat is one's own success."""
    script.answers = [None, (412, refusal("PreconditionFailed")), (200, b"")]
    script.extra = f'ETag: "new"\r\nx-amz-meta-sha256: {SHA256}\r\n'
    assert await objects.replace("m", DATA, '"old"') == '"new"'
    assert [head.split(" ")[0] for head in script.heads] == ["PUT", "PUT", "HEAD"]


async def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint without a server is tier_unavailable, also for check."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        objects = S3Objects("pond", "", f"http://127.0.0.1:{held.getsockname()[1]}", "us-east-1", NoPause())
        for call in (objects.head("k"), objects.check()):
            with pytest.raises(Unavailable) as error:
                await call
            assert error.value.code == "tier_unavailable"
        await objects.close()


def test_boto3_is_not_loaded_before_it_is_needed() -> None:
    """A directory tier does not pay for boto3's memory."""
    code = "import millpond.core.tier.open, sys; assert not {'boto3', 'botocore'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603


async def test_tier_urls(tmp_path: object) -> None:
    """A URL means a directory or a bucket; anything else is refused by name."""
    for url, expected in (("", f"file://{tmp_path}/tier"), ("file:///a%20b", "file:///a%20b"), ("/a b", "file:///a%20b"),
                          ("s3://pond/p/q/", "s3://pond/p/q"), ("s3://pond", "s3://pond")):  # fmt: skip
        objects = open_objects(TierConfig(url=url), str(tmp_path), NoClock(), SystemRandom())
        assert objects.url == expected
        assert isinstance(objects, S3Objects if url.startswith("s3") else DirectoryObjects)
        await objects.close()
    for url in ("ftp://host/x", "file://host/x", "s3:///x"):
        with pytest.raises(BadRequest, match=r"tier\.url"):
            open_objects(TierConfig(url=url), str(tmp_path), NoClock(), SystemRandom())


class NoClock:
    def wall_ms(self) -> int:
        raise AssertionError("opening looks at no clock")

    boot_ns = monotonic = wall_ms
