"""Lease tokens: what a client hands back to settle a delivery; a proxy needs no memory of the receive.

    version u8 = 1
    varint key number, tenant id, topic id, group id, queue id, generation, lease number, base offset
    mac 16 B = first half of HMAC-SHA256(secret of that key, domain + everything before)
    all of it in base64url without padding

One token, and one HMAC, per receive and queue. `lease_id` is the token, a dot, and the row (offset - base).
There is no deadline and no epoch inside: only the store judges. A token that does not hold (cut, forged, of a
key nobody knows or no longer accepts) reads as None: its answer is `unknown`, the same as for a lease that
never was, so nothing can be learned by trying. Truth: the keys are the metadata part's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from millpond.core.clock import Clock
from millpond.core.errors import Unavailable
from millpond.core.limits import CATALOG_STALE_SECONDS, LEASE_KEYS_RELOAD_SECONDS, LEASE_KEYS_SECONDS
from millpond.metadata.client import LeaseKey, MetadataClient

VERSION = 1
MAC_BYTES = 16
FIELDS = 8
TOKEN_CHARS = 160
"""Longer than any token of ours (1 + 8 varints of up to 10 bytes + mac): anything longer is not looked at."""
SIGNED = 4_096
"""Of its own tokens a process knows so many by heart, about 1 MB: most come back soon, and need no HMAC then."""

_DOMAIN = b"millpond lease token\x00"
_URLSAFE = bytes.maketrans(b"+/", b"-_")
_BEGINNINGS = 1_024  # of tokens, by key, group and queue: the last used


class Lease(NamedTuple):
    """One grant: messages of one queue leased together; `base` is the first of its offsets."""

    tenant_id: int
    topic_id: int
    group_id: int
    queue_id: int
    generation: int
    lease: int
    base: int


class LeaseTokens:
    """Signs and reads tokens with the cluster's keys: the newest signs, all that are not over verify."""

    def __init__(self, metadata: MetadataClient, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._keys: list[LeaseKey] = []
        self._loaded_at = float("-inf")
        self._tried_at = float("-inf")
        self._loading = asyncio.Lock()
        self._signed: dict[str, tuple[int, Lease]] = {}  # the newest of its own, with the number of their key

    async def sign(self, lease: Lease) -> str:
        """The token of a grant. Raises Unavailable(metadata_unavailable) when no key was ever had, or for too long."""
        await self._load(LEASE_KEYS_SECONDS)
        key = self._keys[0]
        body = _begin(key.number, *lease[:-2]) + _varints_of(lease[-2:])
        text = binascii.b2a_base64(body + _mac(key.secret, body), newline=False)
        token = text.translate(_URLSAFE, b"=").decode()
        if len(self._signed) >= SIGNED:
            del self._signed[next(iter(self._signed))]
        self._signed[token] = key.number, lease
        return token

    async def read(self, tokens: Sequence[str]) -> list[Lease | None]:
        """The lease of each token, None for each that does not hold. One HMAC each: pass distinct tokens."""
        await self._load(LEASE_KEYS_SECONDS)
        signed = {token: self._signed[token] for token in tokens if token in self._signed}
        parsed = {token: _parse(token) for token in tokens if token not in signed}
        known = {key.number for key in self._keys}
        if any(one is not None and one[0] not in known for one in parsed.values()):
            await self._load(LEASE_KEYS_RELOAD_SECONDS)  # another proxy may already sign with a key made since
        now = self._clock.wall_ms()
        secrets = {key.number: key.secret for key in self._keys if key.until_ms > now}

        def lease_of(token: str) -> Lease | None:
            if token in signed:
                number, lease = signed[token]
                return lease if number in secrets else None
            one = parsed[token]
            return None if one is None else _verify(secrets, *one)

        return [lease_of(token) for token in tokens]

    async def _load(self, age_seconds: float) -> None:
        """Have keys that are at most `age_seconds` old, or older ones while the metadata part is away."""
        if self._clock.monotonic() - self._tried_at < age_seconds and self._keys:
            return
        async with self._loading:
            now = self._clock.monotonic()
            if now - self._tried_at < age_seconds and self._keys:
                return
            try:
                keys = await self._metadata.lease_keys()
            except Unavailable:
                if not self._keys or now - self._loaded_at > CATALOG_STALE_SECONDS:
                    raise
            else:
                assert keys, "the metadata part makes a lease key on first use"
                self._keys = sorted(keys, key=lambda key: -key.number)
                self._loaded_at = now
            self._tried_at = now


def _mac(secret: bytes, body: bytes) -> bytes:
    mac = _keyed(secret).copy()
    mac.update(body)
    return mac.digest()[:MAC_BYTES]


@lru_cache(8)
def _keyed(secret: bytes) -> hmac.HMAC:
    """What is the same for all tokens of a key: half of what a short HMAC takes."""
    return hmac.new(secret, _DOMAIN, "sha256")


def _parse(token: str) -> tuple[int, bytes, bytes] | None:
    """(key number, signed bytes, mac) of what looks like a token."""
    if not 0 < len(token) <= TOKEN_CHARS or not token.isascii():
        return None
    try:
        data = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    body, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
    if len(body) < 1 + FIELDS or body[0] != VERSION:
        return None
    number = _varints(body, 1)
    return None if number is None else (number[0], body, mac)


def _verify(secrets: dict[int, bytes], number: int, body: bytes, mac: bytes) -> Lease | None:
    secret = secrets.get(number)
    if secret is None or not hmac.compare_digest(_mac(secret, body), mac):
        return None
    values = _varints(body, FIELDS)
    assert values is not None, "what we signed can be read"
    return Lease._make(values[1:])


@lru_cache(_BEGINNINGS)
def _begin(*values: int) -> bytes:
    """The version and the first values, which are those of all grants of a queue to a group."""
    return bytes((VERSION,)) + _varints_of(values)


def _varints_of(values: Iterable[int]) -> bytes:
    """Each value as LEB128: seven bits a byte, least first, high bit set on all but the last."""
    out = bytearray()
    for value in values:
        assert value >= 0
        left = value
        while left > 0x7F:
            out.append(left & 0x7F | 0x80)
            left >>= 7
        out.append(left)
    return bytes(out)


def _varints(data: bytes, count: int) -> list[int] | None:
    """The first `count` varints after the version byte; None when the bytes end before."""
    values: list[int] = []
    value = shift = 0
    for byte in data[1:]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(value)
            if len(values) == count:
                return values
            value = shift = 0
    return None
