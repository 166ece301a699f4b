"""Replay plans and how far each has come. Each function runs in the caller's transaction.

The rows only report: what was published exactly once is known by the target's producer sessions, not here. So a late
report of a killed job must not turn progress back: offsets only grow, and `done` is final.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
from sqlalchemy import Connection, Row, select

from millpond.core import limits
from millpond.core.errors import BadRequest, Conflict, NotFound
from millpond.core.names import check_name
from millpond.metadata.catalog import find_tenant
from millpond.metadata.client import ReplayInfo, ReplayPlan
from millpond.metadata.head import lock
from millpond.metadata.tables import REPLAYS, TENANTS

State = Literal["planned", "running", "done", "failed"]


def put_replay(connection: Connection, plan: ReplayPlan) -> tuple[ReplayInfo, bool]:
    """Create it (True), or the one there is when the same was asked for; else Conflict(replay_differs)."""
    check_name("replay_id", plan.replay_id)
    lock(connection)
    key = {"tenant_id": plan.tenant_id, "replay_id": plan.replay_id}
    there = connection.execute(select(REPLAYS).filter_by(**key)).one_or_none()
    if there is not None:
        info = _replay_info(there)
        if _asked(info.plan) != _asked(plan):
            raise Conflict("replay_differs", f"replay {plan.replay_id} exists with another plan")
        return info, False
    if connection.execute(select(TENANTS.c.name).filter_by(tenant_id=plan.tenant_id)).scalar() is None:
        raise BadRequest.field("tenant_id", "a tenant that exists", plan.tenant_id)
    values = {
        "plan": msgspec.json.encode(plan).decode(),
        "state": "planned",
        "progress": "{}",
        "read": 0,
        "published": 0,
        "detail": "",
        "version": 1,
    }
    made = REPLAYS.insert().values(**key, **values).returning(*REPLAYS.c)
    return _replay_info(connection.execute(made).one()), True


def replay(connection: Connection, tenant: str, replay_id: str) -> ReplayInfo:
    return _replay_info(_row(connection, tenant, replay_id))


def replays(connection: Connection, tenant: str) -> list[ReplayInfo]:
    """All of a tenant, by id."""
    own = select(REPLAYS).join(TENANTS).where(TENANTS.c.name == tenant).order_by(REPLAYS.c.replay_id)
    return [_replay_info(row) for row in connection.execute(own)]


def update_replay(
    connection: Connection,
    tenant: str,
    replay_id: str,
    state: str,
    progress: dict[int, int],
    read: int,
    published: int,
    detail: str,
) -> ReplayInfo:
    """Report the state of a job; version + 1. A replay that is done stays as it is."""
    if state not in get_args(State):
        raise BadRequest.field("state", f"one of {', '.join(get_args(State))}", state)
    if read < 0 or published < 0:
        raise BadRequest.field("read, published", "counts of messages", (read, published))
    there = _replay_info(_row(connection, tenant, replay_id, locked=True))
    if there.state == "done":
        return there
    ahead = {queue: max(offset, there.progress.get(queue, offset)) for queue, offset in progress.items()}
    values = {
        "state": state,
        "progress": msgspec.json.encode({**there.progress, **ahead}).decode(),
        "read": read,
        "published": published,
        "detail": "".join(c if c.isprintable() else " " for c in detail[: limits.DETAIL_CHARS]),
        "version": REPLAYS.c.version + 1,
    }
    same = (REPLAYS.c.tenant_id == there.plan.tenant_id) & (REPLAYS.c.replay_id == replay_id)
    updated = REPLAYS.update().where(same).values(values).returning(*REPLAYS.c)
    return _replay_info(connection.execute(updated).one())


def _row(connection: Connection, tenant: str, replay_id: str, *, locked: bool = False) -> Row[*tuple[object, ...]]:
    check_name("replay_id", replay_id)
    tenant_id = find_tenant(connection, tenant)
    found = select(REPLAYS).filter_by(tenant_id=tenant_id, replay_id=replay_id)
    row = connection.execute(found.with_for_update() if locked else found).one_or_none()
    if row is None:
        raise NotFound("replay_not_found", f"no replay {replay_id}")
    return row


def _asked(plan: ReplayPlan) -> ReplayPlan:
    """What was asked for: without what follows from the moment of asking."""
    return msgspec.structs.replace(plan, ranges={}, created_ms=0)


def _replay_info(row: Row[*tuple[object, ...]]) -> ReplayInfo:
    return ReplayInfo(
        plan=msgspec.json.decode(row.plan, type=ReplayPlan),
        state=row.state,
        progress=msgspec.json.decode(row.progress, type=dict[int, int]),
        read=row.read,
        published=row.published,
        detail=row.detail,
        version=row.version,
    )
