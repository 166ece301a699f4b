"""One behaviour suite for every way to reach the metadata part: direct calls on SQLite and on PostgreSQL, the same
pushed through the codec of calls between parts, and real HTTP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from sqlalchemy import create_engine, text

from millpond.core import limits
from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.errors import BadRequest, Conflict, MillpondError, NotFound, Unauthenticated
from millpond.core.http import rpc
from millpond.core.http.routing import Router
from millpond.core.http.secret import SECRET_HEADER, same_secret
from millpond.core.http.server import HttpServer
from millpond.metadata.client import (
    MetadataClient,
    ObjectRange,
    ReplayPlan,
    Span,
    TierObject,
    TopicInfo,
    TopicSettings,
)
from millpond.metadata.local import LocalMetadata
from millpond.metadata.remote import RemoteMetadata
from millpond.metadata.server import routes

WAYS = ["sqlite", "codec", "http", "postgresql"]
CLUSTER_SECRET = "a secret of one test's loopback listener"  # noqa: S105
SETTINGS = TopicSettings(queues=3)


class SteppedClock(SystemClock):
    """The wall clock stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def wall_ms(self) -> int:
        return self.now_ms


class SecretGate:
    """The cluster secret opens every route."""

    def known(self, request: Any, scope: object) -> object:
        if not same_secret(request.headers.get(SECRET_HEADER), CLUSTER_SECRET):
            raise Unauthenticated("unauthenticated", "cluster secret")
        return object()

    async def admit(self, request: Any, scope: object) -> object:
        raise AssertionError("known answers or raises")


# -- a PostgreSQL of our own ------------------------------------------------------------------------------


