"""The blocking client: retries that cannot repeat a deed, problems by code, connections that went idle."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from millpond.client.errors import Unreachable
from millpond.core.errors import OffsetExpired
from millpond.spark.http import HttpClient, path_of
from millpond.spark.plan import fetch_plan


def test_problems_come_out_by_code(service: Any, pond: Any) -> None:
    """An error answer is the error of its code, with what stands beside it."""
    pond.start[0] = 10
    with HttpClient(service.url) as client, pytest.raises(OffsetExpired) as caught:
        client.call("GET", path_of("topics", "pond", "queues", 0, "messages"), query={"offset": 1, "limit": 1})
    assert caught.value.extra["start_offset"] == 10


def test_nobody_there() -> None:
    """A port where nobody listens is Unreachable once the time to retry is over."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with HttpClient(url, retry_seconds=0.2) as client, pytest.raises(Unreachable, match="does not answer"):
            fetch_plan(client, "pond")


def test_an_idle_connection_that_was_closed(service: Any, pond: Any) -> None:
    """A kept connection that the service has closed is no failure: the call goes out on a new one."""
    with HttpClient(service.url, retry_seconds=0) as client:
        assert fetch_plan(client, "pond").topic_id == 1
        assert client._connection is not None
        client._connection.sock.shutdown(socket.SHUT_RDWR)
        assert fetch_plan(client, "pond").topic_id == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://"])
def test_bad_addresses(url: str) -> None:
    """What is no HTTP address is refused at once."""
    with pytest.raises(ValueError, match="url: expected"):
        HttpClient(url)


def test_paths_are_encoded() -> None:
    """No part of a path can leave its segment."""
    assert path_of("topics", "a/b ?", 3) == "/v1/topics/a%2Fb%20%3F/3"
