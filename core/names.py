"""Names of tenants, topics, groups and replays: one rule, checked before anything else sees them."""

from __future__ import annotations

import re

from millpond.core.errors import BadRequest, FieldError
from millpond.core.limits import NAME_CHARS

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS - 1}}}")
EXPECTED = f"1 to {NAME_CHARS} of A-Z a-z 0-9 . _ - , starting with a letter or digit, without '..'"


def check_name(field: str, name: str) -> str:
    """`name` itself when it is legal, else `BadRequest` (`invalid_name`) that names `field`."""
    if _NAME.fullmatch(name) is None or ".." in name:
        shown = repr(name)[:80]
        raise BadRequest("invalid_name", f"{field}: {shown} is not a name", fields=[FieldError(field, EXPECTED, shown)])
    return name