def _postgresql_programs() -> Path | None:
    """The folder of initdb and pg_ctl: on PATH, or where Debian keeps the servers beside each other."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    return max((path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")), default=None)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """URL (without database) of a private server on a Unix socket, gone after the session."""
    programs = _postgresql_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server programs here (initdb): Debian has them in the package postgresql")
    owner: dict[str, Any] = {}
    if os.geteuid() == 0:  # the server refuses to run as root
        if "postgres" not in {user.pw_name for user in pwd.getpwall()}:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        owner = {"user": "postgres", "group": "postgres", "extra_groups": []}
    folder = Path(tempfile.mkdtemp(prefix="millpond-pg-"))
    if owner:
        shutil.chown(folder, "postgres", "postgres")

    def run(program: str, *arguments: str) -> None:
        command = [str(programs / program), "-D", str(folder / "data"), *arguments]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=60, **owner)  # noqa: S603

    try:
        run("initdb", "--auth=trust", "--username=postgres", "--no-sync", "--locale=C.UTF-8", "--encoding=UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off -c max_connections=60"
        run("pg_ctl", "--wait", f"--options={options}", f"--log={folder / 'log'}", "start")
        try:
            yield f"postgresql://postgres@/{{}}?host={folder}"
        finally:
            run("pg_ctl", "--wait", "--mode=immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_numbers = itertools.count(1)


def _new_database(server: str) -> str:
    name = f"millpond_{next(_numbers)}"
    engine = create_engine(server.format("postgres").replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server.format(name)


# -- the ways to reach it ---------------------------------------------------------------------------------


class Pond(NamedTuple):
    """The metadata as its caller sees it, its clock, and the URL of its database."""

    metadata: MetadataClient
    clock: SteppedClock
    url: str


@contextlib.asynccontextmanager
async def _over_http(local: LocalMetadata) -> AsyncIterator[MetadataClient]:
    server = HttpServer(Router(routes(local)), SecretGate(), None, SystemRandom())
    await server.start("127.0.0.1:0")
    remote = RemoteMetadata(server.address, CLUSTER_SECRET)
    try:
        yield remote
    finally:
        await remote.close()
        await server.stop()


@pytest.fixture(params=WAYS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return _new_database(request.getfixturevalue("postgresql"))
    return f"sqlite:///{tmp_path / 'metadata.db'}"


@pytest.fixture
async def pond(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Pond]:
    clock = SteppedClock()
    local = await LocalMetadata.open(url, clock, SystemRandom())
    way = request.node.callspec.params["url"]
    try:
        if way == "http":
            async with _over_http(local) as remote:
                yield Pond(remote, clock, url)
        else:
            direct: MetadataClient = local
            through = rpc.through_codec(MetadataClient, direct) if way == "codec" else direct
            yield Pond(through, clock, url)
    finally:
        await local.close()


@pytest.fixture
def metadata(pond: Pond) -> MetadataClient:
    return pond.metadata


async def made(metadata: MetadataClient, name: str = "orders", settings: TopicSettings = SETTINGS) -> TopicInfo:
    info, created = await metadata.put_topic("default", name, settings)
    assert created
    return info


def refuses(error: type[MillpondError], code: str) -> pytest.RaisesExc[MillpondError]:
    return pytest.RaisesExc(error, check=lambda raised: raised.code == code)


# -- topics -----------------------------------------------------------------------------------------------


async def test_put_topic_creates(metadata: MetadataClient) -> None:
    """A new topic has its settings, its queues in order, one span each, and is found by name and by id."""
    info = await made(metadata)
    assert (info.tenant, info.name, info.tier_name, info.settings) == ("default", "orders", "orders", SETTINGS)
    assert [queue.queue for queue in info.queues] == [0, 1, 2]
    assert [queue.spans for queue in info.queues] == [[Span(0, "a")]] * 3
    assert await metadata.topic("default", "orders") == info
    assert await metadata.topic_by_id(info.topic_id) == info


async def test_put_topic_again(metadata: MetadataClient) -> None:
    """Equal settings answer the topic there is; others are topic_differs."""
    info = await made(metadata)
    assert await metadata.put_topic("default", "orders", SETTINGS) == (info, False)
    with refuses(Conflict, "topic_differs"):
        await metadata.put_topic("default", "orders", TopicSettings(queues=4))


@pytest.mark.parametrize("name", ["", "a..b", "a/b", "a\0b", ".a", "x" * 128, "a~2", "ü"])
async def test_bad_names(metadata: MetadataClient, name: str) -> None:
    """A bad name is refused for topics and groups, written or read."""
    with refuses(BadRequest, "invalid_name"):
        await metadata.put_topic("default", name, SETTINGS)
    with refuses(BadRequest, "invalid_name"):
        await metadata.topic("default", name)
    with refuses(BadRequest, "invalid_name"):
        await metadata.group(1, name)


@pytest.mark.parametrize(
    "changes",
    [
        {"queues": 0},
        {"queues": limits.QUEUES_PER_TOPIC + 1},
        {"max_message_bytes": limits.MESSAGE_BYTES + 1},
        {"max_message_bytes": 0},
        {"retention_ms": 0},
        {"retention_bytes": -1},
        {"dedup_window_ms": -1},
        {"dedup_window_ms": 2**62},
    ],
)
async def test_settings_have_bounds(metadata: MetadataClient, changes: dict[str, int]) -> None:
    """A setting out of its bounds is refused, in a new topic and in a patch, and nothing is half done."""
    with refuses(BadRequest, "invalid_request"):
        await metadata.put_topic("default", "orders", msgspec.structs.replace(SETTINGS, **changes))
    with refuses(NotFound, "topic_not_found"):
        await metadata.topic("default", "orders")
    info = await made(metadata)
    with refuses(BadRequest, "invalid_request"):
        await metadata.patch_topic("default", "orders", dict(changes))
    assert await metadata.topic("default", "orders") == info


async def test_patch_topic(metadata: MetadataClient) -> None:
    """A patch changes what it names; queues grow with fresh ids and never shrink."""
    info = await made(metadata)
    patched = await metadata.patch_topic("default", "orders", {"queues": 5, "retention_ms": 1_000})
    assert patched.settings == TopicSettings(queues=5, retention_ms=1_000)
    assert patched.queues[:3] == info.queues
    assert [queue.queue for queue in patched.queues] == [0, 1, 2, 3, 4]
    assert patched.version > info.version
    with refuses(BadRequest, "invalid_request"):
        await metadata.patch_topic("default", "orders", {"queues": 4})
    assert (await metadata.patch_topic("default", "orders", {"retention_ms": None})).settings == TopicSettings(queues=5)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"colour": "red"}, "unknown_field"),
        ({"queues": "four"}, "invalid_request"),
        ({"durability": "no"}, "invalid_request"),
    ],
)
async def test_patch_topic_is_strict(metadata: MetadataClient, changes: dict[str, object], code: str) -> None:
    """Unknown fields and wrong types are refused."""
    await made(metadata)
    with refuses(BadRequest, code):
        await metadata.patch_topic("default", "orders", changes)


async def test_topics_in_pages(metadata: MetadataClient) -> None:
    """Topics come by name in code point order, page by page."""
    names = ["b", "B", "a-1", "a.1", "a_1", "a1", "Z", "0"]
    for name in names:
        await made(metadata, name)
    found: list[str] = []
    while page := await metadata.topics("default", found[-1] if found else "", 3):
        found += [info.name for info in page]
    assert found == sorted(names)


async def test_deleted_topic_is_gone(metadata: MetadataClient) -> None:
    """A deleted topic and its groups are found no more; deleting twice is topic_not_found."""
    info = await made(metadata)
    await metadata.put_group(info.topic_id, "g", "earliest", None, 10)
    assert (await metadata.delete_topic("default", "orders")).topic_id == info.topic_id
    for call in (
        metadata.topic("default", "orders"),
        metadata.topic_by_id(info.topic_id),
        metadata.delete_topic("default", "orders"),
        metadata.groups(info.topic_id),
        metadata.put_group(info.topic_id, "g", "earliest", None, 10),
        metadata.tier_view(info.topic_id),
    ):
        with refuses(NotFound, "topic_not_found"):
            await call
    assert await metadata.topics("default", "", 10) == []


async def test_recreated_topic_shares_nothing(metadata: MetadataClient) -> None:
    """A topic made again has new topic and queue ids and its own tier name, each time another."""
    seen: set[int] = set()
    queues: set[int] = set()
    tier_names = []
    for _ in range(3):
        info = await made(metadata)
        assert info.topic_id not in seen
        assert queues.isdisjoint(queue.queue_id for queue in info.queues)
        seen.add(info.topic_id)
        queues |= {queue.queue_id for queue in info.queues}
        tier_names.append(info.tier_name)
        await metadata.delete_topic("default", "orders")
    assert tier_names == ["orders", "orders~2", "orders~3"]


async def test_placement_takes_turns(metadata: MetadataClient) -> None:
    """Queues of a new topic are spread over the registered store groups, also those a patch adds."""
    for store_group in ("a", "b", "c"):
        await metadata.register_store(store_group, f"node-{store_group}", "")
    info = await made(metadata, settings=TopicSettings(queues=4))
    info = await metadata.patch_topic("default", "orders", {"queues": 6})
    placed = [queue.spans[0].store_group for queue in info.queues]
    assert sorted(placed) == ["a", "a", "b", "b", "c", "c"]
    assert placed[:3] == placed[3:]


async def test_foreign_tenant_sees_nothing(metadata: MetadataClient) -> None:
    """The same topic name of two tenants is two topics."""
    await metadata.create_key("other", "k", ["admin"])
    mine = await made(metadata)
    with refuses(NotFound, "topic_not_found"):
        await metadata.topic("other", "orders")
    theirs, created = await metadata.put_topic("other", "orders", TopicSettings(queues=1))
    assert created
    assert theirs.topic_id != mine.topic_id
    assert [info.tenant for info in await metadata.topics("other", "", 10)] == ["other"]
    with refuses(BadRequest, "invalid_request"):
        await metadata.put_topic("nobody", "orders", SETTINGS)


# -- groups -----------------------------------------------------------------------------------------------


async def test_groups(metadata: MetadataClient) -> None:
    """A group is made once, found again, and refused with another filter."""
    topic = await made(metadata)
    info, created = await metadata.put_group(topic.topic_id, "mail", "earliest", "a || b", 100)
    assert created
    assert (info.topic_id, info.name, info.start, info.filter_tag, info.max_in_flight) == (
        topic.topic_id, "mail", "earliest", "a || b", 100,
    )  # fmt: skip
    assert await metadata.put_group(topic.topic_id, "mail", "latest", "a || b", 5) == (info, False)
    with refuses(Conflict, "filter_differs"):
        await metadata.put_group(topic.topic_id, "mail", "earliest", None, 100)
    assert await metadata.group(topic.topic_id, "mail") == info
    assert await metadata.groups(topic.topic_id) == [info]


async def test_patch_group(metadata: MetadataClient) -> None:
    """Only a changed filter raises filter_version; unknown fields, types and bounds are checked."""
    topic = await made(metadata)
    info, _ = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    more = await metadata.patch_group(topic.topic_id, "mail", {"max_in_flight": 200})
    assert (more.max_in_flight, more.filter_version) == (200, info.filter_version)
    tagged = await metadata.patch_group(topic.topic_id, "mail", {"filter_tag": "x"})
    assert (tagged.filter_tag, tagged.filter_version) == ("x", info.filter_version + 1)
    assert await metadata.patch_group(topic.topic_id, "mail", {"filter_tag": "x"}) == tagged
    assert (await metadata.patch_group(topic.topic_id, "mail", {"filter_tag": None})).filter_tag is None
    with refuses(BadRequest, "unknown_field"):
        await metadata.patch_group(topic.topic_id, "mail", {"start": "earliest"})
    for changes in ({"max_in_flight": 0}, {"max_in_flight": "many"}, {"filter_tag": ""}, {"filter_tag": "\0"}):
        with refuses(BadRequest, "invalid_request"):
            await metadata.patch_group(topic.topic_id, "mail", dict(changes))


async def test_group_ids_are_not_reused(metadata: MetadataClient) -> None:
    """A group made again after deletion is another group."""
    topic = await made(metadata)
    first, _ = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    assert await metadata.delete_group(topic.topic_id, "mail") == first
    with refuses(NotFound, "group_not_found"):
        await metadata.delete_group(topic.topic_id, "mail")
    second, created = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    assert created
    assert second.group_id > first.group_id


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

    await metadata.delete_group(topic.topic_id, "mail")
    changes = await metadata.changes(changes.version, 0)
    assert (changes.groups, changes.deleted_group_ids) == ([], [group.group_id])

    second, _ = await metadata.put_group(topic.topic_id, "mail", "latest", None, 100)
    version = (await metadata.changes(changes.version, 0)).version
    await metadata.delete_topic("default", "orders")
    changes = await metadata.changes(version, 0)
    assert (changes.topics, changes.deleted_topic_ids) == ([], [topic.topic_id])
    assert changes.deleted_group_ids == [second.group_id]

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
    other = await LocalMetadata.open(pond.url, pond.clock, SystemRandom())
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


# -- tier manifest ----------------------------------------------------------------------------------------


def an_object(topic: TopicInfo, name: str, *ranges: tuple[int, int, int]) -> TierObject:
    """Object `name` with ranges (queue, first, end)."""
    held = [
        ObjectRange(topic.queues[queue].queue_id, queue, first, end, end - first, first, end, None, None)
        for queue, first, end in ranges
    ]
    return TierObject(name, topic.topic_id, f"v1/{name}.parquet", 1_000, "00" * 32, 100, held)


async def sealed(metadata: MetadataClient, obj: TierObject, epoch: int = 1) -> int:
    await metadata.tier_start("a", epoch, obj)
    return await metadata.tier_commit("a", epoch, obj.object_id)


@pytest.fixture
async def topic(metadata: MetadataClient) -> TopicInfo:
    await metadata.register_store("a", "n1", "")
    return await made(metadata)


async def test_commit_moves_tiered_to(metadata: MetadataClient, topic: TopicInfo) -> None:
    """A committed object is in the view, its queues are tiered to its ends, and the version is one more."""
    obj = an_object(topic, "o1", (0, 0, 10), (2, 0, 5))
    await metadata.tier_start("a", 1, obj)
    assert (await metadata.tier_view(topic.topic_id)).objects == []
    assert await metadata.tier_commit("a", 1, "o1") == 1
    view = await metadata.tier_view(topic.topic_id)
    ids = [queue.queue_id for queue in topic.queues]
    assert (view.version, view.objects) == (1, [obj])
    assert view.tiered_to == {ids[0]: 10, ids[1]: 0, ids[2]: 5}
    assert await metadata.tiered_to([*ids, 10**6]) == view.tiered_to
    assert await sealed(metadata, an_object(topic, "o2", (0, 10, 20))) == 2


async def test_start_and_commit_are_idempotent(metadata: MetadataClient, topic: TopicInfo) -> None:
    """Repeating a start or a commit, also after a later commit, answers the same and changes nothing."""
    obj = an_object(topic, "o1", (1, 0, 10), (0, 0, 3))
    await metadata.tier_start("a", 1, obj)
    await metadata.tier_start("a", 1, obj)
    assert await metadata.tier_commit("a", 1, "o1") == 1
    await sealed(metadata, an_object(topic, "o2", (0, 3, 4)))
    assert await metadata.tier_commit("a", 1, "o1") == 1
    await metadata.tier_start("a", 1, obj)
    assert (await metadata.tier_view(topic.topic_id)).version == 2


@pytest.mark.parametrize("ranges", [[(0, 5, 15)], [(0, 11, 20)], [(1, 0, 4), (0, 0, 10)], [(1, 0, 4), (0, 12, 13)]])
async def test_commit_is_all_or_nothing(
    metadata: MetadataClient, topic: TopicInfo, ranges: list[tuple[int, int, int]]
) -> None:
    """A gap or an overlap in any queue aborts the commit for every queue."""
    await sealed(metadata, an_object(topic, "o1", (0, 0, 10)))
    before = await metadata.tier_view(topic.topic_id)
    await metadata.tier_start("a", 1, an_object(topic, "o2", *ranges))
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_commit("a", 1, "o2")
    assert await metadata.tier_view(topic.topic_id) == before


async def test_only_one_of_two_rivals_commits(metadata: MetadataClient, topic: TopicInfo) -> None:
    """Of objects with the same range committed at once exactly one wins."""
    for number in range(6):
        await metadata.tier_start("a", 1, an_object(topic, f"o{number}", (0, 0, 10)))
    answers = await asyncio.gather(
        *(metadata.tier_commit("a", 1, f"o{number}") for number in range(6)), return_exceptions=True
    )
    lost = [answer for answer in answers if isinstance(answer, Conflict) and answer.code == "manifest_conflict"]
    assert (answers.count(1), len(lost)) == (1, 5)
    assert len((await metadata.tier_view(topic.topic_id)).objects) == 1


async def test_superseded_epoch_cannot_write(metadata: MetadataClient, topic: TopicInfo) -> None:
    """After a restart of the store the earlier epoch can neither start nor commit, nor be committed by the new one."""
    await metadata.tier_start("a", 1, an_object(topic, "o1", (0, 0, 10)))
    await metadata.register_store("a", "n1", "")
    with refuses(Conflict, "epoch_superseded"):
        await metadata.tier_commit("a", 1, "o1")
    with refuses(Conflict, "epoch_superseded"):
        await metadata.tier_start("a", 1, an_object(topic, "o2", (0, 0, 10)))
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_commit("a", 2, "o1")
    assert await sealed(metadata, an_object(topic, "o3", (0, 0, 10)), epoch=2) == 1


async def test_aborted_object_stays_out(metadata: MetadataClient, topic: TopicInfo) -> None:
    """An aborted object cannot be committed or started again; a committed one cannot be aborted."""
    obj = an_object(topic, "o1", (0, 0, 10))
    await metadata.tier_start("a", 1, obj)
    await metadata.tier_abort("o1")
    await metadata.tier_abort("o1")
    await metadata.tier_abort("never seen")
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_commit("a", 1, "o1")
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_start("a", 1, obj)
    await sealed(metadata, an_object(topic, "o2", (0, 0, 10)))
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_abort("o2")


async def test_start_is_strict(metadata: MetadataClient, topic: TopicInfo) -> None:
    """Objects with foreign queues, of unknown stores or topics, or with impossible ranges are refused."""
    good = an_object(topic, "o1", (0, 0, 10))
    replace = msgspec.structs.replace
    other = await made(metadata, "other")
    foreign = replace(an_object(other, "o1", (0, 0, 10)), topic_id=topic.topic_id)
    with refuses(Conflict, "manifest_conflict"):
        await metadata.tier_start("a", 1, foreign)
    with refuses(Conflict, "epoch_superseded"):
        await metadata.tier_start("z", 1, good)
    with refuses(NotFound, "topic_not_found"):
        await metadata.tier_start("a", 1, replace(good, topic_id=10**6))
    for bad in (
        replace(good, ranges=[]),
        replace(good, ranges=good.ranges * 2),
        replace(good, footer_bytes=1_001),
        replace(good, path=""),
        an_object(topic, "o1", (0, 10, 10)),
        an_object(topic, "o1", (0, -1, 3)),
    ):
        with refuses(BadRequest, "invalid_request"):
            await metadata.tier_start("a", 1, bad)
    await metadata.tier_start("a", 1, good)
    for rival in (replace(good, bytes=2_000), replace(good, object_id="o9")):
        with refuses(Conflict, "manifest_conflict"):
            await metadata.tier_start("a", 1, rival)


async def test_view_of_a_window(metadata: MetadataClient, topic: TopicInfo) -> None:
    """A view of queues and offsets holds exactly the objects that overlap, whole, sorted by path."""
    for number in range(20):
        second = [(1, number * 5, number * 5 + 5)] if number % 2 == 0 and number < 2 else []
        await sealed(metadata, an_object(topic, f"o{number:02}", (0, number * 10, number * 10 + 10), *second))
    first, second_queue, empty = (queue.queue_id for queue in topic.queues)

    async def names(queue_ids: list[int] | None, from_offset: int = 0, to_offset: int | None = None) -> list[str]:
        view = await metadata.tier_view(topic.topic_id, queue_ids, from_offset, to_offset)
        return [obj.object_id for obj in view.objects]

    everything = [f"o{number:02}" for number in range(20)]
    assert await names(None) == everything
    assert await names([first]) == everything
    assert await names([first], 95) == everything[9:]
    assert await names([first], 100) == everything[10:]
    assert await names([first], 95, 101) == everything[9:11]
    assert await names([first], 0, 10) == everything[:1]
    assert await names([first], 200) == []
    assert await names([first], 50, 50) == []
    assert await names([second_queue]) == ["o00"]
    assert await names([second_queue], 5) == []
    assert await names([empty]) == []
    assert await names([]) == []
    assert await names(None, 190) == ["o19"]
    assert await names([first, second_queue], 0, 10) == ["o00"]
    (obj,) = (await metadata.tier_view(topic.topic_id, [second_queue])).objects
    assert len(obj.ranges) == 2


# -- replays ----------------------------------------------------------------------------------------------


def a_plan(**changes: Any) -> ReplayPlan:
    plan = ReplayPlan(
        replay_id="r1",
        tenant_id=1,
        source_topic="orders",
        source_topic_id=1,
        target_topic="again",
        target_topic_id=2,
        target_queues=4,
        clock="born",
        from_ms=1,
        to_ms=None,
        filter_tag="a || b",
        filter_properties={"status": "cancelled"},
        ranges={0: (0, 10), 1: (5, 7)},
        rate=None,
        created_ms=5,
    )
    return msgspec.structs.replace(plan, **changes)


async def test_replay_is_fixed_at_creation(metadata: MetadataClient) -> None:
    """The same request answers the first plan with its ranges; another one under that id is replay_differs."""
    info, created = await metadata.put_replay(a_plan())
    assert created
    assert (info.plan, info.state, info.progress, info.version) == (a_plan(), "planned", {}, 1)
    assert await metadata.put_replay(a_plan(ranges={0: (0, 99)}, created_ms=6)) == (info, False)
    with refuses(Conflict, "replay_differs"):
        await metadata.put_replay(a_plan(target_topic_id=3))
    assert await metadata.replay("default", "r1") == info
    assert await metadata.replays("default") == [info]
    with refuses(NotFound, "replay_not_found"):
        await metadata.replay("default", "r2")


async def test_replay_progress(metadata: MetadataClient) -> None:
    """Reports raise the version; progress never goes back; done is final."""
    await metadata.put_replay(a_plan())
    await metadata.update_replay("default", "r1", "running", {0: 5}, 5, 2, "")
    late = await metadata.update_replay("default", "r1", "running", {0: 3, 1: 6}, 6, 3, "line\none")
    assert (late.progress, late.read, late.published, late.version) == ({0: 5, 1: 6}, 6, 3, 3)
    assert late.detail == "line one"
    done = await metadata.update_replay("default", "r1", "done", {0: 10, 1: 7}, 12, 4, "")
    assert await metadata.update_replay("default", "r1", "running", {0: 1}, 1, 1, "") == done
    with refuses(BadRequest, "invalid_request"):
        await metadata.update_replay("default", "r1", "paused?", {}, 0, 0, "")
