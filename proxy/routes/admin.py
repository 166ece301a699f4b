"""The tenant's own: who am I, and API keys."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from millpond.core import limits
from millpond.core.errors import BadRequest
from millpond.core.http.call import JSON, Input, answer, empty
from millpond.core.http.routing import Route
from millpond.metadata.client import KeyInfo
from millpond.proxy.parts import ProxyCall

ScopeName = Literal["produce", "consume", "admin"]


class Tenant(msgspec.Struct, frozen=True):
    """Whose credential this is. `open`: no key was ever made, so that whoever is on this machine may do everything."""

    tenant: str
    key_id: str
    scopes: list[str]
    open: bool


class KeyInput(Input, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARS)]
    scopes: Annotated[list[ScopeName], Meta(min_length=1, extra_json_schema={"uniqueItems": True})]


class Key(msgspec.Struct, frozen=True):
    key_id: str
    name: str
    scopes: list[str]
    created_ms: int
    revoked_ms: int | None


class KeyList(msgspec.Struct, frozen=True):
    keys: list[Key]


class CreatedKey(msgspec.Struct, frozen=True):
    """`credential` is what to send as `Authorization: Bearer ...`. It is shown this once."""

    key_id: str
    name: str
    scopes: list[str]
    created_ms: int
    credential: str


async def get_tenant(call: ProxyCall) -> web.StreamResponse:
    who = call.principal
    return answer(Tenant(who.tenant, who.key_id, who.scopes, call.parts.catalog.is_open))


async def list_keys(call: ProxyCall) -> web.StreamResponse:
    keys = await call.parts.metadata.keys(call.principal.tenant)
    return answer(KeyList([_key(key) for key in keys]))


async def create_key(call: ProxyCall) -> web.StreamResponse:
    wanted = await call.json(KeyInput)
    if not wanted.name.isprintable():
        raise BadRequest.field("name", "printable characters", wanted.name)
    if len(set(wanted.scopes)) != len(wanted.scopes):
        raise BadRequest.field("scopes", "each once", wanted.scopes)
    parts = call.parts
    if parts.catalog.is_open and "admin" not in wanted.scopes:
        raise BadRequest.field("scopes", "admin too: the first key ends the open mode", wanted.scopes)
    made = await parts.metadata.create_key(call.principal.tenant, wanted.name, list(wanted.scopes))
    parts.catalog.forget_keys()
    key = made.key
    credential = f"mp_{key.key_id}_{made.secret}"
    created = CreatedKey(key.key_id, key.name, key.scopes, key.created_ms, credential)
    return answer(created, 201, {"Cache-Control": "no-store"})


async def revoke_key(call: ProxyCall) -> web.StreamResponse:
    await call.parts.metadata.revoke_key(call.principal.tenant, call.params["key_id"])
    call.parts.catalog.forget_keys()
    return empty()


def _key(key: KeyInfo) -> Key:
    return Key(key.key_id, key.name, key.scopes, key.created_ms, key.revoked_ms)


ROUTES = [
    Route(
        method="GET",
        path="/v1/tenant",
        handler=get_tenant,
        summary="Whose credential this is",
        answer=Tenant,
        scope="any",
    ),
    Route(
        method="GET", path="/v1/tenant/keys", handler=list_keys, summary="List API keys", answer=KeyList, scope="admin"
    ),
    Route(
        method="POST",
        path="/v1/tenant/keys",
        handler=create_key,
        summary="Make an API key",
        description="The first key of a deployment ends its open mode: from then on every call needs a key.",
        body={JSON: KeyInput},
        answer=CreatedKey,
        statuses=(201,),
        scope="admin",
    ),
    Route(
        method="DELETE",
        path="/v1/tenant/keys/{key_id}",
        handler=revoke_key,
        summary="Revoke an API key",
        statuses=(204,),
        scope="admin",
    ),
]
