"""POST /v1/topics/{topic}/groups/{group}/messages/ack: ack, nack and extend leases, any number in one append."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat
from typing import NamedTuple, cast

import msgspec
from aiohttp import web

from millpond.core.errors import BadRequest
from millpond.core.http.call import JSON, Input, answer, decode_json
from millpond.core.http.prompt import Prompt, PromptCall
from millpond.core.http.routing import Route
from millpond.core.limits import DELAY_MS_MOST, LEASE_MS_LEAST, LEASE_MS_MOST, MIB, SETTLE_ITEMS
from millpond.core.names import check_name
from millpond.proxy.parts import Parts, ProxyCall
from millpond.proxy.routes.receive import in_range, known
from millpond.proxy.settling import Action, LeaseIds, Outcomes, ReceiptRows, settle_all
from millpond.store.client import SETTLE_STATUSES, SettleStatus

BODY_BYTES = 4 * MIB  # SETTLE_ITEMS lease ids of the longest kind with room to spare


class Rows(Input, frozen=True):
    """Rows of a receive, as its `receipts` name them: `rows` like "0-9,12"."""

    receipt: str
    rows: str


class Nack(Input, frozen=True):
    """Either `lease_id`, or `receipt` and `rows`. `delay_ms`: how long until it is handed out again."""

    lease_id: str | None = None
    receipt: str | None = None
    rows: str | None = None
    delay_ms: int = 0


class Extend(Input, frozen=True):
    """Either `lease_id`, or `receipt` and `rows`. The lease then ends `lease_ms` from now."""

    lease_ms: int
    lease_id: str | None = None
    receipt: str | None = None
    rows: str | None = None


class SettleBody(Input, frozen=True):
    acks: list[str | Rows] = msgspec.field(default_factory=list)
    nacks: list[Nack] = msgspec.field(default_factory=list)
    extends: list[Extend] = msgspec.field(default_factory=list)


class Settled(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One item's result. For a receipt `settled` is how many of its rows were settled by this call.

    already: it was acked before; redelivered: its lease ended and somebody else has it; void: the group was sought
    away; unknown: no lease of this group.
    """

    status: SettleStatus
    lease_id: str | None = None
    receipt: str | None = None
    rows: str | None = None
    settled: int | None = None


class SettleAnswer(msgspec.Struct, frozen=True):
    """In the order of the request: acks, nacks, extends."""

    results: list[Settled]


async def settle(call: ProxyCall) -> web.StreamResponse:
    ids, receipts = _items(await call.json(SettleBody, BODY_BYTES))
    topic = await call.parts.catalog.topic(call.principal.tenant, check_name("topic", call.params["topic"]))
    group, _ = await call.parts.catalog.group(topic, check_name("group", call.params["group"]))
    outcomes = await settle_all(call.parts, topic, group, ids, receipts)
    return answer(_answered(call.parts, ids, receipts, outcomes))


def prompt(call: PromptCall[Parts]) -> Prompt | None:
    """Leases of a group that is known."""
    if (found := known(call)) is None:
        return None
    ids, receipts = _items(decode_json(call.body or b"{}", SettleBody))
    task = asyncio.get_running_loop().create_task(settle_all(call.parts, *found, ids, receipts), name="settle")
    return Prompt(task, lambda outcomes: msgspec.json.encode(_answered(call.parts, ids, receipts, outcomes)), JSON)


def _answered(parts: Parts, ids: list[LeaseIds], receipts: list[ReceiptRows], outcomes: Outcomes) -> SettleAnswer:
    parts.counters.add("settled_items_total", sum(len(named.ids) for named in ids) + len(receipts))
    settled = [_settled(named, statuses) for named, statuses in zip(ids, outcomes.ids, strict=True)]
    if len(settled) == 1 and not receipts:
        return SettleAnswer(settled[0])  # in order, as it is
    results: dict[int, Settled] = {}
    for named, some in zip(ids, settled, strict=True):
        results.update(zip(named.numbers, some, strict=True))
    for one, (status, rows) in zip(receipts, outcomes.receipts, strict=True):
        results[one.number] = Settled(SETTLE_STATUSES[status], receipt=one.receipt, rows=one.rows, settled=rows)
    return SettleAnswer([results[number] for number in range(len(results))])


def _settled(named: LeaseIds, statuses: bytes) -> list[Settled]:
    return list(map(Settled, map(SETTLE_STATUSES.__getitem__, statuses), named.ids))


def _items(body: SettleBody) -> tuple[list[LeaseIds], list[ReceiptRows]]:
    """All items, lease ids that are settled alike together. Raises BadRequest naming the first bad one."""
    count = len(body.acks) + len(body.nacks) + len(body.extends)
    if count > SETTLE_ITEMS:
        raise BadRequest.field("acks", f"at most {SETTLE_ITEMS} items in one call", count)
    for number, nack in enumerate(body.nacks):
        in_range(f"nacks[{number}].delay_ms", nack.delay_ms, 0, DELAY_MS_MOST)
    for number, extend in enumerate(body.extends):
        in_range(f"extends[{number}].lease_ms", extend.lease_ms, LEASE_MS_LEAST, LEASE_MS_MOST)
    if not body.nacks and not body.extends and set(map(type, body.acks)) == {str}:  # mostly; nobody looks at each
        return [LeaseIds("ack", 0, cast(list[str], body.acks), list(range(count)))], []
    acks = (
        _Item("ack", 0, one) if isinstance(one, str) else _Item("ack", 0, one.receipt, one.rows) for one in body.acks
    )
    nacks = map(_named, repeat("nacks"), range(len(body.nacks)), body.nacks)
    extends = map(_named, repeat("extends"), range(len(body.extends)), body.extends)
    alike: dict[tuple[Action, int], LeaseIds] = {}
    receipts: list[ReceiptRows] = []
    for number, item in enumerate(chain(acks, nacks, extends)):
        if item.rows is None:
            named = alike.setdefault((item.action, item.delay_ms), LeaseIds(item.action, item.delay_ms, [], []))
            named.ids.append(item.token)
            named.numbers.append(number)
        else:
            receipts.append(ReceiptRows(item.action, item.delay_ms, item.token, item.rows, number))
    return list(alike.values()), receipts


class _Item(NamedTuple):
    """`rows` None: `token` is a lease id, else a receipt."""

    action: Action
    delay_ms: int
    token: str
    rows: str | None = None


def _named(where: str, number: int, one: Nack | Extend) -> _Item:
    action: Action = "nack" if isinstance(one, Nack) else "extend"
    delay_ms = one.delay_ms if isinstance(one, Nack) else one.lease_ms
    if one.lease_id is not None and one.receipt is None and one.rows is None:
        return _Item(action, delay_ms, one.lease_id)
    if one.lease_id is None and one.receipt is not None and one.rows is not None:
        return _Item(action, delay_ms, one.receipt, one.rows)
    raise BadRequest.field(f"{where}[{number}]", "either lease_id, or receipt and rows")


ROUTES = [
    Route(
        method="POST",
        path="/v1/topics/{topic}/groups/{group}/messages/ack",
        handler=settle,
        summary="Settle messages",
        description="Acks, nacks and extends leases of this group, made by any proxy. Results stand in request order.",
        body={"application/json": SettleBody},
        answer=SettleAnswer,
        scope="consume",
        prompt=prompt,
        tag="consume",
    )
]
