"""A JSON request of bodies and nothing else, by columns: no object for a message is made, and a body is copied once.

Without escapes the quotes of such a request stand in a fixed order, four for each message, and what is between two
bodies is the same throughout. So the quotes are looked for, and the rest is compared. Whatever does not fit, right or
wrong, is left to `json` (None), which says the same about it.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.bodies import around
from millpond.core.http.call import Body
from millpond.core.limits import BATCH_MESSAGES
from millpond.core.schema import message_schema
from millpond.core.texts import data_of
from millpond.proxy.codec.json_columns import holds, unescaped
from millpond.proxy.incoming import Incoming

_LEAST = 400
"""Fewer messages are made one by one."""

_LEAST_BYTES = 16_384  # it has few messages, or so small ones that they are worth little

_SPACE = rb"[ \t\n\r]*"
_BEGIN = re.compile(rb'_\{_"messages"_:_\[_\{_"body"_:_"'.replace(b"_", _SPACE))
_BETWEEN = re.compile(rb'"_\}_,_\{_"body"_:_"'.replace(b"_", _SPACE))
_END = re.compile(rb'"_\}_\]_\}_'.replace(b"_", _SPACE))
_BEGIN_QUOTES, _MESSAGE_QUOTES = 2, 4  # those of `messages`; those of `body` and of its value
_QUOTES_MOST = _BEGIN_QUOTES + _MESSAGE_QUOTES * BATCH_MESSAGES
_QUOTE = ord('"')
_IN_VIEW = 12  # bytes, of which Arrow keeps as many in a view
_AT_ONCE = 256 * 1024  # bytes that are looked through: what is noted of each stays in a core's cache
_WORD_BITS = 3
_WORD = 1 << _WORD_BITS  # bytes that are asked together whether any is a quote


def bodies(body: Body) -> Incoming | None:
    """The messages' bodies, in their order; at least `_LEAST`."""
    if len(body) < _LEAST_BYTES or _BEGIN.match(body) is None or holds(body, b"\\"):
        return None
    quotes = _quotes(np.frombuffer(body, np.uint8))
    count, others = divmod(len(quotes) - _BEGIN_QUOTES, _MESSAGE_QUOTES)
    if others or not _LEAST <= count <= BATCH_MESSAGES:
        return None
    first, last = (quotes[_BEGIN_QUOTES + of :: _MESSAGE_QUOTES] for of in (2, 3))
    between = _BETWEEN.match(body, int(last[0]))
    if between is None or _END.fullmatch(body, int(last[-1])) is None or not _all_are(between[0], body, last[:-1]):
        return None
    found = _laid_out(body, first + 1, last)
    # what stands between two quotes has neither a quote nor, as nothing here, a backslash
    column = found.batch.column(0)
    return None if unescaped(column, data_of(column)) is None else found


def _laid_out(body: Body, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Incoming:
    """What stands there in `body` as a frame's payload: a column of views, put one after another in one call."""
    count = len(starts)
    lengths = (ends - starts).astype(np.int32)
    before, after, bounds = around(lengths)
    views = np.zeros((count + 2, 4), np.int32)  # length, first bytes (nobody compares them), buffer, place
    views[0, 0] = len(before)
    views[1:-1, 0] = lengths
    views[1:-1, 2] = 1
    views[1:-1, 3] = starts
    views[-1, 0] = len(after)  # zeros, which stand in the view itself
    if int(lengths.min()) <= _IN_VIEW:  # as these do
        (short,) = (lengths <= _IN_VIEW).nonzero()
        places = np.minimum(starts[short, np.newaxis] + np.arange(_IN_VIEW), len(body) - 1)
        views[short + 1, 1:] = np.frombuffer(body, np.uint8)[places].view(np.int32)
    buffers = [None, *map(pa.py_buffer, (views, before, body))]
    payload = data_of(pa.Array.from_buffers(pa.binary_view(), len(views), buffers).cast(pa.binary()))
    data = payload[len(before) : len(before) + int(bounds[-1])]
    column = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(bounds), data])
    batch = pa.RecordBatch.from_arrays([column], schema=message_schema(0))
    return Incoming(batch, 0, payload=payload, payload_size=payload.size)


def _all_are(text: bytes, body: Body, places: npt.NDArray[np.int64]) -> bool:
    """Whether `text` stands at each of the places, which ascend."""
    if int(places[-1]) + len(text) > len(body):
        return False
    windows = np.ndarray(len(body) - len(text) + 1, f"V{len(text)}", body, strides=(1,))
    return windows[places].tobytes() == text * len(places)


def _quotes(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Where they stand; of more than `_QUOTES_MOST`, only so many that it is seen."""
    whole = len(data) // _WORD * _WORD
    some = np.empty(whole // _WORD, np.bool_)
    marks = np.empty(min(whole, _AT_ONCE), np.bool_)
    for begin in range(0, whole, _AT_ONCE):
        end = min(begin + _AT_ONCE, whole)
        marked = np.equal(data[begin:end], _QUOTE, marks[: end - begin])
        np.not_equal(marked.view(np.uint64), 0, some[begin // _WORD : end // _WORD])
    words = some.nonzero()[0][: _QUOTES_MOST + 1]
    (within,) = (data[:whole].view(np.uint64)[words].view(np.uint8) == _QUOTE).nonzero()
    places = (words[within >> _WORD_BITS] << _WORD_BITS) + (within & (_WORD - 1))
    return np.concatenate([places, (data[whole:] == _QUOTE).nonzero()[0] + whole])
