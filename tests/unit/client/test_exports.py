"""What the SDK promises by name."""

from __future__ import annotations

import subprocess
import sys

import millpond.client
from millpond.client import sync


def test_exports() -> None:
    """The exported names are exactly these; to add or remove one is a decision, not an accident."""
    assert sorted(millpond.client.__all__) == [
        "BufferFull", "Closed", "Connection", "Consumer", "Delivery", "GatewayProblem", "Group", "Groups", "Lag",
        "Message", "MessageBatch", "MillpondError", "Page", "Producer", "QueueLag", "QueueSeek", "QueueState",
        "Reader", "ReceivedMessage", "Retention", "Sent", "SentRange", "Topic", "Topics", "UnknownProblem",
        "Unreachable",
    ]  # fmt: skip
    assert sync.__all__ == ["Admin", "Consumer", "Producer"]
    assert all(hasattr(millpond.client, name) for name in millpond.client.__all__)


def test_what_the_sdk_loads() -> None:
    """Importing the SDK loads no general HTTP client: it speaks over connections of its own."""
    code = "import sys, millpond.client.sync; print(sorted({'aiohttp', 'http.client', 'requests'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)  # noqa: S603 - this interpreter
    assert run.stdout == b"[]\n"
