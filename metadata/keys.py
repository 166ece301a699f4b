"""Secrets: the API keys of tenants, and the cluster's keys that sign lease tokens.

An API key is the credential `mp_<key id>_<secret>`: the id is hex (so the first `_` after it ends it), the secret
32 random bytes as base64url. Only SHA-256 of the secret is stored: a secret of 256 random bits cannot be guessed
from its hash, so the slow hashes that passwords need would only slow down every check. An unknown key, a wrong
secret and a revoked key are told apart by nobody: same error, and the comparison takes place in each case.

Lease keys rotate by clock: a new one a day, each valid for LEASE_KEY_KEEP_MS after it stopped being the newest at
the latest. They never leave the cluster.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

import msgspec
from sqlalchemy import Connection, Row, bindparam, select

from millpond.core import limits
from millpond.core.clock import Random
from millpond.core.errors import BadRequest, NotFound, Unauthenticated
from millpond.metadata.catalog import find_tenant, make_tenant
from millpond.metadata.client import KeyInfo, LeaseKey, NewKey, Principal
from millpond.metadata.head import lock, raise_version
from millpond.metadata.tables import API_KEYS, LEASE_KEYS, TENANTS

SCOPES = ("produce", "consume", "admin")
_KEY_ID_BYTES = 8
_SECRET_BYTES = 32
_LEASE_SECRET_BYTES = 32
_NO_HASH = bytes(hashlib.sha256().digest_size)  # of an unknown key: no secret has it
_ANY = select(API_KEYS.c.key_id).limit(1)
_KEY = select(API_KEYS, TENANTS.c.name.label("tenant")).join(TENANTS).where(API_KEYS.c.key_id == bindparam("key_id"))


def create_key(
    connection: Connection, tenant: str, name: str, scopes: list[str], now_ms: int, random: Random
) -> NewKey:
    """A new key of `tenant`, which is made when it is not there: its secret is in the answer and nowhere else."""
    if not (0 < len(name) <= limits.NAME_CHARS and name.isprintable()):
        raise BadRequest.field("name", f"1 to {limits.NAME_CHARS} printable characters", name)
    if not scopes or any(scope not in SCOPES for scope in scopes):
        raise BadRequest.field("scopes", f"some of {', '.join(SCOPES)}", scopes)
    lock(connection)
    tenant_id = make_tenant(connection, tenant, now_ms)
    key_id = random.bytes(_KEY_ID_BYTES).hex()
    secret = base64.urlsafe_b64encode(random.bytes(_SECRET_BYTES)).rstrip(b"=").decode()
    ordered = [scope for scope in SCOPES if scope in scopes]
    row = {
        "key_id": key_id,
        "tenant_id": tenant_id,
        "name": name,
        "scopes": msgspec.json.encode(ordered).decode(),
        "secret_hash": hash_secret(secret),
        "created_ms": now_ms,
    }
    connection.execute(API_KEYS.insert().values(row))
    raise_version(connection)
    return NewKey(KeyInfo(key_id, name, ordered, now_ms, None), secret)


def keys(connection: Connection, tenant: str) -> list[KeyInfo]:
    """All of a tenant, revoked ones too, oldest first."""
    tenant_id = find_tenant(connection, tenant)
    ordered = select(API_KEYS).where(API_KEYS.c.tenant_id == tenant_id)
    rows = connection.execute(ordered.order_by(API_KEYS.c.created_ms, API_KEYS.c.key_id))
    return [KeyInfo(row.key_id, row.name, _scopes(row), row.created_ms, row.revoked_ms) for row in rows]


def revoke_key(connection: Connection, tenant: str, key_id: str, now_ms: int) -> None:
    """From the commit on the key fails. One that is revoked already stays as it is."""
    lock(connection)
    tenant_id = find_tenant(connection, tenant)
    own = (API_KEYS.c.key_id == key_id) & (API_KEYS.c.tenant_id == tenant_id)
    row = connection.execute(select(API_KEYS.c.revoked_ms).where(own)).one_or_none() if key_id.isalnum() else None
    if row is None:
        raise NotFound("key_not_found", f"no key {key_id[:80]}")
    if row.revoked_ms is None:
        connection.execute(API_KEYS.update().where(own).values(revoked_ms=now_ms))
        raise_version(connection)


def authenticate(connection: Connection, key_id: str, secret: str) -> Principal:
    """Who the key stands for. Raises Unauthenticated, the same for every reason."""
    row = connection.execute(_KEY, {"key_id": key_id}).one_or_none() if key_id.isalnum() else None
    expected = _NO_HASH if row is None else row.secret_hash
    matches = hmac.compare_digest(hash_secret(secret), expected)
    if row is None or not matches or row.revoked_ms is not None:
        raise Unauthenticated("unauthenticated", "unknown, wrong or revoked key")
    return Principal(row.tenant_id, row.tenant, row.key_id, _scopes(row))


def keys_exist(connection: Connection) -> bool:
    return connection.execute(_ANY).scalar() is not None


def hash_secret(secret: str) -> bytes:
    """What is stored of an API key's secret, 32 bytes. `surrogatepass`: any text has a hash."""
    return hashlib.sha256(b"millpond api key 1\0" + secret.encode("utf-8", "surrogatepass")).digest()


def lease_keys(connection: Connection, now_ms: int) -> list[LeaseKey]:
    """The keys valid at `now_ms`, newest first."""
    rows = select(LEASE_KEYS).where(LEASE_KEYS.c.until_ms > now_ms).order_by(LEASE_KEYS.c.number.desc())
    return [LeaseKey(row.number, row.secret, row.until_ms) for row in connection.execute(rows)]


def rotation_due(connection: Connection, now_ms: int) -> bool:
    """Whether the newest key is too old to sign with, or there is none."""
    newest = select(LEASE_KEYS.c.created_ms).order_by(LEASE_KEYS.c.number.desc()).limit(1)
    created_ms = connection.execute(newest).scalar()
    return created_ms is None or now_ms - created_ms >= limits.LEASE_KEY_ROTATE_MS


def rotate_lease_keys(connection: Connection, now_ms: int, random: Random) -> list[LeaseKey]:
    """A new key when one is due (another process may have been quicker), without those that ended."""
    lock(connection)
    if rotation_due(connection, now_ms):
        row = {
            "secret": random.bytes(_LEASE_SECRET_BYTES),
            "created_ms": now_ms,
            "until_ms": now_ms + limits.LEASE_KEY_ROTATE_MS + limits.LEASE_KEY_KEEP_MS,
        }
        connection.execute(LEASE_KEYS.insert().values(row))
        connection.execute(LEASE_KEYS.delete().where(LEASE_KEYS.c.until_ms <= now_ms))
    return lease_keys(connection, now_ms)


def _scopes(row: Row[*tuple[object, ...]]) -> list[str]:
    scopes: list[str] = msgspec.json.decode(row.scopes, type=list[str])
    return scopes
