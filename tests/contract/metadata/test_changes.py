"""What changed since a version, API keys, and which store there is."""

from __future__ import annotations

import asyncio

import pytest
from support.metadata import PATIENCE, SETTINGS, Pond, made, refuses

from millpond.core import limits
from millpond.core.clock import SystemRandom
from millpond.core.errors import BadRequest, Conflict, NotFound, Unauthenticated
from millpond.metadata.client import (
    MetadataClient,
)
from millpond.metadata.local import LocalMetadata

# -- changes ----------------------------------------------------------------------------------------------


async def test_changes_from_the_start(metadata: MetadataClient) -> None:
    """Version 0, or one that was never reached, gets everything there is."""
    topic = await made(metadata)
    group, _ = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    for since in (0, 10**9):
        changes = await metadata.changes(since, 0)
        assert changes.full
        assert ([info.name for info in changes.topics], changes.groups) == (["orders"], [group])


async def test_changes_since(metadata: MetadataClient) -> None:
    """Each kind of change appears once, in what follows the version before it, and not after."""
    topic = await made(metadata)
    await made(metadata, "quiet")
    version = (await metadata.changes(0, 0)).version

    group, _ = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    changes = await metadata.changes(version, 0)
    assert not changes.full
    assert ([info.name for info in changes.topics], changes.groups) == (["orders"], [group])

    post, _ = await metadata.put_group(topic.topic_id, "post", "latest", None, 100)
    changes = await metadata.changes(changes.version, 0)
    assert changes.groups == [post]

    await metadata.delete_group(topic.topic_id, "mail")
    changes = await metadata.changes(changes.version, 0)
    assert (changes.groups, changes.deleted_group_ids) == ([], [group.group_id])

    second, _ = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    version = (await metadata.changes(changes.version, 0)).version
    await metadata.delete_topic("default", "orders")
    changes = await metadata.changes(version, 0)
    assert (changes.topics, changes.deleted_topic_ids) == ([], [topic.topic_id])
    assert changes.deleted_group_ids == [post.group_id, second.group_id]

    after = await metadata.changes(changes.version, 0)
    assert (after.version, after.full, after.topics, after.deleted_topic_ids) == (changes.version, False, [], [])


async def test_what_changes_nothing_raises_no_version(metadata: MetadataClient) -> None:
    """Repeating a put or patching to the same values wakes nobody."""
    topic = await made(metadata)
    await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    version = (await metadata.changes(0, 0)).version
    await metadata.put_topic("default", "orders", SETTINGS)
    await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    await metadata.patch_topic("default", "orders", {"queues": 3})
    await metadata.patch_group(topic.topic_id, "mail", {"max_in_flight": 100})
    assert (await metadata.changes(version, 0)).version == version


