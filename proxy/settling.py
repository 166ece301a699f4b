"""From what a settle call names to `Settle`s by columns, and back to a status for each.

Lease ids are split into token and row, many of them by columns; each distinct token is verified once; ids of one token,
action and delay become one `Settle`. A receipt with its ranges is one by itself. An id that was said twice is sent
once: the repeat is `already` when the first was `ok`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.limits import CALL_MS
from millpond.metadata.client import GroupInfo, QueueInfo, TopicInfo
from millpond.proxy import row_ranges
from millpond.proxy.grants import group_ref
from millpond.proxy.parts import Parts
from millpond.proxy.receipts import Lease
from millpond.store.client import SETTLE_STATUSES, Settle, SettleOutcome, SettleRequest

Action = Literal["ack", "nack", "extend"]

_ALREADY = SETTLE_STATUSES.index("already")
_OK = SETTLE_STATUSES.index("ok")
_UNKNOWN = SETTLE_STATUSES.index("unknown")
_ROW_CHARS = 9
FEW_IDS = 128
"""Up to so many are taken one by one: 15 us for one id, 130 for 64 and 270 for 128, where columns take 110, 160 and
200, and more than that when they have not run just before."""


class LeaseIds(NamedTuple):
    """Lease ids that are settled alike. `delay_ms` as in `Settle`. `numbers`: which items of the call they are."""

    action: Action
    delay_ms: int
    ids: list[str]
    numbers: list[int]


class ReceiptRows(NamedTuple):
    """`rows` of a receipt; `number`: which item of the call it is."""

    action: Action
    delay_ms: int
    receipt: str
    rows: str
    number: int


class Outcomes(NamedTuple):
    """What became of them. `ids`: for each of the `LeaseIds` a status, as an index into SETTLE_STATUSES, for each id.
    `receipts`: for each a status likewise, and how many rows were settled now."""

    ids: list[bytes]
    receipts: list[tuple[int, int]]


class _Part(NamedTuple):
    """One `Settle`, and `place`: puts its outcome into the results."""

    queue: QueueInfo
    settle: Settle
    place: Callable[[SettleOutcome], None]


async def settle_all(
    parts: Parts, topic: TopicInfo, group: GroupInfo, ids: Sequence[LeaseIds], receipts: Sequence[ReceiptRows]
) -> Outcomes:
    """Tokens that are not of this group are `unknown`.

    Raises BadRequest naming rows that are no ranges, Unavailable when a store cannot be reached (settling the same
    again is harmless).
    """
    ranges = [row_ranges.parse(one.rows, f"item {one.number}: rows") for one in receipts]
    split = [(_FewIds if len(one.ids) <= FEW_IDS else _ManyIds)(one) for one in ids]
    tokens = [token for some in split for token in some.tokens] + [one.receipt for one in receipts]
    leases = iter(await _leases(parts, topic, group, tokens))
    work = [part for some in split for part in some.by_lease(list(islice(leases, len(some.tokens))), topic)]
    settled = [(_UNKNOWN, 0)] * len(receipts)
    for number, (one, pairs, lease) in enumerate(zip(receipts, ranges, leases, strict=True)):
        if lease is not None:
            settle = _settle(lease, one, ranges=pa.py_buffer((pairs + lease.base).tobytes()))
            work.append(_Part(_queue(topic, lease), settle, partial(_place_rows, settled, number)))
    await _send(parts, topic, group, work)
    return Outcomes([bytes(some.statuses) for some in split], settled)


async def _leases(parts: Parts, topic: TopicInfo, group: GroupInfo, tokens: list[str]) -> list[Lease | None]:
    """The lease of each token; None also for those of another tenant, topic or group."""
    distinct = list(dict.fromkeys(tokens))
    whose = (topic.tenant_id, topic.topic_id, group.group_id)
    read = await parts.tokens.read(distinct)
    queues = {queue.queue_id for queue in topic.queues}
    known = {
        token: lease
        for token, lease in zip(distinct, read, strict=True)
        if lease is not None and lease[:3] == whose and lease.queue_id in queues
    }
    return [known.get(token) for token in tokens]


class _FewIds:
    """One by one. `statuses`: of each id, once what `by_lease` gave is placed."""

    def __init__(self, named: LeaseIds) -> None:
        self._named = named
        self.statuses = bytearray((_UNKNOWN,)) * len(named.ids)
        tokens: dict[str, int] = {}
        self._good: list[tuple[int, int, int]] = []  # number, token, row
        for number, text in enumerate(named.ids):
            token, _, row = text.rpartition(".")
            if _is_row(row):
                self._good.append((number, tokens.setdefault(token, len(tokens)), int(row)))
        self.tokens = list(tokens)

    def by_lease(self, leases: list[Lease | None], topic: TopicInfo) -> list[_Part]:
        """One part for all ids of the same lease, in order of their first appearance. `leases`: of each of `tokens`."""
        named: dict[Lease, list[tuple[int, int]]] = {}
        for number, token, row in self._good:
            lease = leases[token]
            if lease is not None:
                named.setdefault(lease, []).append((number, lease.base + row))
        parts = []
        for lease, some in named.items():
            offsets = sorted({offset for _, offset in some})
            settle = _settle(lease, self._named, offsets=pa.py_buffer(array("q", offsets).tobytes()))
            parts.append(_Part(_queue(topic, lease), settle, partial(self._place, some, offsets)))
        return parts

    def _place(self, some: list[tuple[int, int]], offsets: list[int], outcome: SettleOutcome) -> None:
        """The status of each of `offsets` to `some`: (number of an id, its offset)."""
        statuses = dict(zip(offsets, bytes(outcome.statuses), strict=True))
        for number, offset in some:
            self.statuses[number] = statuses[offset]
            if statuses[offset] == _OK:
                statuses[offset] = _ALREADY


class _ManyIds:
    """As `_FewIds`, by columns."""

    def __init__(self, named: LeaseIds) -> None:
        self._named = named
        self.statuses = np.full(len(named.ids), _UNKNOWN, np.uint8)
        self.tokens, self._token, self._row = _split(named.ids)

    def by_lease(self, leases: list[Lease | None], topic: TopicInfo) -> list[_Part]:
        known = np.array([lease is not None for lease in leases], np.bool_)
        valid = np.flatnonzero(known[self._token])
        order = np.argsort(self._token[valid], kind="stable")
        bounds = np.flatnonzero(np.diff(self._token[valid][order], prepend=-1))
        parts = []
        for some in np.split(valid[order], bounds[1:]) if len(valid) else []:
            lease = leases[self._token[some[0]]]
            assert lease is not None
            offsets, first, inverse = np.unique(lease.base + self._row[some], return_index=True, return_inverse=True)
            repeats = np.ones(len(some), np.bool_)
            repeats[first] = False
            settle = _settle(lease, self._named, offsets=pa.py_buffer(offsets.tobytes()))
            parts.append(_Part(_queue(topic, lease), settle, partial(self._place, some, inverse, repeats)))
        return parts

    def _place(
        self,
        some: npt.NDArray[np.int64],
        inverse: npt.NDArray[np.int64],
        repeats: npt.NDArray[np.bool_],
        outcome: SettleOutcome,
    ) -> None:
        statuses = np.frombuffer(outcome.statuses, np.uint8)[inverse]
        self.statuses[some] = np.where(repeats & (statuses == _OK), _ALREADY, statuses)


def _split(ids: list[str]) -> tuple[list[str], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(distinct tokens, each id's token, each id's row). What is no token, dot and number has an empty token, which is
    nobody's."""
    token, dot, _ = ids[0].rpartition(".")
    begin = token + dot
    rows = [text.removeprefix(begin) for text in ids]
    all_begin_so = sum(map(len, ids)) - sum(map(len, rows)) == len(ids) * len(begin)
    if all_begin_so and _are_rows(rows):  # of one grant, as in most calls
        return [token], np.zeros(len(ids), np.int64), _numbers(rows)
    tokens = []
    for number, text in enumerate(ids):
        token, _, row = text.rpartition(".")
        good = _is_row(row)
        tokens.append(token if good else "")
        rows[number] = row if good else "0"
    distinct = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return list(distinct), np.fromiter(map(distinct.__getitem__, tokens), np.int64, len(ids)), _numbers(rows)


