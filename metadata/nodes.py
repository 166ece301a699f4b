"""Store groups: which node is primary of each, where it listens, and its epoch.

The epoch fences: every start raises it, and every manifest write names it while it holds the store group's row. What
an earlier start of the store had begun to upload can then no longer be committed, so it is marked for the sweep.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from millpond.core.errors import BadRequest, Conflict
from millpond.core.names import check_name
from millpond.metadata.client import StoreInfo
from millpond.metadata.head import lock, raise_version
from millpond.metadata.tables import STORES, TIER_OBJECTS

_ADDRESS_CHARS = 1_000


def register_store(connection: Connection, store_group: str, node_id: str, address: str, now_ms: int) -> StoreInfo:
    """The node starts as primary of the group: epoch + 1. Another node's group is Conflict(epoch_superseded)."""
    check_name("store_group", store_group)
    check_name("node_id", node_id)
    if len(address) > _ADDRESS_CHARS:
        raise BadRequest.field("address", f"at most {_ADDRESS_CHARS} characters", address)
    lock(connection)
    of_group = STORES.c.store_group == store_group
    there = connection.execute(select(STORES).where(of_group).with_for_update()).one_or_none()
    if there is not None and there.node_id != node_id:
        detail = f"store group {store_group} belongs to node {there.node_id}, not to {node_id}"
        raise Conflict("epoch_superseded", detail, node_id=there.node_id, epoch=there.epoch)
    epoch = 1 if there is None else there.epoch + 1
    values = {"node_id": node_id, "address": address, "epoch": epoch, "registered_ms": now_ms}
    if there is None:
        connection.execute(STORES.insert().values(store_group=store_group, **values))
    else:
        connection.execute(STORES.update().where(of_group).values(values))
    unfinished = (TIER_OBJECTS.c.store_group == store_group) & (TIER_OBJECTS.c.state == "STARTED")
    connection.execute(TIER_OBJECTS.update().where(unfinished).values(state="ORPHAN", changed_ms=now_ms))
    raise_version(connection)
    return StoreInfo(store_group, epoch, address)


def stores(connection: Connection) -> list[StoreInfo]:
    """Every group that ever registered, by name."""
    rows = select(STORES.c.store_group, STORES.c.epoch, STORES.c.address).order_by(STORES.c.store_group)
    return [StoreInfo(*row) for row in connection.execute(rows)]
