"""One message a request: by `wrk` (Debian) when it is there, else by our own load process."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from pathlib import Path

from benchmarks import children
from benchmarks.harness import Setup
from millpond.client.load import batched, single

RAW = "application/octet-stream"
_RATE = re.compile(rb"Requests/sec:\s+([0-9.]+)")
_BAD = re.compile(rb"Non-2xx or 3xx responses: ([0-9]+)")


def tool() -> str:
    return "wrk" if shutil.which("wrk") else "own load process"


async def requests_per_second(url: str, path: str, setup: Setup) -> float:
    """Successful requests with a message each, per second, over `setup.connections` kept-alive connections."""
    return await posts_per_second(url, path, batched.bodies(setup.message_bytes)[0], RAW, setup)


async def posts_per_second(url: str, path: str, body: bytes, content_type: str, setup: Setup) -> float:
    """The same with any body of ASCII without quotes and backslashes."""
    if tool() != "wrk":
        found = await single.measure(
            url, path, body, setup.seconds, content_type=content_type, connections=setup.connections
        )
        assert not found.errors, f"{found.errors} requests failed"
        return found.rate.per_second
    with tempfile.TemporaryDirectory(prefix="millpond-wrk-") as folder:
        script = Path(folder) / "post.lua"
        script.write_text(
            'wrk.method = "POST"\n'
            f'wrk.body = "{body.decode("ascii")}"\n'
            f'wrk.headers["Content-Type"] = "{content_type}"\n'
        )
        async with children.running(*_command(url, path, str(script), setup)) as process:
            async with asyncio.timeout(setup.seconds + 60):
                out, _ = await process.communicate()
    return parsed(out)


def _command(url: str, path: str, script: str, setup: Setup) -> list[str]:
    seconds = f"{max(1, round(setup.seconds))}s"
    return ["wrk", "-t", "1", "-c", str(setup.connections), "-d", seconds, "-s", script, url + path]


def told(url: str, path: str, setup: Setup) -> str:
    """The command, as a person would type it."""
    return " ".join(_command(url, path, "post.lua", setup)) if tool() == "wrk" else tool()


def parsed(out: bytes) -> float:
    """Requests a second, all of them answered with 2xx or 3xx."""
    bad = _BAD.search(out)
    assert bad is None, f"{bad[1]!r} requests failed"
    rate = _RATE.search(out)
    assert rate is not None, out
    return float(rate[1])
