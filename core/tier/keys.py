"""Which object keys there may be: one rule for every object store.

A key is parts joined by `/`. A part is a plain file name that does not start with a dot: so a key cannot leave
the prefix, and names that start with a dot are free for the store itself (temporary files of a directory).
"""

from __future__ import annotations

from millpond.core.errors import BadRequest, FieldError
from millpond.core.limits import OBJECT_KEY_BYTES, OBJECT_PART_BYTES

EXPECTED = f"parts of 1 to {OBJECT_PART_BYTES} bytes joined by '/', none starting with '.', without control characters"


def check_key(key: str) -> str:
    """`key` itself when it is legal, else BadRequest(invalid_name)."""
    if len(key.encode()) <= OBJECT_KEY_BYTES and all(_legal(part) for part in key.split("/")):
        return key
    raise BadRequest("invalid_name", f"not an object key: {key[:80]!r}", fields=[FieldError("key", EXPECTED)])


def _legal(part: str) -> bool:
    if not part or part.startswith(".") or len(part.encode()) > OBJECT_PART_BYTES:
        return False
    return "\\" not in part and part.isprintable()
