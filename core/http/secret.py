"""The cluster secret: what the parts show each other on the internal listener.

Made once, by the part that starts first (metadata), as a file only its owner can read; the others are given its
path. It is compared in constant time and never logged.
"""

from __future__ import annotations

import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from millpond.core.errors import Unauthenticated
from millpond.core.http.prompt import Headed
from millpond.core.http.routing import Scope

SECRET_HEADER = "Millpond-Cluster-Secret"  # noqa: S105 - the header's name, not a secret
SECRET_CHARS_LEAST = 32


def load_or_create_secret(path: Path) -> str:
    """The secret in `path`; a missing file is made (0600) with a fresh one, atomically.

    Raises ValueError when the file is readable by others or too short to be a secret, OSError when it cannot be made.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return load_secret(path)
    secret = secrets.token_urlsafe(48)
    with os.fdopen(handle, "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    return secret


def load_secret(path: Path) -> str:
    """The secret in an existing file. Raises FileNotFoundError, and ValueError as above."""
    mode = path.stat().st_mode
    if mode & 0o077:
        raise ValueError(f"{path} is readable by others (mode {mode & 0o777:o}): chmod 600 it")
    secret = path.read_text().strip()
    if len(secret) < SECRET_CHARS_LEAST:
        raise ValueError(f"{path} holds no cluster secret (at least {SECRET_CHARS_LEAST} characters)")
    return secret


def same_secret(given: str | None, secret: str) -> bool:
    """Compared in constant time; None and text outside ASCII are never the same."""
    return given is not None and hmac.compare_digest(given.encode(), secret.encode())


@dataclass(frozen=True, slots=True)
class Peer:
    """Another part of the same cluster, as a principal: of no tenant, trusted with all of them."""

    tenant_id: int = 0
    tenant: str = ""
    key_id: str = ""
    scopes: list[str] = field(default_factory=list)


_PEER = Peer()


class SecretGate:
    """The gate of an internal listener: the cluster's secret for every route that has a scope."""

    def __init__(self, secret: str) -> None:
        assert len(secret) >= SECRET_CHARS_LEAST, "an internal listener never goes without a secret"
        self._secret = secret

    def known(self, request: Headed, scope: Scope | None) -> Peer:
        """Raises Unauthenticated."""
        if scope is not None and not same_secret(request.headers.get(SECRET_HEADER), self._secret):
            raise Unauthenticated("unauthenticated", f"{SECRET_HEADER} is missing or of another cluster")
        return _PEER

    async def admit(self, request: web.BaseRequest, scope: Scope | None) -> Peer:
        return self.known(request, scope)
