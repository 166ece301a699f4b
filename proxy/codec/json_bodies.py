"""A JSON request of bodies and nothing else, by columns: no object for a message is made, and a body is copied once.

Without escapes the quotes of such a request stand in a fixed order, four for each message, and what is between two
bodies is the same throughout. So the quotes are looked for, and the rest is compared. Whatever does not fit, right or
wrong, is left to `json` (None), which says the same about it.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa

from millpond.core.http.call import Body
from millpond.core.limits import BATCH_MESSAGES
from millpond.proxy.codec.json_columns import data_of, plain

_LEAST = 400
"""Fewer messages are made one by one."""

_LEAST_BYTES = 16_384  # it has few messages, or so small ones that they are worth little

_SPACE = rb"[ \t\n\r]*"
_BEGIN = re.compile(rb'_\{_"messages"_:_\[_\{_"body"_:_"'.replace(b"_", _SPACE))
_BETWEEN = re.compile(rb'"_\}_,_\{_"body"_:_"'.replace(b"_", _SPACE))
_END = re.compile(rb'"_\}_\]_\}_'.replace(b"_", _SPACE))
_BEGIN_QUOTES, _MESSAGE_QUOTES = 2, 4  # those of `messages`; those of `body` and of its value


def bodies(body: Body) -> pa.BinaryArray | None:
    """The messages' bodies, in their order; at least `_LEAST`."""
    if len(body) < _LEAST_BYTES or b"\\" in bytes(body[:_LEAST_BYTES]) or _BEGIN.match(body) is None:
        return None
    is_quote = np.frombuffer(body, np.uint8) == ord('"')
    count, others = divmod(int(np.count_nonzero(is_quote)) - _BEGIN_QUOTES, _MESSAGE_QUOTES)
    if others or not _LEAST <= count <= BATCH_MESSAGES:
        return None  # before a position of 8 bytes is kept for each byte of what is nothing but quotes
    quotes = np.flatnonzero(is_quote)
    first, last = (quotes[_BEGIN_QUOTES + of :: _MESSAGE_QUOTES] for of in (2, 3))
    between = _BETWEEN.match(body, int(last[0]))
    if between is None or _END.fullmatch(body, int(last[-1])) is None:
        return None
    bounds = np.empty(2 * count, np.int32)
    bounds[::2] = first + 1
    bounds[1::2] = last
    parts = pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(body)])
    rows = np.arange(len(bounds))
    # four quotes each: if all together are the same as the first so often, each is
    if not data_of(parts.take(pa.array(rows[1:-1:2]))).equals(pa.py_buffer(between[0] * (count - 1))):
        return None
    found = parts.take(pa.array(rows[::2]))
    return None if plain(found) is None else found
