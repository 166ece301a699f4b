"""Tag expressions: `a || b || c`, or `*` for every message.

A tag's hash only preselects (on the store's index); the text is compared once a frame is open, so a message of
another tag with an equal hash never reaches a consumer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from millpond.core.errors import BadRequest
from millpond.core.hashing import hash_bytes
from millpond.core.limits import TAG_BYTES, TAG_EXPRESSION_TAGS

_EXPECTED = f"'*', or up to {TAG_EXPRESSION_TAGS} tags of at most {TAG_BYTES} bytes separated by '||'"
_CHARS_MOST = TAG_EXPRESSION_TAGS * (TAG_BYTES + 4)


@dataclass(frozen=True, slots=True)
class TagFilter:
    """One of these tags. `tags` ascending and distinct; `hashes` beside them, ascending and distinct."""

    tags: tuple[str, ...]
    hashes: tuple[int, ...]

    @property
    def text(self) -> str:
        """The expression in its one canonical form: equal filters have equal texts."""
        return " || ".join(self.tags)

    def mask(self, tag: pa.Array) -> pa.BooleanArray:
        """Which rows of a utf8 column match; a message without a tag never does."""
        return pc.is_in(tag, value_set=pa.array(self.tags, pa.string()))


@lru_cache(maxsize=1024)
def parse(expression: str | None, field: str = "filter.tag") -> TagFilter | None:
    """The filter that `expression` names; None (every message) for None and `*`. Raises BadRequest naming `field`."""
    if expression is None or expression.strip() == "*":
        return None
    if len(expression) > _CHARS_MOST:
        raise BadRequest.field(field, _EXPECTED, f"{len(expression)} characters")
    tags = sorted({tag.strip() for tag in expression.split("||")})
    if len(tags) > TAG_EXPRESSION_TAGS:
        raise BadRequest.field(field, _EXPECTED, f"{len(tags)} tags")
    for tag in tags:
        if not 0 < len(encoded(tag, field)) <= TAG_BYTES or tag == "*" or "|" in tag:
            raise BadRequest.field(field, _EXPECTED, expression)
    return TagFilter(tuple(tags), tuple(sorted({hash_bytes(tag.encode()) for tag in tags})))


def encoded(text: str, field: str) -> bytes:
    """`text` in UTF-8. JSON can name half of a surrogate pair, which is not text: BadRequest naming `field`."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest.field(field, "UTF-8 text") from error
