"""The address of an HTTP service: `address_of`, what a caller makes its connections of."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

EXPECTED = "http://host:port or https://host:port"


class Address(NamedTuple):
    """`named`: host and port as the address has them; `base`: what paths begin with."""

    secure: bool
    host: str
    port: int
    named: str
    base: str


def address_of(url: str) -> Address:
    """Raises ValueError when it is no address of an HTTP service."""
    with suppress(ValueError):  # of what stands there for a port, or for an address of IPv6
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            port = parts.port or (443 if secure else 80)
            return Address(secure, parts.hostname, port, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"))
    raise ValueError(f"url: expected {EXPECTED}, got {url!r}")
