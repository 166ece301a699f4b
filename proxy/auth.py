"""The proxy's gate: which credential may make which call.

A route's scope is `produce`, `consume`, `admin`, `any` (a credential of any scope) or None (open to all, such as
/healthz). Tenants are kept apart by the names of their own objects only: handlers look things up under
`call.principal.tenant`, so a foreign object is simply not found.
"""

from __future__ import annotations

from aiohttp import web

from millpond.core.errors import Forbidden, StartupError
from millpond.core.http.prompt import Headed
from millpond.core.http.routing import Scope
from millpond.core.http.server import is_loopback
from millpond.metadata.client import Principal
from millpond.proxy.catalog import Catalog

NOBODY = Principal(0, "", "", [])


class KeyGate:
    """Bearer keys, checked by the catalog. In open mode whoever comes without a key is the default tenant."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def known(self, request: Headed, scope: Scope | None) -> Principal | None:
        if scope is None:
            return NOBODY
        principal = self._catalog.known_principal(request.headers.get("Authorization"))
        if principal is not None:
            check_scope(principal, scope)
        return principal

    async def admit(self, request: web.BaseRequest, scope: Scope | None) -> Principal:
        """Raises Unauthenticated, Forbidden, Unavailable."""
        principal = await self._catalog.principal(request.headers.get("Authorization"))
        if scope is not None:
            check_scope(principal, scope)
        return principal


def check_scope(principal: Principal, scope: Scope) -> None:
    """Raises Forbidden when the key lacks `scope`."""
    if scope != "any" and scope not in principal.scopes:
        raise Forbidden("forbidden", f"this key lacks the scope {scope!r}", scope=scope)


def check_listen(listen: str, keys_exist: bool) -> None:
    """Raises StartupError: without any key only this machine may connect."""
    if not keys_exist and not is_loopback(listen):
        raise StartupError(
            f"refusing to listen on {listen}: no API key exists, so everybody there could do everything",
            "make a key first (start on 127.0.0.1, then POST /v1/tenant/keys), or listen on 127.0.0.1",
        )
