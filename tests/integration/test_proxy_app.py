"""The whole proxy on a real catalog and a real store: what its own routes promise."""

from __future__ import annotations

import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from yarl import URL

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.config import ProxyConfig, StoreConfig, TierConfig
from millpond.core.errors import StartupError, Unavailable
from millpond.core.http.routing import Route, Router
from millpond.core.http.secret import SecretGate
from millpond.core.http.server import HttpServer
from millpond.core.tier.open import open_objects
from millpond.metadata import server as metadata_server
from millpond.metadata.local import LocalMetadata
from millpond.metadata.remote import RemoteMetadata
from millpond.proxy.app import Proxy
from millpond.proxy.catalog import OPEN_PRINCIPAL
from millpond.store import server as store_server
from millpond.store.client import GroupRef
from millpond.store.delivery import Delivery
from millpond.store.local import LocalStore
from millpond.store.remote import RemoteStore
from millpond.store.tail import Tail


class World:
    """One proxy over direct calls, and a client. `call` answers (status, decoded JSON or None)."""

    def __init__(
        self, proxy: Proxy, session: aiohttp.ClientSession, metadata: LocalMetadata, store: LocalStore
    ) -> None:
        self.proxy = proxy
        self.session = session
        self.metadata = metadata
        self.store = store
        self.headers: dict[str, str] = {}

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json", **self.headers, **headers}
        async with self.session.request(method, self.proxy.address + path, data=data, headers=headers) as response:
            content = await response.read()
            return response.status, msgspec.json.decode(content) if content else None

    async def produce(self, topic: str, *bodies: str, **more: Any) -> Any:
        messages = [{"body": body, **more} for body in bodies]
        status, answer = await self.call("POST", f"/v1/topics/{topic}/messages", {"messages": messages})
        assert status == 200, answer
        return answer


def size_of(url: str) -> int:
    return Path(url.removeprefix("file://")).stat().st_size


