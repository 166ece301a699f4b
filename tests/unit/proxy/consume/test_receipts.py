"""Lease tokens: what signs, what verifies, and that nothing else does."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from millpond.core.errors import Unavailable
from millpond.core.limits import CATALOG_STALE_SECONDS, LEASE_KEYS_SECONDS
from millpond.metadata.client import LeaseKey
from millpond.proxy import receipts
from millpond.proxy.receipts import Lease, LeaseTokens

LEASE = Lease(1, 7, 31, 11, 2, 5, 1_000_000)


@pytest.fixture(params=["the signer", "another proxy"])
def reader(request: pytest.FixtureRequest, world: Any) -> LeaseTokens:
    """Any proxy can settle any lease: only the cluster's keys are needed."""
    tokens: LeaseTokens = world.tokens
    return tokens if request.param == "the signer" else LeaseTokens(world.metadata, world.clock)


async def test_a_token_reads_as_what_was_signed(world: Any, reader: LeaseTokens) -> None:
    """All seven numbers come back, also great ones, and the token is short enough to stand in every message."""
    great = Lease(1, 2**31, 2**40, 2**53, 2**20, 2**62, 2**62)
    for lease in (LEASE, great):
        token = await world.tokens.sign(lease)
        assert await reader.read([token]) == [lease]
    assert len(await world.tokens.sign(LEASE)) <= 44


async def test_a_token_of_version_1(world: Any) -> None:
    """A lease given before an upgrade can be settled after it."""
    world.metadata.keys = [LeaseKey(3, bytes(range(32)), world.clock.wall_ms() + 10**9)]
    first = "AQMBBx8LAgXAhD0T2iQp4bql7rDVQhn4_r0k"
    assert await world.tokens.read([first]) == [LEASE]
    assert await world.tokens.sign(LEASE) == first


async def test_a_process_knows_only_so_many_tokens_by_heart(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it has forgotten are verified as another proxy's are."""
    monkeypatch.setattr(receipts, "SIGNED", 2)
    verified: list[bytes] = []
    verify = receipts._verify
    monkeypatch.setattr(receipts, "_verify", lambda *given: verified.append(given[2]) or verify(*given))
    leases = [LEASE._replace(lease=number) for number in range(3)]
    tokens = [await world.tokens.sign(lease) for lease in leases]
    assert await world.tokens.read(tokens[1:]) == leases[1:]
    assert not verified
    assert await world.tokens.read(tokens) == leases
    assert len(verified) == 1


async def test_every_changed_byte_makes_a_token_unknown(world: Any) -> None:
    """A forged token never reads as a lease, whichever byte was touched."""
    token = await world.tokens.sign(LEASE)
    data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    forged = []
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        forged.append(base64.urlsafe_b64encode(bytes(changed)).rstrip(b"=").decode())
    assert await world.tokens.read(forged) == [None] * len(forged)


@pytest.mark.parametrize("token", ["", ".", "x", "A" * 40, "A" * 10_000, "é" * 40, "a+/=", "\ud800", "\x00" * 40])
async def test_garbage_is_unknown(world: Any, token: str) -> None:
    """What is no token at all is None, never an exception."""
    assert await world.tokens.read([token]) == [None]


async def test_a_token_cut_short_is_unknown(world: Any) -> None:
    """Every prefix of a token is unknown."""
    token = await world.tokens.sign(LEASE)
    prefixes = [token[:end] for end in range(len(token))]
    assert await world.tokens.read(prefixes) == [None] * len(prefixes)


async def test_rotation_keeps_old_tokens_and_signs_with_the_newest(world: Any, reader: LeaseTokens) -> None:
    """After a rotation an old token still reads; a new one needs the new key."""
    old = await world.tokens.sign(LEASE)
    world.metadata.keys = [LeaseKey(2, b"two" * 11, world.clock.wall_ms() + 10**9), *world.metadata.keys]
    world.clock.now += LEASE_KEYS_SECONDS
    new = await world.tokens.sign(LEASE)
    assert old != new
    assert await reader.read([old, new]) == [LEASE, LEASE]
    world.metadata.keys = world.metadata.keys[1:]
    world.clock.now += LEASE_KEYS_SECONDS
    assert await reader.read([old, new]) == [LEASE, None]


async def test_a_key_that_is_over_verifies_no_more(world: Any, reader: LeaseTokens) -> None:
    """From `until_ms` on its tokens are unknown."""
    token = await world.tokens.sign(LEASE)
    world.metadata.keys = [LeaseKey(1, world.metadata.keys[0].secret, world.clock.wall_ms() + 500)]
    world.clock.now += LEASE_KEYS_SECONDS
    assert await reader.read([token]) == [None]


async def test_a_token_of_a_key_made_since_is_read(world: Any) -> None:
    """A proxy asks again when it meets a key number it does not know, without waiting for its next look."""
    await world.tokens.sign(LEASE)
    world.metadata.keys = [LeaseKey(2, b"two" * 11, world.clock.wall_ms() + 10**9), *world.metadata.keys]
    token = await LeaseTokens(world.metadata, world.clock).sign(LEASE)
    world.clock.now += 2
    assert await world.tokens.read([token]) == [LEASE]


async def test_forged_key_numbers_do_not_hammer_metadata(world: Any) -> None:
    """A thousand tokens of unknown keys within a second cost no call."""
    token = await world.tokens.sign(LEASE)
    data = bytearray(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    data[1] = 99
    forged = base64.urlsafe_b64encode(bytes(data)).rstrip(b"=").decode()
    for _ in range(1000):
        assert await world.tokens.read([forged]) == [None]
    assert world.metadata.asked == 1


async def test_metadata_may_be_away_for_a_while(world: Any) -> None:
    """Known keys go on being used, but not for ever; without any, it is an error."""
    token = await world.tokens.sign(LEASE)
    world.metadata.away = Unavailable("metadata_unavailable", "away")
    world.clock.now += LEASE_KEYS_SECONDS
    assert await world.tokens.read([token]) == [LEASE]
    world.clock.now += CATALOG_STALE_SECONDS
    with pytest.raises(Unavailable):
        await world.tokens.read([token])
    with pytest.raises(Unavailable):
        await LeaseTokens(world.metadata, world.clock).sign(LEASE)
