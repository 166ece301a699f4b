"""The tier manifest (truth): which objects hold which offsets, and how far each queue is tiered.

    tier_start -> row STARTED --(PUT, HEAD by the store)--> tier_commit -> COMMITTED, tiered_to moves
                             `--> tier_abort, or a newer epoch -> ORPHAN (the sweep deletes its object)

Every write locks the row of its store group first and compares the epoch, so a store that was replaced cannot
write. A commit moves `tiered_to` of every queue from exactly the range's first offset to its end, all or none:
committed ranges of a queue therefore follow each other without gap or overlap. Lock order, everywhere: head row,
store group, queues, topic.
"""

from __future__ import annotations

from msgspec.structs import replace
from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, func, or_, select

from millpond.core.errors import BadRequest, Conflict
from millpond.metadata.catalog import require_topic
from millpond.metadata.client import ObjectRange, TierObject, TierView
from millpond.metadata.tables import IN_LIST, QUEUES, SPANS, STORES, TIER_OBJECTS, TIER_RANGES, TOPICS, in_lists

_RANGE_COLUMNS = [TIER_RANGES.c[name] for name in ObjectRange.__struct_fields__]
_OBJECT_COLUMNS = [TIER_OBJECTS.c[name] for name in TierObject.__struct_fields__ if name != "ranges"]

# Statements that run for each object: made once, since to make one takes longer than to run it.
_EPOCH = select(STORES.c.epoch).where(STORES.c.store_group == bindparam("store_group")).with_for_update()
_SAME_NAME = select(TIER_OBJECTS.c.object_no, TIER_OBJECTS.c.state).where(
    or_(TIER_OBJECTS.c.object_id == bindparam("object_id"), TIER_OBJECTS.c.path == bindparam("path"))
)
_QUEUES_HERE = (
    select(QUEUES.c.queue_id, QUEUES.c.queue)
    .join(SPANS)
    .distinct()
    .where(QUEUES.c.topic_id == bindparam("topic_id"), SPANS.c.store_group == bindparam("store_group"))
)
_START = TIER_OBJECTS.insert().returning(TIER_OBJECTS.c.object_no)
_START_RANGES = TIER_RANGES.insert()
_OBJECT = select(TIER_OBJECTS).where(TIER_OBJECTS.c.object_id == bindparam("object_id"))
_RANGES = (
    select(TIER_RANGES.c.queue_id, TIER_RANGES.c.first, TIER_RANGES.c.end)
    .where(TIER_RANGES.c.object_no == bindparam("object_no"))
    .order_by(TIER_RANGES.c.queue_id)
)
_MOVE_TIERED_TO = (
    QUEUES.update()
    .where(QUEUES.c.queue_id == bindparam("of_queue"), QUEUES.c.tiered_to == bindparam("first"))
    .values(tiered_to=bindparam("end"))
)
_RAISE_TIER_VERSION = (
    TOPICS.update()
    .where(TOPICS.c.topic_id == bindparam("of_topic"))
    .values(tier_version=TOPICS.c.tier_version + 1)
    .returning(TOPICS.c.tier_version)
)
_COMMIT = (
    TIER_OBJECTS.update()
    .where(TIER_OBJECTS.c.object_no == bindparam("of_object"))
    .values(state="COMMITTED", tier_version=bindparam("version"), changed_ms=bindparam("now_ms"))
)
_COMMIT_RANGES = TIER_RANGES.update().where(TIER_RANGES.c.object_no == bindparam("of_object")).values(committed=1)
_TIERED_TO = select(QUEUES.c.queue_id, QUEUES.c.tiered_to).where(
    QUEUES.c.queue_id.in_(bindparam("ids", expanding=True))
)


def tier_start(connection: Connection, store_group: str, epoch: int, obj: TierObject, now_ms: int) -> None:
    """Row STARTED. The same object again is fine; another one under its id or path is Conflict(manifest_conflict)."""
    _check_object(obj)
    _hold_epoch(connection, store_group, epoch)
    if not _is_there(connection, obj):
        require_topic(connection, obj.topic_id)
        _check_queues(connection, store_group, obj)
        values = {column.name: getattr(obj, column.name) for column in _OBJECT_COLUMNS}
        values |= {"store_group": store_group, "epoch": epoch, "state": "STARTED", "changed_ms": now_ms}
        object_no = connection.execute(_START, values).scalar_one()
        fields = ObjectRange.__struct_fields__
        ranges = [{field: getattr(each, field) for field in fields} for each in obj.ranges]
        connection.execute(_START_RANGES, [{**each, "object_no": object_no, "committed": 0} for each in ranges])


