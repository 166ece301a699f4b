"""What is stored of keys, and how they are compared."""

from __future__ import annotations

import base64
import hmac
from pathlib import Path

import pytest

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.errors import Unauthenticated
from millpond.metadata import keys
from millpond.metadata.local import LocalMetadata


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.db"


async def opened(path: Path) -> LocalMetadata:
    return await LocalMetadata.open(f"sqlite:///{path}", SystemClock(), SystemRandom())


async def test_secret_is_never_stored(path: Path) -> None:
    """No file of the database holds the secret of a key; it is 32 random bytes as base64url."""
    metadata = await opened(path)
    new = await metadata.create_key("default", "k", ["admin"])
    stored = b"".join(file.read_bytes() for file in path.parent.iterdir())
    await metadata.close()
    assert new.key.key_id.encode() in stored
    assert new.secret.encode() not in stored
    assert len(base64.urlsafe_b64decode(new.secret + "=")) == 32
    assert keys.hash_secret(new.secret) in stored


def test_hash_is_pinned() -> None:
    """The hash of a secret is part of the stored format: it must never change."""
    assert keys.hash_secret("secret").hex() == "1e9040fbdaa8a20046a5e30caaf6f425a3eff088b71b222ced3e5a2322877009"


async def test_comparison_is_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong secrets, unknown ids and revoked keys are all compared, whole hash with whole hash."""
    compared: list[tuple[int, int]] = []

    def spy(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return hmac.compare_digest(left, right)

    monkeypatch.setattr(keys, "hmac", type("Spy", (), {"compare_digest": staticmethod(spy)}))
    metadata = await opened(path)
    new = await metadata.create_key("default", "k", ["admin"])
    await metadata.authenticate(new.key.key_id, new.secret)
    await metadata.revoke_key("default", new.key.key_id)
    for key_id, secret in ((new.key.key_id, "x"), ("unknown", new.secret), (new.key.key_id, new.secret)):
        with pytest.raises(Unauthenticated):
            await metadata.authenticate(key_id, secret)
    await metadata.close()
    assert compared == [(32, 32)] * 4