async def test_changes_waits(metadata: MetadataClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting call answers as soon as something changes here, without the poll."""
    monkeypatch.setattr(limits, "FEED_POLL_MS", 60_000)
    version = (await metadata.changes(0, 0)).version
    waiting = asyncio.ensure_future(metadata.changes(version, 30_000))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    await made(metadata)
    changes = await asyncio.wait_for(waiting, 5)
    assert [info.name for info in changes.topics] == ["orders"]


async def test_changes_gives_up(metadata: MetadataClient) -> None:
    """Without a change the call ends after its wait, with the same version."""
    version = (await metadata.changes(0, 0)).version
    changes = await asyncio.wait_for(metadata.changes(version, 30), 5)
    assert (changes.version, changes.full, changes.topics) == (version, False, [])


async def test_changes_of_another_process(pond: Pond) -> None:
    """What another process writes into the same database is noticed too."""
    version = (await pond.metadata.changes(0, 0)).version
    waiting = asyncio.ensure_future(pond.metadata.changes(version, 30_000))
    other = await LocalMetadata.open(pond.url, pond.clock, SystemRandom(), **PATIENCE)
    try:
        await other.put_topic("default", "orders", SETTINGS)
        changes = await asyncio.wait_for(waiting, 10)
    finally:
        await other.close()
    assert [info.name for info in changes.topics] == ["orders"]


async def test_forgotten_deletions_make_it_full(metadata: MetadataClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is so far behind that deletions were forgotten starts afresh; others go on."""
    monkeypatch.setattr(limits, "FEED_TOMBSTONES", 3)
    start = (await metadata.changes(0, 0)).version
    for number in range(5):
        await made(metadata, f"t{number}")
        await metadata.delete_topic("default", f"t{number}")
    assert (await metadata.changes(start, 0)).full
    version = (await metadata.changes(0, 0)).version
    behind = await metadata.changes(version - 3, 0)
    assert not behind.full
    assert len(behind.deleted_topic_ids) == 2


# -- keys -------------------------------------------------------------------------------------------------


async def test_api_key(metadata: MetadataClient) -> None:
    """A key stands for its tenant until it is revoked; the list shows no secret."""
    assert not await metadata.keys_exist()
    new = await metadata.create_key("default", "billing service", ["consume", "produce"])
    assert await metadata.keys_exist()
    assert "_" not in new.key.key_id
    principal = await metadata.authenticate(new.key.key_id, new.secret)
    assert (principal.tenant, principal.key_id, principal.scopes) == (
        "default", new.key.key_id, ["produce", "consume"],
    )  # fmt: skip
    assert await metadata.keys("default") == [new.key]
    await metadata.revoke_key("default", new.key.key_id)
    with refuses(Unauthenticated, "unauthenticated"):
        await metadata.authenticate(new.key.key_id, new.secret)
    assert [key.revoked_ms is not None for key in await metadata.keys("default")] == [True]
    assert await metadata.keys_exist()


@pytest.mark.parametrize("wrong", ["", "x", "\0", "é"])
async def test_wrong_key(metadata: MetadataClient, wrong: str) -> None:
    """A wrong secret and an unknown id fail with the same words."""
    new = await metadata.create_key("default", "k", ["admin"])
    texts = set()
    for key_id, secret in ((new.key.key_id, wrong), (wrong, new.secret), (new.key.key_id, new.secret + "A")):
        with refuses(Unauthenticated, "unauthenticated") as raised:
            await metadata.authenticate(key_id, secret)
        texts.add(raised.value.detail)
    assert len(texts) == 1


async def test_create_key_is_strict(metadata: MetadataClient) -> None:
    """Unknown scopes, none at all and odd names are refused; so is a foreign key's revocation."""
    for name, scopes in (("k", []), ("k", ["root"]), ("", ["admin"]), ("a\nb", ["admin"])):
        with refuses(BadRequest, "invalid_request"):
            await metadata.create_key("default", name, scopes)
    theirs = await metadata.create_key("other", "k", ["admin"])
    with refuses(NotFound, "key_not_found"):
        await metadata.revoke_key("default", theirs.key.key_id)
    assert (await metadata.authenticate(theirs.key.key_id, theirs.secret)).tenant == "other"


async def test_keys_raise_the_version(metadata: MetadataClient) -> None:
    """Making and revoking a key moves the feed, so that caches ask again."""
    version = (await metadata.changes(0, 0)).version
    new = await metadata.create_key("default", "k", ["admin"])
    created = (await metadata.changes(version, 0)).version
    assert created > version
    await metadata.revoke_key("default", new.key.key_id)
    assert (await metadata.changes(created, 0)).version > created


async def test_lease_keys_rotate(pond: Pond) -> None:
    """A day later there is a new key in front; the old one stays valid to its end and then goes."""
    (first,) = await pond.metadata.lease_keys()
    assert len(first.secret) == 32
    pond.clock.now_ms += limits.LEASE_KEY_ROTATE_MS - 1
    assert await pond.metadata.lease_keys() == [first]
    pond.clock.now_ms += 1
    second, old = await pond.metadata.lease_keys()
    assert old == first
    assert second.number > first.number
    assert second.secret != first.secret
    pond.clock.now_ms = first.until_ms
    assert first not in await pond.metadata.lease_keys()


# -- stores -----------------------------------------------------------------------------------------------


async def test_every_start_raises_the_epoch(metadata: MetadataClient) -> None:
    """The same node again gets the next epoch; another node is refused and changes nothing."""
    assert (await metadata.register_store("a", "n1", "http://one:1")).epoch == 1
    again = await metadata.register_store("a", "n1", "http://one:2")
    assert again.epoch == 2
    with refuses(Conflict, "epoch_superseded"):
        await metadata.register_store("a", "n2", "http://two:1")
    assert await metadata.stores() == [again]
