"""Heads that come again: on a kept connection a client mostly sends the head of its last request once more, byte for
byte but for the length of the body. Such a head need not be parsed (`connection.py`), which is a fifth of what a
request with one message costs.

    POST /v1/topics/t/messages HTTP/1.1 .. Content-Length: 1024 .. CR LF CR LF  body
    `------------------- before -----------------------'digits`--- behind ---'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from aiohttp.http import RawRequestMessage

from millpond.core.http.prompt import PROMPT_BYTES
from millpond.core.http.routing import Found

HEAD_BYTES = 2_048  # longer ones are not remembered: each connection keeps one
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)\r\n", re.IGNORECASE)
_DIGITS_MOST = len(str(PROMPT_BYTES))


class Again(NamedTuple):
    """A head as it may come again, and what was found in it. `headers` say the length of the first body."""

    before: bytes
    behind: bytes
    found: Found
    headers: Mapping[str, str]

    def body_of(self, data: bytes) -> bytes | None:
        """The body, when `data` is this head and a whole body, and nothing else."""
        if not data.startswith(self.before) or len(data) > PROMPT_BYTES:
            return None
        begin = len(self.before)
        end = data.find(b"\r", begin, begin + _DIGITS_MOST + 1)
        if end < 0 or not data.startswith(self.behind, end):
            return None
        digits, body = data[begin:end], data[end + len(self.behind) :]
        return body if digits.isdigit() and len(body) == int(digits) else None


def again_of(found: Found, message: RawRequestMessage, data: bytes, body: bytes) -> Again | None:
    """What `data`, of which a parser has made this message and body, may be remembered by; None when it is not certain
    that it was all of the head, the body, and nothing else."""
    size = len(data) - len(body)
    if not 0 < size <= HEAD_BYTES or message.upgrade:
        return None
    head = data[:size]
    lengths = list(_LENGTH.finditer(head))
    first = f"{message.method} {message.path} HTTP/1.1\r\n".encode("utf-8", "surrogateescape")
    whole = (
        head.startswith(first)
        and head.find(b"\r\n\r\n") == size - 4
        and head.count(b"\r\n") == len(message.raw_headers) + 2
        and len(lengths) == 1
        and int(lengths[0][1]) == len(body)
    )
    if not whole:
        return None
    begin, end = lengths[0].span(1)
    return Again(head[:begin], head[end:], found, message.headers)
