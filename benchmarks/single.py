"""One message a request: by `wrk` (Debian) when it is there, else by our own load process."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from pathlib import Path

from benchmarks.harness import Setup
from millpond.client.load.single import in_own_process

_RATE = re.compile(rb"Requests/sec:\s+([0-9.]+)")
_BAD = re.compile(rb"Non-2xx or 3xx responses: ([0-9]+)")


def tool() -> str:
    return "wrk" if shutil.which("wrk") else "own load process"


async def requests_per_second(url: str, path: str, setup: Setup) -> float:
    """Successful requests per second over `setup.connections` kept-alive connections."""
    if tool() != "wrk":
        found = await in_own_process(url, path, setup.message_bytes, setup.seconds, connections=setup.connections)
        assert not found.errors, f"{found.errors} requests failed"
        return found.rate.per_second
    with tempfile.TemporaryDirectory(prefix="millpond-wrk-") as folder:
        script = Path(folder) / "post.lua"
        script.write_text(
            'wrk.method = "POST"\n'
            f'wrk.body = string.rep("x", {setup.message_bytes})\n'
            'wrk.headers["Content-Type"] = "application/octet-stream"\n'
        )
        process = await asyncio.create_subprocess_exec(
            "wrk", "-t", "1", "-c", str(setup.connections), "-d", f"{max(1, round(setup.seconds))}s",
            "-s", str(script), url + path, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(setup.seconds + 60):
            out, _ = await process.communicate()
    bad = _BAD.search(out)
    assert bad is None, f"{bad[1]!r} requests failed"
    rate = _RATE.search(out)
    assert rate is not None, out
    return float(rate[1])
