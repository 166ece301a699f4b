"""One message as a raw body, everything else in headers (any Content-Type that is not another codec's).

    Millpond-Key, Millpond-Tag, Millpond-Dedup-Id, Millpond-Queue, Millpond-Born-Ts
    Millpond-Property-<Name>: value      the property is named in lower case: HTTP/2 has no other
    Millpond-Producer: {"id", "queue", "previous", "first", "last"}

Header values are UTF-8; a key may be any bytes a header can carry.
"""

from __future__ import annotations

from collections.abc import Mapping

from millpond.core.errors import BadRequest
from millpond.core.http.call import decode_json
from millpond.proxy.incoming import Request, Session, Single, gather

PREFIX = "millpond-"
_INITIALS = {"M", "m"}
_PROPERTY = "property-"
_FIELDS = {"key": "key", "tag": "tag", "dedup-id": "dedup_id"}
_NUMBERS = {"queue": "queue", "born-ts": "born_ts"}
_NOT_YET = {"delay-ms", "delay-level", "deliver-at"}


def millpond_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The `Millpond-*` headers by their lower-case rest; two of one name are refused, as are delays."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        if name[:1] not in _INITIALS:  # most headers are not ours
            continue
        lower = name.lower()
        if lower.startswith(PREFIX):
            rest = lower[len(PREFIX) :]
            if rest in found:
                raise BadRequest.field(f"Millpond-{rest.title()}", "one such header")
            if rest in _NOT_YET:
                raise BadRequest.field(f"Millpond-{rest.title()}", "nothing: delayed delivery is not available")
            found[rest] = value
    return found


def session_of(found: Mapping[str, str]) -> Session | None:
    text = found.get("producer")
    if text is None:
        return None
    try:
        return decode_json(text.encode("utf-8", "surrogateescape"), Session)
    except BadRequest as error:
        raise BadRequest.field("Millpond-Producer", f"a producer part as JSON ({error.detail})", text) from error


def number(name: str, text: str) -> int:
    """A header's decimal number. Raises BadRequest."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadRequest.field(f"Millpond-{name.title()}", "a number from 0", text)
    return int(text)


def decode(body: bytes, found: Mapping[str, str]) -> Request:
    """`found` is `millpond_headers`. Raises BadRequest."""
    if not found:
        return Request(Single(body), None, None)
    session = session_of(found)
    single = _single(body, found)
    if session is None:
        return Request(single, None, None)
    body_in, *others = single
    return Request(None, gather((body_in,), *((value,) for value in others)), session)


def _single(body: bytes, found: Mapping[str, str]) -> Single:
    properties = {name[len(_PROPERTY) :]: _text(name, v) for name, v in found.items() if name.startswith(_PROPERTY)}
    values = {field: _text(name, found[name]) for name, field in _FIELDS.items() if name in found and name != "key"}
    numbers = {field: number(name, found[name]) for name, field in _NUMBERS.items() if name in found}
    key = found.get("key")
    return Single(
        body,
        None if key is None else key.encode("utf-8", "surrogateescape"),
        values.get("tag"),
        properties or None,
        numbers.get("born_ts"),
        values.get("dedup_id"),
        numbers.get("queue"),
    )


def _text(name: str, value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRequest.field(f"Millpond-{name.title()}", "UTF-8") from error
    return value
