"""Heads that come again: on a kept connection a client mostly sends the head of its last request once more, byte for
byte but for the length of the body, and now and then the target, or the value of one header. Such a head need not be
parsed (`connection.py`), which is a fifth of what a request with one message costs. Of a large body only the first
bytes stand behind the head; where the route takes large ones promptly, the rest may follow.

    POST /v1/topics/t/messages HTTP/1.1 .. Content-Length: 1024 .. CR LF CR LF  body
    `---'---- target ---------'------ between ------------'digits`--- behind ---'

and where a header varies (`Route.varies`), when it stands before the length:

    POST /v1/topics/t/messages HTTP/1.1 .. Millpond-Producer: {..} CR LF .. Content-Length: 1024 .. CR LF CR LF  body
    `---'---- target ---------'------------ between ---------'value`------ middle ----------'digits`--- behind ---'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp.http import RawRequestMessage

from millpond.core.http.prompt import PROMPT_BYTES
from millpond.core.http.routing import Found
from millpond.core.http.straight import STRAIGHT_BYTES_MOST
from millpond.core.limits import TARGET_CHARS

HEAD_BYTES = 2_048  # longer ones are not remembered, one for each connection; another target adds TARGET_CHARS
VALUE_BYTES = 512  # .. and another value so many
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)\r\n", re.IGNORECASE)
_DIGITS_MOST = len(str(STRAIGHT_BYTES_MOST))
_PLAIN = re.compile(rb"(?:/[A-Za-z0-9_.~-]+)+")  # targets of which a parser makes nothing else
_VALUE = re.compile(rb"[!-~](?:[ -~]*[!-~])?")  # .. and values


class Taken(msgspec.Struct, frozen=True):
    """A request as it was found in its bytes. `body`: what is there of the `size` bytes of its body; `headers` say the
    length of an earlier one; `seen`: see `PromptCall`."""

    found: Found
    size: int
    body: bytes
    headers: Mapping[str, str]
    seen: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Again:
    """A head as it may come again, and what was found in it. Where a header varies `varied` makes the headers with
    another value of it; else there is no `middle`."""

    method: bytes
    target: bytes
    between: bytes
    middle: bytes
    behind: bytes
    found: Found
    headers: Mapping[str, str]
    varied: Callable[[str], Mapping[str, str]] | None = None
    seen: dict[str, Any] = field(default_factory=dict)

    def taken_from(self, data: bytes, find: Callable[[str, str], Found | None]) -> Taken | None:
        """What is asked for when `data` is this head and a whole body, or the beginning of a large one, and nothing
        else; `find(method, target)` looks up another target than the last one."""
        method, between = self.method, self.between
        if not data.startswith(method):
            return None
        end = data.find(b" ", len(method), len(method) + TARGET_CHARS + 1)
        begin = end + len(between)
        if end < 0 or not data.startswith(between, end):
            return None
        headers, seen = self.headers, self.seen
        if self.varied is not None:
            end_of_value = data.find(b"\r", begin, begin + VALUE_BYTES + 1)
            value = data[begin:end_of_value]
            if end_of_value < 0 or not data.startswith(self.middle, end_of_value) or not _VALUE.fullmatch(value):
                return None
            headers, seen = self.varied(value.decode()), {}
            begin = end_of_value + len(self.middle)
        end_of_digits = data.find(b"\r", begin, begin + _DIGITS_MOST + 1)
        if end_of_digits < 0 or not data.startswith(self.behind, end_of_digits):
            return None
        digits, there = data[begin:end_of_digits], len(data) - end_of_digits - len(self.behind)
        if not digits.isdigit():
            return None
        size = int(digits)
        comes = there < size
        if there > size or (not comes and len(data) > PROMPT_BYTES):
            return None
        found: Found | None = self.found
        target = data[len(method) : end]
        if target != self.target:
            found = find(method[:-1].decode(), target.decode()) if _PLAIN.fullmatch(target) else None
        if found is None or (comes and not found[0].large):
            return None
        return Taken(found, size, data[len(data) - there :], headers, seen)


def again_of(
    found: Found, message: RawRequestMessage, data: bytes, there: int, length: int, seen: dict[str, Any]
) -> Again | None:
    """What `data`, of which a parser has made this message and a body of `length`, may be remembered by; None when it
    is not certain that it was all of the head, the first bytes of the body (as many as are `there`), and no more.
    `seen`: what handlers have found in its headers."""
    size = len(data) - there
    if not 0 < size <= HEAD_BYTES or message.upgrade or len(message.path) > TARGET_CHARS:
        return None
    head = data[:size]
    lengths = list(_LENGTH.finditer(head))
    method, target = f"{message.method} ".encode(), message.path.encode("utf-8", "surrogateescape")
    whole = (
        head.startswith(method + target + b" HTTP/1.1\r\n")
        and head.find(b"\r\n\r\n") == size - 4
        and head.count(b"\r\n") == len(message.raw_headers) + 2
        and len(lengths) == 1
        and int(lengths[0][1]) == length
    )
    if not whole:
        return None
    begin, end = lengths[0].span(1)
    at, behind, headers, varies = len(method) + len(target), head[end:], message.headers, found[0].varies
    values = list(re.finditer(rb"\r\n%b:[ \t]*([^\r]*)" % varies.encode(), head, re.IGNORECASE)) if varies else []
    if len(values) != 1 or values[0].end() > begin:
        return Again(method, target, head[at:begin], b"", behind, found, headers, seen=seen)
    first, last = values[0].span(1)

    def varied(value: str) -> Mapping[str, str]:
        others = headers.copy()
        others[varies] = value
        return others

    return Again(method, target, head[at:first], head[last:begin], behind, found, headers, varied)