def tier_commit(connection: Connection, store_group: str, epoch: int, object_id: str, now_ms: int) -> int:
    """The topic's tier version with this object in it; see `MetadataClient.tier_commit`."""
    held = _epoch_of(connection, store_group)
    row = _object_row(connection, object_id)
    if row is None or row.store_group != store_group:
        raise Conflict("manifest_conflict", f"object {object_id} was never started by store group {store_group}")
    if row.state == "COMMITTED":
        return int(row.tier_version)
    _require_epoch(store_group, epoch, held)
    if row.state != "STARTED" or row.epoch != epoch:
        raise Conflict("manifest_conflict", f"object {object_id} is {row.state}, of epoch {row.epoch}")
    _move_tiered_to(connection, object_id, row.object_no)
    version = int(connection.execute(_RAISE_TIER_VERSION, {"of_topic": row.topic_id}).scalar_one())
    connection.execute(_COMMIT, {"of_object": row.object_no, "version": version, "now_ms": now_ms})
    connection.execute(_COMMIT_RANGES, {"of_object": row.object_no})
    return version


def tier_abort(connection: Connection, object_id: str, now_ms: int) -> None:
    """STARTED becomes ORPHAN; unknown or ORPHAN stays; a committed one is Conflict(manifest_conflict)."""
    row = _object_row(connection, object_id)
    if row is None:
        return
    _epoch_of(connection, row.store_group)
    started = (TIER_OBJECTS.c.object_no == row.object_no) & (TIER_OBJECTS.c.state == "STARTED")
    aborted = connection.execute(TIER_OBJECTS.update().where(started).values(state="ORPHAN", changed_ms=now_ms))
    if aborted.rowcount == 0:
        now = _object_row(connection, object_id)
        if now is not None and now.state == "COMMITTED":
            raise Conflict("manifest_conflict", f"object {object_id} is committed")


def tier_view(
    connection: Connection, topic_id: int, queue_ids: list[int] | None, from_offset: int, to_offset: int | None
) -> TierView:
    """See `MetadataClient.tier_view`. `tiered_to` holds the queues asked for, or all of the topic."""
    require_topic(connection, topic_id)
    version = connection.execute(select(TOPICS.c.tier_version).where(TOPICS.c.topic_id == topic_id)).scalar_one()
    of_topic = select(QUEUES.c.queue_id, QUEUES.c.tiered_to).where(QUEUES.c.topic_id == topic_id)
    tiered = {queue_id: end for queue_id, end in connection.execute(of_topic.order_by(QUEUES.c.queue_id))}
    if queue_ids is not None:
        wanted = set(queue_ids)
        tiered = {queue_id: end for queue_id, end in tiered.items() if queue_id in wanted}
    if queue_ids is None and from_offset <= 0 and to_offset is None:
        return TierView(topic_id, int(version), tiered, _committed(connection, topic_id))
    matching = _matching(connection, list(tiered), from_offset, to_offset)
    return TierView(topic_id, int(version), tiered, _numbered(connection, matching))


def tiered_to(connection: Connection, queue_ids: list[int]) -> dict[int, int]:
    """How far each queue is tiered; unknown ids are left out."""
    found: dict[int, int] = {}
    for ids in in_lists(queue_ids):
        found.update((queue_id, end) for queue_id, end in connection.execute(_TIERED_TO, {"ids": ids}))
    return found


# -- the store group's row --------------------------------------------------------------------------------


def _epoch_of(connection: Connection, store_group: str) -> int | None:
    """The group's epoch, its row locked until the transaction ends; None when it never registered."""
    return connection.execute(_EPOCH, {"store_group": store_group}).scalar()


def _require_epoch(store_group: str, epoch: int, held: int | None) -> None:
    if held != epoch:
        detail = f"store group {store_group} is at epoch {held}, not {epoch}"
        raise Conflict("epoch_superseded", detail, epoch=held)


def _hold_epoch(connection: Connection, store_group: str, epoch: int) -> None:
    _require_epoch(store_group, epoch, _epoch_of(connection, store_group))


# -- starting ---------------------------------------------------------------------------------------------


def _check_object(obj: TierObject) -> None:
    if not obj.object_id or not obj.path or obj.bytes < 1 or not 0 < obj.footer_bytes <= obj.bytes:
        raise BadRequest("invalid_request", f"object {obj.object_id!r}: it needs a path, and a footer within its bytes")
    if not obj.ranges or len({each.queue_id for each in obj.ranges}) != len(obj.ranges):
        raise BadRequest("invalid_request", f"object {obj.object_id}: one range for each of its queues")
    for each in obj.ranges:
        if not (0 <= each.first < each.end and 0 < each.rows <= each.end - each.first):
            detail = f"object {obj.object_id}: {each.rows} rows in [{each.first}, {each.end}) of queue {each.queue_id}"
            raise BadRequest("invalid_request", detail)


