"""Rows of a receipt as text: `0-9,12,14-20`, ends inclusive, relative to the grant's first offset."""

from __future__ import annotations

import re
from operator import ge

import numpy as np
import numpy.typing as npt

from millpond.core.errors import BadRequest
from millpond.core.limits import RECEIPT_RANGES

_EXPECTED = f'ascending row ranges like "0-9,12", at most {RECEIPT_RANGES} of them'
_TEXT = re.compile(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", re.ASCII)
_TEXT_CHARS = RECEIPT_RANGES * 20


def runs(values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(first, last) of each run of consecutive numbers in ascending `values`."""
    breaks = np.flatnonzero(np.diff(values) != 1)
    firsts = values[np.concatenate(([0], breaks + 1))] if len(values) else values
    lasts = values[np.concatenate((breaks, [len(values) - 1]))] if len(values) else values
    return firsts, lasts


def texts_of(rows: npt.NDArray[np.int64]) -> list[str]:
    """Ascending distinct `rows`, at least one, as texts of at most RECEIPT_RANGES ranges each."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:  # one run: what a receive mostly gives
        return [f"{first}-{last}" if last > first else str(first)]
    pairs = zip(*(side.tolist() for side in runs(rows)), strict=True)
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in pairs]
    return [",".join(parts[at : at + RECEIPT_RANGES]) for at in range(0, len(parts), RECEIPT_RANGES)]


def parse(text: str, field: str) -> npt.NDArray[np.int64]:
    """Pairs of first and *end* (exclusive), flat: i64[2k]. Raises BadRequest naming `field`."""
    if len(text) > _TEXT_CHARS or _TEXT.fullmatch(text) is None or text.count(",") >= RECEIPT_RANGES:
        raise BadRequest.field(field, _EXPECTED, text[:80])
    flat: list[int] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        flat += (int(first), int(last if dash else first) + 1)
    if flat != sorted(flat) or any(map(ge, flat[::2], flat[1::2])):
        raise BadRequest.field(field, _EXPECTED, text[:80])
    return np.array(flat, np.int64)
