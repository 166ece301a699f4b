"""POST /v1/topics/{topic}/groups/{group}/messages/ack: ack, nack and extend leases, any number in one append."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat

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
from millpond.proxy.settling import Action, Item, Result, settle_items
from millpond.store.client import SettleStatus

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


class Settled(msgspec.Struct, frozen=True, omit_defaults=True):
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
    body = await call.json(SettleBody, BODY_BYTES)
    items = _items(body)
    topic = await call.parts.catalog.topic(call.principal.tenant, check_name("topic", call.params["topic"]))
    group, _ = await call.parts.catalog.group(topic, check_name("group", call.params["group"]))
    results = await settle_items(call.parts, topic, group, items)
    return answer(_answered(call.parts, items, results))


def prompt(call: PromptCall[Parts]) -> Prompt | None:
    """Leases of a group that is known."""
    if (found := known(call)) is None:
        return None
    items = _items(decode_json(call.body or b"{}", SettleBody))
    work = settle_items(call.parts, *found, items)
    task = asyncio.get_running_loop().create_task(work, name="settle")
    return Prompt(task, lambda results: msgspec.json.encode(_answered(call.parts, items, results)), JSON)


def _answered(parts: Parts, items: list[Item], results: list[Result]) -> SettleAnswer:
    parts.counters.add("settled_items_total", len(items))
    return SettleAnswer(
        [
            Settled(status, lease_id=item.token)
            if item.rows is None
            else Settled(status, receipt=item.token, rows=item.rows, settled=rows)
            for item, (status, rows) in zip(items, results, strict=True)
        ]
    )


def _items(body: SettleBody) -> list[Item]:
    """All items in order. Raises BadRequest naming the first bad one."""
    count = len(body.acks) + len(body.nacks) + len(body.extends)
    if count > SETTLE_ITEMS:
        raise BadRequest.field("acks", f"at most {SETTLE_ITEMS} items in one call", count)
    for number, nack in enumerate(body.nacks):
        in_range(f"nacks[{number}].delay_ms", nack.delay_ms, 0, DELAY_MS_MOST)
    for number, extend in enumerate(body.extends):
        in_range(f"extends[{number}].lease_ms", extend.lease_ms, LEASE_MS_LEAST, LEASE_MS_MOST)
    acks = (
        Item("ack", 0, one, None) if isinstance(one, str) else Item("ack", 0, one.receipt, one.rows)
        for one in body.acks
    )
    nacks = map(_named, repeat("nacks"), range(len(body.nacks)), body.nacks)
    extends = map(_named, repeat("extends"), range(len(body.extends)), body.extends)
    return list(chain(acks, nacks, extends))


def _named(where: str, number: int, one: Nack | Extend) -> Item:
    action: Action = "nack" if isinstance(one, Nack) else "extend"
    delay_ms = one.delay_ms if isinstance(one, Nack) else one.lease_ms
    if one.lease_id is not None and one.receipt is None and one.rows is None:
        return Item(action, delay_ms, one.lease_id, None)
    if one.lease_id is None and one.receipt is not None and one.rows is not None:
        return Item(action, delay_ms, one.receipt, one.rows)
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
