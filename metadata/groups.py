"""Consumer groups of a topic. Each function runs in the caller's transaction.

A group belongs to a topic id, not to a name: groups die with their topic. What happens to a group raises the
version of its topic too, so that a cache keyed by topic notices.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Select, bindparam, select

from millpond.core import limits
from millpond.core.errors import BadRequest, Conflict, FieldError, NotFound
from millpond.core.names import check_name
from millpond.metadata.catalog import require_topic, touch
from millpond.metadata.client import GroupInfo
from millpond.metadata.head import bury, lock, raise_version
from millpond.metadata.tables import GROUPS, in_lists

Start = Literal["earliest", "latest"]
_GROUPS = select(*[GROUPS.c[name] for name in GroupInfo.__struct_fields__]).order_by(GROUPS.c.group_id)
_OF_TOPIC = _GROUPS.where(GROUPS.c.topic_id == bindparam("topic_id"))
_NAMED = _OF_TOPIC.where(GROUPS.c.name == bindparam("name"))
_MAKE = GROUPS.insert()
GROUPS_SINCE = _GROUPS.where(GROUPS.c.version > bindparam("since"))


class _Patch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may change while a group runs; UNSET: stays as it is."""

    filter_tag: str | msgspec.UnsetType | None = msgspec.UNSET
    max_in_flight: int | msgspec.UnsetType = msgspec.UNSET


def put_group(
    connection: Connection,
    topic_id: int,
    name: str,
    start: Start,
    filter_tag: str | None,
    max_in_flight: int,
    now_ms: int,
) -> tuple[GroupInfo, bool]:
    """Create it (True), or the one there is; one whose filter differs is Conflict(filter_differs)."""
    check_name("group", name)
    if start not in ("earliest", "latest"):
        raise BadRequest.field("start", "earliest or latest", start)
    _check_filter(filter_tag)
    _check_in_flight(max_in_flight)
    lock(connection)
    require_topic(connection, topic_id)
    there = load_groups(connection, _NAMED, topic_id=topic_id, name=name)
    if there:
        if there[0].filter_tag != filter_tag:
            raise Conflict("filter_differs", f"group {name} exists with filter {there[0].filter_tag!r}")
        return there[0], False
    version = raise_version(connection)
    row = {
        "topic_id": topic_id,
        "name": name,
        "start": start,
        "filter_tag": filter_tag,
        "filter_version": 1,
        "max_in_flight": max_in_flight,
        "created_ms": now_ms,
        "version": version,
    }
    connection.execute(_MAKE, row)
    touch(connection, topic_id, version)
    return group(connection, topic_id, name), True


def patch_group(connection: Connection, topic_id: int, name: str, changes: dict[str, object]) -> GroupInfo:
    """Change `filter_tag` (raises filter_version) or `max_in_flight`; nothing changed raises no version."""
    patch = _decode(changes)
    lock(connection)
    there = group(connection, topic_id, name)
    changed = there
    if patch.filter_tag is not msgspec.UNSET and patch.filter_tag != there.filter_tag:
        _check_filter(patch.filter_tag)
        changed = msgspec.structs.replace(changed, filter_tag=patch.filter_tag, filter_version=there.filter_version + 1)
    if patch.max_in_flight is not msgspec.UNSET:
        _check_in_flight(patch.max_in_flight)
        changed = msgspec.structs.replace(changed, max_in_flight=patch.max_in_flight)
    if changed == there:
        return there
    version = raise_version(connection)
    values = {
        "filter_tag": changed.filter_tag,
        "filter_version": changed.filter_version,
        "max_in_flight": changed.max_in_flight,
        "version": version,
    }
    connection.execute(GROUPS.update().where(GROUPS.c.group_id == there.group_id).values(values))
    touch(connection, topic_id, version)
    return changed


def delete_group(connection: Connection, topic_id: int, name: str) -> GroupInfo:
    """Delete it; what it was."""
    lock(connection)
    there = group(connection, topic_id, name)
    version = raise_version(connection)
    connection.execute(GROUPS.delete().where(GROUPS.c.group_id == there.group_id))
    bury(connection, version, "group", [there.group_id])
    touch(connection, topic_id, version)
    return there


def group(connection: Connection, topic_id: int, name: str) -> GroupInfo:
    check_name("group", name)
    found = load_groups(connection, _NAMED, topic_id=topic_id, name=name)
    if not found:
        raise NotFound("group_not_found", f"no group {name}")
    return found[0]


def groups(connection: Connection, topic_id: int) -> list[GroupInfo]:
    """All of a topic, by name."""
    require_topic(connection, topic_id)
    return sorted(load_groups(connection, _OF_TOPIC, topic_id=topic_id), key=lambda info: info.name)


def living_groups(connection: Connection, group_ids: list[int]) -> list[int]:
    """Those of these ids whose group is there."""
    found: list[int] = []
    for ids in in_lists(group_ids):
        found += connection.execute(select(GROUPS.c.group_id).where(GROUPS.c.group_id.in_(ids))).scalars()
    return found


def load_groups(connection: Connection, wanted: Select[Any], **values: object) -> list[GroupInfo]:
    """Those of the statement `wanted`, by id. `values`: what its condition names."""
    return [GroupInfo(*row) for row in connection.execute(wanted, values)]


def _decode(changes: dict[str, object]) -> _Patch:
    for name in changes:
        if name not in _Patch.__struct_fields__:
            expected = f"one of {list(_Patch.__struct_fields__)}"
            detail = f"{name[:80]!r} cannot be changed in a group"
            raise BadRequest("unknown_field", detail, fields=[FieldError(name[:80], expected)])
    try:
        return msgspec.convert(changes, _Patch)
    except msgspec.ValidationError as error:
        raise BadRequest("invalid_request", f"group: {error}") from error


def _check_filter(filter_tag: str | None) -> None:
    if filter_tag is not None and not (0 < len(filter_tag) <= limits.FILTER_CHARS and filter_tag.isprintable()):
        raise BadRequest.field("filter_tag", f"1 to {limits.FILTER_CHARS} printable characters, or null", filter_tag)


def _check_in_flight(max_in_flight: int) -> None:
    if not 1 <= max_in_flight <= limits.UNSETTLED_ROWS:
        raise BadRequest.field("max_in_flight", f"1 to {limits.UNSETTLED_ROWS}", max_in_flight)
