"""What the owner of a topic may set, checked: the bounds, and how a patch is applied."""

from __future__ import annotations

import msgspec

from millpond.core import limits
from millpond.core.errors import BadRequest, FieldError
from millpond.metadata.client import TopicSettings

_FIELDS = frozenset(field.name for field in msgspec.structs.fields(TopicSettings))


def check_settings(settings: TopicSettings) -> TopicSettings:
    """`settings` itself, else BadRequest naming the first field out of its bounds."""
    _between("queues", settings.queues, 1, limits.QUEUES_PER_TOPIC)
    _between("max_message_bytes", settings.max_message_bytes, 1, limits.MESSAGE_BYTES)
    _between("dedup_window_ms", settings.dedup_window_ms, 0, limits.DEDUP_WINDOW_MS_MOST)
    if settings.retention_ms is not None:
        _between("retention_ms", settings.retention_ms, 1, limits.TIMESTAMP_MS_MOST)
    if settings.retention_bytes is not None:
        _between("retention_bytes", settings.retention_bytes, 1, 2**63 - 1)
    return settings


def apply_changes(settings: TopicSettings, changes: dict[str, object]) -> TopicSettings:
    """`settings` with `changes` (field name -> new value); `queues` may only grow, for keys keep their queues'
    history. Raises BadRequest (unknown_field, invalid_request)."""
    for name in changes:
        if name not in _FIELDS:
            detail = f"{name[:80]!r} is not a setting of a topic"
            raise BadRequest("unknown_field", detail, fields=[FieldError(name[:80], f"one of {sorted(_FIELDS)}")])
    merged = {**msgspec.to_builtins(settings), **changes}
    try:
        changed = msgspec.convert(merged, TopicSettings)
    except msgspec.ValidationError as error:
        raise BadRequest("invalid_request", f"topic settings: {error}") from error
    if changed.queues < settings.queues:
        raise BadRequest.field("queues", f"at least the {settings.queues} there are", changed.queues)
    return check_settings(changed)


def _between(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadRequest.field(field, f"{least} to {most}", value)
