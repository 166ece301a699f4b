"""What an answer of HTTP/1.1 says of itself: its status line, its headers, the length of its body, its chunks.

Everything here raises ValueError, with a text to stand behind "an answer that is not HTTP: ". Numbers are taken only
as RFC 9112 writes them: `int` would also take "-1", "+1", "1_0" and " 1 ", and two readers of one connection that
disagree about a length read different answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from millpond.core import limits

_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_FRAMING = frozenset({"content-length", "transfer-encoding"})
_KNOWN_HEADS = 256  # remembered, the last used; each of at most
_KNOWN_BYTES = 512


class Head(NamedTuple):
    """Header names in lower case; of a header that stands there twice, the last. `ends`: no more answers follow."""

    status: int
    headers: Mapping[str, str]
    ends: bool


def head_of(data: bytes) -> Head:
    """`data` without the empty line. Most come more than once: answers of one second differ in little but their
    length."""
    return _head_again(data) if len(data) <= _KNOWN_BYTES else _head(data)


@lru_cache(_KNOWN_HEADS)
def _head_again(data: bytes) -> Head:
    return _head(data)


def _head(data: bytes) -> Head:
    first, *lines = data.decode("latin-1").split("\r\n")
    found = _STATUS_LINE.fullmatch(first)
    if found is None:
        raise ValueError(repr(first[:40]))
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or " " in name or "\t" in name or "\n" in line or "\r" in line:
            raise ValueError(f"a header {line[:40]!r}")
        if name in _FRAMING and name in headers:
            raise ValueError(f"{name} twice")
        headers[name] = value.strip(" \t")
    said = headers.get("connection", "").lower()
    ends = "close" in said if found[1] == "1" else "keep-alive" not in said
    return Head(int(found[2]), MappingProxyType(headers), ends)


def length_of(head: Head, most: int) -> int | None:
    """Bytes of the body; None: it comes in chunks, or up to the end of the connection."""
    text, coding = head.headers.get("content-length"), head.headers.get("transfer-encoding")
    if coding is not None:
        if text is not None or coding.lower() != "chunked":
            raise ValueError(f"transfer-encoding {coding[:40]!r}, content-length {str(text)[:20]!r}")
        return None
    if text is None:
        if not head.ends:  # an answer cut short would be a shorter one, and where it is not, all wait for more
            raise ValueError("it has no length, and its connection stays")
        return None
    if not _LENGTH.fullmatch(text):
        raise ValueError(f"a body of {text[:20]!r} bytes")
    if int(text) > most:
        raise ValueError(f"a body of {text} bytes, at most {most}")
    return int(text)


class Chunks:
    """A body in chunks (RFC 9112 7.1) of `most` bytes in all; extensions and trailers are passed over.

    After the end, `rest` is what came behind it.
    """

    def __init__(self, most: int) -> None:
        self.body = bytearray()
        self.rest = bytearray()
        self._most = most
        self._trailers = False

    def feed(self, data: bytes) -> bool:
        """Whether that was the end."""
        rest = self.rest
        rest += data
        while True:
            end = rest.find(b"\r\n")
            if end < 0:
                if len(rest) > limits.CLIENT_HEAD_BYTES:
                    raise ValueError("a chunk without a size")
                return False
            if self._trailers:
                del rest[: end + 2]
                if end == 0:
                    return True
                continue
            size = self._size(bytes(rest[:end]))
            if size and len(rest) < end + size + 4:
                return False
            self._take(end + 2, size)

    def _size(self, line: bytes) -> int:
        text = line.partition(b";")[0]
        if not _CHUNK_SIZE.fullmatch(text):
            raise ValueError(f"a chunk of {text[:20]!r} bytes")
        if len(self.body) + int(text, 16) > self._most:
            raise ValueError(f"chunks of more than {self._most} bytes")
        return int(text, 16)

    def _take(self, begin: int, size: int) -> None:
        rest = self.rest
        if size == 0:
            self._trailers = True
            del rest[:begin]
            return
        if rest[begin + size : begin + size + 2] != b"\r\n":
            raise ValueError("a chunk that is longer than its size")
        self.body += rest[begin : begin + size]
        del rest[: begin + size + 2]
