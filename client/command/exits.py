"""Exit codes, and what is said when a command fails: one line with the remedy, no traceback.

0 done, 1 failed, 2 usage, 3 unreachable, 4 not found, 5 refused
"""

from __future__ import annotations

import msgspec

from millpond.client.errors import BufferFull, Unreachable
from millpond.core.errors import MillpondError, NotFound, StartupError

DONE, FAILED, USAGE, UNREACHABLE, NOT_FOUND, REFUSED = range(6)

_REMEDIES = {
    "unreachable": "start one with `millpond standalone`, or name another with --url or MILLPOND_URL",
    "topic_not_found": "see `millpond topic list`; make it with `millpond topic create`",
    "group_not_found": "see `millpond group list TOPIC`",
    "unauthenticated": "give a key with --api-key or MILLPOND_KEY",
    "forbidden": "use a key with that scope; `millpond key create` makes one",
    "topic_differs": "change it with `millpond topic set`, or take another name",
    "filter_differs": "use another group, or leave --tag out",
    "group_differs": "leave --start out, or use another group",
    "offset_expired": "read from the first offset there is; `millpond replay --skip-lost` leaves out what is gone",
    "corrupt_range": "read or seek past them; `millpond replay --skip-lost` leaves them out",
    "offset_out_of_range": "read from an offset up to the end",
    "disk_full": "make room, or let retention be shorter",
    "flush_behind": "the service's disk is slower than what arrives: send less, or try again",
    "metadata_unavailable": "check the metadata service and its database",
    "store_unavailable": "check the store's process and its log",
}


class Failure(msgspec.Struct, frozen=True):
    """What a failed command says, also as JSON."""

    error: str
    code: str
    remedy: str
    exit_code: int


def failure_of(error: MillpondError | StartupError) -> Failure:
    if isinstance(error, StartupError):
        return Failure(error.detail, "not_started", error.remedy, FAILED)
    remedy = _REMEDIES.get(error.code, "")
    if error.fields and not remedy:
        remedy = "; ".join(f"{field.field}: {field.expected}" for field in error.fields)
    return Failure(error.detail, error.code, remedy, _exit_code(error))


def _exit_code(error: MillpondError) -> int:
    if isinstance(error, Unreachable):
        return UNREACHABLE
    if isinstance(error, NotFound):
        return NOT_FOUND
    if 400 <= error.status < 500 and not isinstance(error, BufferFull):
        return REFUSED
    return FAILED
