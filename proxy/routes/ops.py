"""For whoever operates it: is it alive, is it ready, what does it count.

/healthz says only that the process answers. /readyz is 503 with reasons when it should get no traffic. /metrics is
Prometheus' text format: the proxy's own counters and those of every store it can reach. Where the proxy is several
processes behind one port, whichever is asked answers for all, with a label `worker`.
"""

from __future__ import annotations

import asyncio
import re

import msgspec
from aiohttp import web

from millpond.core.errors import MillpondError
from millpond.core.http.call import answer
from millpond.core.http.routing import Route
from millpond.proxy.parts import Parts, ProxyCall
from millpond.store.client import StoreStatus

STATUS_SECONDS = 2.0  # for one store's status: a probe must not hang with it
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)(\{.*\})?$")


class Health(msgspec.Struct, frozen=True):
    status: str


class Readiness(msgspec.Struct, frozen=True):
    ready: bool
    reasons: list[str]


async def healthz(call: ProxyCall) -> web.StreamResponse:
    return answer(Health("ok"))


async def readyz(call: ProxyCall) -> web.StreamResponse:
    reasons = await _reasons(call.parts)
    headers = {"Cache-Control": "no-store"}
    return answer(Readiness(not reasons, reasons), 503 if reasons else 200, headers)


async def _reasons(parts: Parts) -> list[str]:
    reasons = []
    if not parts.catalog.fresh:
        reasons.append("metadata_unavailable: the catalog is not up to date")
    if parts.counters.snapshot().get("draining"):
        reasons.append("shutting_down: this process is stopping")
    statuses = await _statuses(parts)
    if not statuses:
        reasons.append("store_unavailable: no store is known")
    for group, status in statuses.items():
        if isinstance(status, str):
            reasons.append(f"store {group}: {status}")
            continue
        if not status.ready:
            reasons.append(f"store {group}: not ready")
        if status.disk_full:
            reasons.append(f"store {group}: disk_full")
    return reasons


async def _statuses(parts: Parts) -> dict[str, StoreStatus | str]:
    """Each store's status, or why there is none."""
    groups = list(parts.stores.clients)
    found = await asyncio.gather(*(_status(parts, group) for group in groups))
    return dict(zip(groups, found, strict=True))


async def _status(parts: Parts, group: str) -> StoreStatus | str:
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            return await parts.stores.group(group).status()
    except MillpondError as error:
        return f"{error.code}: {error.detail}"
    except TimeoutError:
        return "no answer"


async def metrics(call: ProxyCall) -> web.StreamResponse:
    values = await _own(call.parts)
    for group, status in (await _statuses(call.parts)).items():
        up = not isinstance(status, str)
        values[f'millpond_store_up{{group="{group}"}}'] = float(up)
        if isinstance(status, StoreStatus):
            numbers = {
                "epoch": status.epoch,
                "end_position_bytes": status.end_position,
                "confirmed_position_bytes": status.confirmed_position,
                "first_position_bytes": status.first_position,
                "checkpoint_position_bytes": status.checkpoint_position,
                "queues": status.queues,
                "ready": status.ready,
                "disk_full": status.disk_full,
                "quarantined_ranges": len(status.quarantined),
                **status.counters,
            }
            for name, value in numbers.items():
                values[_labelled(f"millpond_store_{name}", "group", group)] = float(value)
    return web.Response(body=exposition(values).encode(), headers={"Content-Type": METRICS_TYPE})


async def _own(parts: Parts) -> dict[str, float]:
    """This proxy's counters; of each of its processes, where there are several: they start and end by themselves, and
    a sum over them would go back when one ends."""
    if parts.siblings is None:
        return {f"millpond_proxy_{name}": value for name, value in parts.counters.snapshot().items()}
    values = {}
    for worker, numbers in (await parts.siblings()).items():
        for name, value in numbers.items():
            full = f"millpond_proxy_{name}"
            values[_labelled(full, "worker", worker) if worker else full] = value
    return values


def _labelled(name: str, label: str, text: str) -> str:
    """`name` or `name{a="b"}` with a label added."""
    bare, _, labels = name.partition("{")
    inner = labels.removesuffix("}")
    return f'{bare}{{{label}="{text}"{"," + inner if inner else ""}}}'


def exposition(values: dict[str, float]) -> str:
    """Prometheus text format 0.0.4; `*_total` are counters, all others gauges; names it would refuse are left out."""
    families: dict[str, list[str]] = {}
    for name, value in values.items():
        parsed = _LABELS.match(name)
        if parsed is not None:
            families.setdefault(parsed.group(1), []).append(f"{name} {value:.17g}")
    lines = []
    for family, samples in sorted(families.items()):
        lines.append(f"# TYPE {family} {'counter' if family.endswith('_total') else 'gauge'}")
        lines.extend(samples)
    return "\n".join(lines) + "\n"


ROUTES = [
    Route(method="GET", path="/healthz", handler=healthz, summary="Is the process alive", answer=Health),
    Route(
        method="GET",
        path="/readyz",
        handler=readyz,
        summary="Should it get traffic",
        answer=Readiness,
        statuses=(200, 503),
    ),
    Route(
        method="GET",
        path="/metrics",
        handler=metrics,
        summary="Counters for Prometheus",
        answer={"text/plain": None},
    ),
]
