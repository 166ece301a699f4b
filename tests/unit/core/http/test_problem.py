from __future__ import annotations

import json

import pytest

from millpond.core.errors import ERRORS, MethodNotAllowed, NotFound, Unavailable
from millpond.core.http.problem import problem_bytes, problem_headers, raw_problem


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_error_has_a_status_and_a_problem(code: str) -> None:
    """The table of errors is complete: each code has a client or server status and the standard members."""
    cls = ERRORS[code]
    assert 400 <= cls.status <= 599
    problem = json.loads(problem_bytes(cls(code, "why"), "r-1"))
    assert {"type", "title", "status", "detail", "code", "retryable", "request_id", "errors"} <= problem.keys()
    assert (problem["code"], problem["status"], problem["request_id"]) == (code, cls.status, "r-1")


def test_extra_members_stand_beside_and_never_replace() -> None:
    """What an error carries is shown, unless it would hide a standard member."""
    problem = json.loads(problem_bytes(NotFound("topic_not_found", "why", start_offset=7, status=200), "r"))
    assert (problem["start_offset"], problem["status"]) == (7, 404)


def test_retryable_answers_say_when() -> None:
    """Retry-After is in whole seconds, at least one."""
    assert problem_headers(Unavailable("flush_behind", ""), "r")["Retry-After"] == "1"
    assert problem_headers(Unavailable("flush_behind", "", retry_after_ms=2_100), "r")["Retry-After"] == "3"


def test_405_names_what_is_allowed() -> None:
    """Allow is a header, not only text."""
    assert problem_headers(MethodNotAllowed("method_not_allowed", "", allow=["GET", "PUT"]), "r")["Allow"] == "GET, PUT"


def test_a_raw_problem_is_a_whole_answer() -> None:
    """It closes the connection and its length is right."""
    head, _, body = raw_problem(Unavailable("too_many_connections", "full")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"Connection: close" in head
    assert f"Content-Length: {len(body)}".encode() in head
