"""The head row: the order of all catalog writes, and the version that each of them raises.

`lock` comes first in every catalog write. Catalog writes then happen one after another, so their versions become
visible in order: whoever has read version v has missed nothing up to v. Deletions leave a tombstone; the oldest go
once there are FEED_TOMBSTONES of them, and `floor` says from where on they are complete.

Manifest writes do not pass here: they are ordered by their store group's row.
"""

from __future__ import annotations

from typing import Literal

from sqlalchemy import Connection, func, select

from millpond.core import limits
from millpond.metadata.tables import HEAD, TOMBSTONES

_CURRENT = select(HEAD.c.version, HEAD.c.floor)
_LOCK = select(HEAD.c.version).with_for_update()
_RAISE = HEAD.update().values(version=HEAD.c.version + 1).returning(HEAD.c.version)


def lock(connection: Connection) -> int:
    """Take the place of this transaction among the catalog writes; the version before it. On SQLite the whole
    file is locked already (BEGIN IMMEDIATE)."""
    return int(connection.execute(_LOCK).scalar_one())


def current(connection: Connection) -> tuple[int, int]:
    """(version, floor) of this snapshot."""
    version, floor = connection.execute(_CURRENT).one()
    return int(version), int(floor)


def raise_version(connection: Connection) -> int:
    """The version of the change being made. Only after `lock`."""
    return int(connection.execute(_RAISE).scalar_one())


def bury(connection: Connection, version: int, kind: Literal["topic", "group"], ids: list[int]) -> None:
    """Remember that these ids were deleted at `version`, and forget the oldest deletions beyond the bound."""
    if not ids:
        return
    connection.execute(TOMBSTONES.insert(), [{"version": version, "kind": kind, "id": each} for each in ids])
    count = connection.execute(select(func.count()).select_from(TOMBSTONES)).scalar_one()
    if count <= limits.FEED_TOMBSTONES:
        return
    oldest = select(TOMBSTONES.c.version).order_by(TOMBSTONES.c.version.desc())
    floor = connection.execute(oldest.offset(limits.FEED_TOMBSTONES).limit(1)).scalar_one()
    connection.execute(TOMBSTONES.delete().where(TOMBSTONES.c.version <= floor))
    connection.execute(HEAD.update().values(floor=floor))