def _are_rows(texts: list[str]) -> bool:
    digits = "".join(texts)
    return digits.isascii() and digits.isdigit() and "" not in texts and len(max(texts, key=len)) <= _ROW_CHARS


def _numbers(texts: list[str]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(int, texts), np.int64, len(texts))


def _is_row(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _ROW_CHARS


def _place_rows(settled: list[tuple[int, int]], number: int, outcome: SettleOutcome) -> None:
    settled[number] = bytes(outcome.statuses)[0], outcome.rows


def _settle(lease: Lease, named: LeaseIds | ReceiptRows, **what: pa.Buffer) -> Settle:
    """Of `offsets` or `ranges`."""
    return Settle(lease.queue_id, lease.generation, lease.lease, named.action, delay_ms=named.delay_ms, **what)


def _queue(topic: TopicInfo, lease: Lease) -> QueueInfo:
    return next(queue for queue in topic.queues if queue.queue_id == lease.queue_id)


async def _send(parts: Parts, topic: TopicInfo, group: GroupInfo, work: list[_Part]) -> None:
    """One call a store, all at once; outcomes go where they belong."""
    by_group: dict[str, list[_Part]] = defaultdict(list)
    for one in work:
        by_group[one.queue.spans[-1].store_group].append(one)

    async def send(name: str, some: list[_Part]) -> None:
        request = SettleRequest(
            group_ref(topic, group), [one.settle for one in some], topic.settings.durability, CALL_MS
        )
        result = await parts.stores.group(name).settle(request)
        for one, outcome in zip(some, result.outcomes, strict=True):
            one.place(outcome)

    calls = [send(name, some) for name, some in by_group.items()]
    if len(calls) == 1:
        await calls[0]  # the usual case: a task of its own would cost as much as the rest of this
    else:
        await asyncio.gather(*calls)