def _is_there(connection: Connection, obj: TierObject) -> bool:
    """Whether this very object was started before."""
    rows = connection.execute(_SAME_NAME, {"object_id": obj.object_id, "path": obj.path}).all()
    if not rows:
        return False
    if len(rows) == 1 and rows[0].state != "ORPHAN":
        ranges = sorted(obj.ranges, key=lambda each: (each.queue, each.first))
        if _numbered(connection, [rows[0].object_no]) == [replace(obj, ranges=ranges)]:
            return True
    raise Conflict("manifest_conflict", f"another object has the id or path of {obj.object_id}, or it is an orphan")


def _check_queues(connection: Connection, store_group: str, obj: TierObject) -> None:
    """The queues are the topic's, and have a span on this store group."""
    ours = connection.execute(_QUEUES_HERE, {"topic_id": obj.topic_id, "store_group": store_group})
    known = {(queue_id, queue) for queue_id, queue in ours}
    foreign = [each.queue_id for each in obj.ranges if (each.queue_id, each.queue) not in known]
    if foreign:
        detail = f"object {obj.object_id}: queues {foreign[:10]} are not topic {obj.topic_id}'s on {store_group}"
        raise Conflict("manifest_conflict", detail)


# -- committing -------------------------------------------------------------------------------------------


def _object_row(connection: Connection, object_id: str) -> Row[*tuple[object, ...]] | None:
    return connection.execute(_OBJECT, {"object_id": object_id}).one_or_none()


def _move_tiered_to(connection: Connection, object_id: str, object_no: int) -> None:
    """Each queue's tiered_to from its range's first to its end; raises when one stood elsewhere."""
    for queue_id, first, end in connection.execute(_RANGES, {"object_no": object_no}).all():
        moved = connection.execute(_MOVE_TIERED_TO, {"of_queue": queue_id, "first": first, "end": end})
        if moved.rowcount != 1:
            detail = f"object {object_id}: queue {queue_id} is not tiered to exactly {first}"
            raise Conflict("manifest_conflict", detail, queue_id=queue_id)


# -- reading ----------------------------------------------------------------------------------------------


def _matching(connection: Connection, queue_ids: list[int], from_offset: int, to_offset: int | None) -> list[int]:
    """object_no of the committed objects that overlap [from_offset, to_offset) of any of the queues.

    Committed ranges of a queue do not overlap, so those that do overlap the window begin with the one whose first
    offset is the last at or below `from_offset`: two index seeks a queue, however many objects there are."""
    found: set[int] = set()
    for queue_id in queue_ids:
        committed = and_(TIER_RANGES.c.queue_id == queue_id, TIER_RANGES.c.committed == 1)
        window = [committed, TIER_RANGES.c.end > from_offset]
        if from_offset > 0:
            below = select(func.max(TIER_RANGES.c.first)).where(committed, TIER_RANGES.c.first <= from_offset)
            lowest = connection.execute(below).scalar()
            window.append(TIER_RANGES.c.first >= (0 if lowest is None else lowest))
        if to_offset is not None:
            window.append(TIER_RANGES.c.first < to_offset)
        found.update(connection.execute(select(TIER_RANGES.c.object_no).where(*window)).scalars())
    return sorted(found)


def _committed(connection: Connection, topic_id: int) -> list[TierObject]:
    """Every committed object of a topic, by path."""
    return _load(connection, and_(TIER_OBJECTS.c.topic_id == topic_id, TIER_OBJECTS.c.state == "COMMITTED"))


def _numbered(connection: Connection, numbers: list[int]) -> list[TierObject]:
    """The objects of these object_no, by path. Nothing else in the condition: a planner that is also given the topic
    may walk over all of it."""
    found: list[TierObject] = []
    for chunk in in_lists(numbers):
        found += _load(connection, TIER_OBJECTS.c.object_no.in_(chunk))
    return found if len(numbers) <= IN_LIST else sorted(found, key=lambda obj: obj.path)


def _load(connection: Connection, condition: ColumnElement[bool]) -> list[TierObject]:
    """One row per range, those of an object together: plain tuples, for there may be 100,000 of them."""
    objects = select(*_OBJECT_COLUMNS, *_RANGE_COLUMNS).select_from(TIER_OBJECTS.join(TIER_RANGES)).where(condition)
    rows = connection.execute(objects.order_by(TIER_OBJECTS.c.path, TIER_RANGES.c.queue, TIER_RANGES.c.first))
    width = len(_OBJECT_COLUMNS)
    found: list[TierObject] = []
    for row in rows:
        values = tuple(row)
        if not found or found[-1].object_id != values[0]:
            ranges: list[ObjectRange] = []
            found.append(TierObject(*(*values[:width], ranges)))
        found[-1].ranges.append(ObjectRange(*values[width:]))
    return found