def ends(state: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """(queue, start, tiered to, end) of each queue of an answer."""
    return [(q["queue"], q["start_offset"], q["tiered_to"], q["end_offset"]) for q in state["queues"]]


SECRET = "s" * 40


async def internal(routes: list[Route], listen: str, ends: AsyncExitStack) -> str:
    """An internal listener's address."""
    server = HttpServer(Router(routes), SecretGate(SECRET), None, SystemRandom())
    await server.start(listen)
    ends.push_async_callback(server.stop, 1)
    return server.address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(params=["together", "apart"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Proxy, store and metadata by direct calls, and the same over HTTP."""
    clock, random = SystemClock(), SystemRandom()
    listen = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as ends:
        metadata = await LocalMetadata.open(f"sqlite:///{tmp_path}/metadata.db", clock, random)
        ends.push_async_callback(metadata.close)
        objects = open_objects(TierConfig(), tmp_path, clock, random)
        ends.push_async_callback(objects.close)
        config = StoreConfig(data=str(tmp_path / "store"), segment_bytes=1 << 20, advertise=f"http://{listen}")
        store = await LocalStore.open(config, TierConfig(), metadata, objects, clock, random)
        ends.push_async_callback(store.close)
        settings = ProxyConfig(listen="127.0.0.1:0")
        if request.param == "together":
            proxy = Proxy(settings, metadata, objects, clock, random, stores={"a": store})
        else:
            remote = RemoteMetadata(await internal(metadata_server.routes(metadata), "127.0.0.1:0", ends), SECRET)
            ends.push_async_callback(remote.close)
            await internal(store_server.routes(store), listen, ends)
            proxy = Proxy(
                settings, remote, objects, clock, random, open_store=lambda info: RemoteStore(info.address, SECRET)
            )
        await proxy.start()
        ends.push_async_callback(proxy.stop, 1)
        session = await ends.enter_async_context(aiohttp.ClientSession())
        yield World(proxy, session, metadata, store)


async def test_a_topic_is_made_once_and_changed(world: World) -> None:
    """PUT is idempotent and names a difference; PATCH changes what it names; queues only grow."""
    assert (await world.call("PUT", "/v1/topics/orders", {"queues": 2}))[0] == 201
    assert (await world.call("PUT", "/v1/topics/orders", {"queues": 2}))[0] == 200
    status, problem = await world.call("PUT", "/v1/topics/orders", {"queues": 3})
    assert (status, problem["code"]) == (409, "topic_differs")
    status, topic = await world.call("PATCH", "/v1/topics/orders", {"queues": 4, "retention": {"ms": 1_000}})
    assert (status, topic["queues"], topic["retention"]) == (200, 4, {"ms": 1_000, "bytes": None})
    assert (await world.call("PATCH", "/v1/topics/orders", {"queues": 3}))[0] in {400, 409}
    assert (await world.call("GET", "/v1/topics/orders"))[1] == topic


async def test_topics_come_in_pages(world: World) -> None:
    """Every topic is on exactly one page, in order of names."""
    for name in ("c", "a", "b"):
        await world.call("PUT", f"/v1/topics/{name}", {})
    _, first = await world.call("GET", "/v1/topics?page_size=2")
    _, second = await world.call("GET", f"/v1/topics?page_size=2&page_token={first['next_page_token']}")
    assert [topic["topic"] for page in (first, second) for topic in page["topics"]] == ["a", "b", "c"]
    assert "next_page_token" not in second
    assert len((await world.call("GET", "/v1/topics?page_size=1000"))[1]["topics"]) == 3


NAMES = ["..", "a..b", "a%2Fb", "a%00b", "x" * 128, "%20a", "-a", "%C3%A4"]


async def test_bad_names_are_refused_everywhere(world: World) -> None:
    """What is not a name never reaches the catalog or a disk."""
    for method, name in itertools.product(("PUT", "GET", "DELETE"), NAMES):
        for path in (f"/v1/topics/{name}", f"/v1/topics/{name}/groups/g", f"/v1/topics/t/groups/{name}"):
            url = URL(world.proxy.address + path, encoded=True)
            async with world.session.request(method, url) as response:
                assert (response.status, (await response.json())["code"]) == (400, "invalid_name"), (method, path)


ABSURD: list[tuple[dict[str, Any], str]] = [
    ({"queues": 0}, "queues"),
    ({"queues": -1}, "queues"),
    ({"queues": 10**30}, "queues"),
    ({"queues": 1.5}, "queues"),
    ({"retention": {"ms": 0}}, "retention.ms"),
    ({"max_message_bytes": 1 << 40}, "max_message_bytes"),
    ({"durability": "never"}, "durability"),
    ({"dedup_window_ms": -5}, "dedup_window_ms"),
    ({"queus": 1}, "queus"),
]


async def test_absurd_settings_are_refused(world: World) -> None:
    """Each problem names its field, and nothing was made."""
    for body, field in ABSURD:
        status, problem = await world.call("PUT", "/v1/topics/orders", body)
        assert (status, problem["errors"][0]["field"]) == (400, field)
    assert (await world.call("GET", "/v1/topics/orders"))[0] == 404


async def test_groups_are_made_changed_and_deleted(world: World) -> None:
    """A group has one filter at a time, in its canonical form, until it is changed by name."""
    await world.call("PUT", "/v1/topics/orders", {})
    path = "/v1/topics/orders/groups/g"
    status, group = await world.call("PUT", path, {"start": "earliest", "filter": {"tag": "b||a"}})
    assert (status, group["filter"], group["filter_version"]) == (201, {"tag": "a || b"}, 1)
    assert (await world.call("PUT", path, {"start": "earliest", "filter": {"tag": "a || b"}}))[0] == 200
    assert (await world.call("PUT", path, {"filter": {"tag": "c"}}))[1]["code"] == "filter_differs"
    assert (await world.call("PUT", path, {"filter": {"tag": "a||b"}}))[1]["code"] == "group_differs"
    _, changed = await world.call("PATCH", path, {"filter": {"tag": "*"}})
    assert (changed["filter"], changed["filter_version"]) == ({"tag": None}, 2)
    assert [each["group"] for each in (await world.call("GET", "/v1/topics/orders/groups"))[1]["groups"]] == ["g"]
    assert (await world.call("DELETE", path))[0] == 204
    assert (await world.call("GET", path))[1]["code"] == "group_not_found"


async def test_a_deleted_topic_is_gone_and_its_name_free(world: World) -> None:
    """The next topic of that name is another one, without the old one's messages."""
    _, first = await world.call("PUT", "/v1/topics/orders", {"queues": 1})
    await world.produce("orders", "a", "b")
    assert (await world.call("DELETE", "/v1/topics/orders"))[0] == 204
    assert (await world.call("GET", "/v1/topics/orders"))[1]["code"] == "topic_not_found"
    _, second = await world.call("PUT", "/v1/topics/orders", {"queues": 1})
    assert second["topic_id"] != first["topic_id"]
    _, state = await world.call("GET", "/v1/topics/orders/queues")
    assert ends(state) == [(0, 0, 0, 0)]


async def test_a_topic_is_deleted_while_its_store_cannot_be_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """For clients it is gone at once, and the store finds out for itself."""
    await world.call("PUT", "/v1/topics/orders", {"queues": 1})
    await world.produce("orders", "a")

    def away(_tail: Tail, _topic_id: int) -> None:
        raise Unavailable("shutting_down", "the store is shutting down")

    with monkeypatch.context() as patch:
        patch.setattr(Tail, "drop_topic", away)
        assert (await world.call("DELETE", "/v1/topics/orders"))[0] == 204
    assert (await world.call("DELETE", "/v1/topics/orders"))[1]["code"] == "topic_not_found"
    engine = world.store.engine
    assert len(engine.fold.queues) == 1
    await engine.retention.trim()
    assert len(engine.fold.queues) == 0


async def test_a_group_is_deleted_while_its_store_cannot_be_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """For clients it is gone at once, and the store finds out for itself."""
    await world.call("PUT", "/v1/topics/orders", {"queues": 1})
    path = "/v1/topics/orders/groups/g"
    assert (await world.call("PUT", path, {}))[0] == 201

    def away(_delivery: Delivery, _group: GroupRef) -> None:
        raise Unavailable("shutting_down", "the store is shutting down")

    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "delete_group", away)
        assert (await world.call("DELETE", path))[0] == 204
    assert (await world.call("DELETE", path))[1]["code"] == "group_not_found"
    engine = world.store.engine
    assert len(engine.fold.cursors) == 1
    await engine.retention.trim()
    assert len(engine.fold.cursors) == 0


async def test_history_is_planned_from_what_was_sealed(world: World) -> None:
    """After a flush the plan holds all messages in readable objects; another time prunes them."""
    await world.call("PUT", "/v1/topics/orders", {"queues": 1})
    await world.produce("orders", "a", "b", "c", born_ts=5_000)
    status, flushed = await world.call("POST", "/v1/topics/orders/flush")
    assert (status, flushed) == (200, {"queues": [{"queue": 0, "tiered_to": 3}]})
    _, plan = await world.call("GET", "/v1/topics/orders/history")
    [obj] = plan["objects"]
    assert size_of(obj["url"]) == obj["bytes"]
    assert [(r["first"], r["end"], r["rows"]) for r in obj["ranges"]] == [(0, 3, 3)]
    assert ends(plan) == [(0, 0, 3, 3)]
    for query, count in (("from=1&to=2", 0), ("from=5000&to=5001&clock=born", 1), ("from=5001&clock=born", 0),
                         ("to=5000&clock=born", 0), ("from=1", 1)):  # fmt: skip
        _, pruned = await world.call("GET", f"/v1/topics/orders/history?{query}")
        assert len(pruned["objects"]) == count, query
        assert pruned["queues"] == plan["queues"]


async def test_a_producer_session_is_shown_and_closed(world: World) -> None:
    """A restarted producer learns its last number; a closed session is not found."""
    await world.call("PUT", "/v1/topics/orders", {"queues": 2})
    producer = {"id": "replay.r.0", "queue": 1, "previous": None, "first": 0, "last": 1}
    body = {"messages": [{"body": "a"}, {"body": "b"}], "producer": producer}
    assert (await world.call("POST", "/v1/topics/orders/messages", body))[0] == 200
    path = "/v1/topics/orders/producers/replay.r.0"
    _, session = await world.call("GET", path)
    assert [(queue["queue"], queue["last"]) for queue in session["queues"]] == [(1, 1)]
    assert (await world.call("DELETE", path))[0] == 204
    assert (await world.call("GET", path))[1]["code"] == "producer_not_found"


async def test_a_replay_is_fixed_when_it_is_made(world: World) -> None:
    """Its ranges stay as they were although messages follow; another plan of that id is refused; progress is kept."""
    await world.call("PUT", "/v1/topics/orders", {"queues": 1})
    await world.call("PUT", "/v1/topics/copy", {"queues": 3})
    await world.produce("orders", "a", "b")
    wanted = {"topic": "orders", "target": "copy", "from": 0, "filter": {"tag": "b||a"}}
    status, replay = await world.call("PUT", "/v1/replays/r1", wanted)
    assert (status, replay["state"], replay["target_queues"], replay["filter"]["tag"]) == (201, "planned", 3, "a || b")
    assert replay["queues"] == [{"queue": 0, "first": 0, "end": 2, "at": 0}]
    await world.produce("orders", "c")
    status, again = await world.call("PUT", "/v1/replays/r1", wanted)
    assert (status, again["queues"]) == (200, replay["queues"])
    assert (await world.call("PUT", "/v1/replays/r1", {**wanted, "from": 1}))[1]["code"] == "replay_differs"
    progress = {"state": "running", "progress": {"0": 1}, "read": 1, "published": 0}
    _, moved = await world.call("POST", "/v1/replays/r1/progress", progress)
    assert (moved["state"], moved["queues"][0]["at"], moved["read"]) == ("running", 1, 1)
    assert (await world.call("POST", "/v1/replays/r1/progress", {**progress, "progress": {"0": 3}}))[0] == 400
    assert (await world.call("POST", "/v1/replays/r1/progress", {**progress, "progress": {"7": 0}}))[0] == 400
    assert (await world.call("GET", "/v1/replays/nope"))[1]["code"] == "replay_not_found"
    assert [each["replay_id"] for each in (await world.call("GET", "/v1/replays"))[1]["replays"]] == ["r1"]


async def test_the_first_key_ends_the_open_mode(world: World) -> None:
    """Before it everything is allowed, after it nothing without a key; scopes hold; a revoked key ends."""
    status, problem = await world.call("POST", "/v1/tenant/keys", {"name": "k", "scopes": ["produce"]})
    assert (status, problem["errors"][0]["field"]) == (400, "scopes")
    status, admin = await world.call("POST", "/v1/tenant/keys", {"name": "k", "scopes": ["admin"]})
    assert status == 201
    assert (await world.call("GET", "/v1/topics"))[0] == 401
    world.headers = {"Authorization": f"Bearer {admin['credential']}"}
    await world.call("PUT", "/v1/topics/orders", {})
    status, problem = await world.call("POST", "/v1/topics/orders/messages", {"messages": [{"body": "a"}]})
    assert (status, problem["code"]) == (403, "forbidden")
    _, other = await world.call("POST", "/v1/tenant/keys", {"name": "p", "scopes": ["produce"]})
    mine = {"Authorization": f"Bearer {other['credential']}"}
    status, _ = await world.call("POST", "/v1/topics/orders/messages", {"messages": [{"body": "a"}]}, **mine)
    assert status == 200
    assert (await world.call("DELETE", f"/v1/tenant/keys/{other['key_id']}"))[0] == 204
    assert (await world.call("GET", "/v1/topics", **mine))[0] == 401
    assert "credential" not in str((await world.call("GET", "/v1/tenant/keys"))[1])


async def test_a_foreign_tenant_finds_nothing(world: World) -> None:
    """Another tenant's key sees 404 for every object of this one."""
    await world.call("PUT", "/v1/topics/orders", {})
    await world.call("PUT", "/v1/topics/orders/groups/g", {})
    await world.call("PUT", "/v1/replays/r1", {"topic": "orders", "target": "orders"})
    made = await world.metadata.create_key("other", "k", ["produce", "consume", "admin"])
    world.headers = {"Authorization": f"Bearer mp_{made.key.key_id}_{made.secret}"}
    foreign = [
        ("GET", "/v1/topics/orders", None), ("PATCH", "/v1/topics/orders", {}), ("DELETE", "/v1/topics/orders", None),
        ("GET", "/v1/topics/orders/queues", None), ("GET", "/v1/topics/orders/groups/g", None),
        ("PUT", "/v1/topics/orders/groups/h", {}), ("DELETE", "/v1/topics/orders/groups/g", None),
        ("GET", "/v1/topics/orders/history", None), ("POST", "/v1/topics/orders/flush", None),
        ("GET", "/v1/topics/orders/producers/p", None), ("DELETE", "/v1/topics/orders/producers/p", None),
        ("POST", "/v1/topics/orders/messages", {"messages": [{"body": "a"}]}), ("GET", "/v1/replays/r1", None),
        ("POST", "/v1/replays/r1/progress", {"state": "done"}),
        ("PUT", "/v1/replays/r2", {"topic": "orders", "target": "orders"}),
    ]  # fmt: skip
    for method, path, body in foreign:
        assert (await world.call(method, path, body))[0] == 404, (method, path)
    assert (await world.call("GET", "/v1/topics"))[1] == {"topics": []}


async def test_operations_are_open_to_all(world: World) -> None:
    """Health, readiness, metrics and the interface's description need no key."""
    await world.metadata.create_key("default", "k", ["admin"])
    assert (await world.call("GET", "/healthz"))[0] == 200
    assert (await world.call("GET", "/readyz"))[1] == {"ready": True, "reasons": []}
    assert (await world.call("GET", "/openapi.json"))[1]["openapi"] == "3.1.0"
    async with world.session.get(world.proxy.address + "/metrics") as response:
        text = await response.text()
    assert 'millpond_store_up{group="a"} 1\n' in text
    assert "# TYPE millpond_proxy_requests_total counter\n" in text


async def test_the_open_principal_is_the_default_tenant(world: World) -> None:
    """Open mode's tenant id is the one that metadata gave the default tenant, so that its leases stay valid later."""
    made = await world.metadata.create_key("default", "k", ["admin"])
    who = await world.metadata.authenticate(made.key.key_id, made.secret)
    assert who.tenant_id == OPEN_PRINCIPAL.tenant_id


async def test_no_key_no_foreign_address(world: World, tmp_path: Path) -> None:
    """Without a key the proxy refuses to listen beyond this machine."""
    parts = world.proxy.parts
    other = Proxy(
        ProxyConfig(listen="0.0.0.0:0"), world.metadata, parts.objects, parts.clock, parts.random, stores={}
    )  # fmt: skip
    with pytest.raises(StartupError, match="no API key exists"):
        await other.start()
    await other.stop(0)
