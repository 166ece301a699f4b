"""Spark against a real service: history across tier and store, and replays that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from millpond.client.producer import Producer
from millpond.core.hashing import hash_bytes
from millpond.spark.history import history
from millpond.spark.http import HttpClient, path_of
from millpond.spark.plan import fetch_plan
from millpond.spark.read_range import Range, read_range

SEEN_SECONDS = 90.0
RATE = 3_000  # messages a second: slow enough to be killed in the middle


def messages(first: int, count: int) -> pa.RecordBatch:
    """Numbered messages; one ms of `born_ts` and one of 50 keys each."""
    numbers = range(first, first + count)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([f"key {number % 50}".encode() for number in numbers]),
            "tag": pa.array(["even" if number % 2 == 0 else "odd" for number in numbers]),
            "born_ts": pa.array([1_000 + number for number in numbers]).cast(pa.timestamp("ms", "UTC")),
            "body": pa.array([str(number).encode() for number in numbers]),
        }
    )


def publish(url: str, topic: str, batch: pa.RecordBatch) -> None:
    async def send() -> None:
        async with Producer(topic, url=url) as producer:
            await producer.send_batch(batch)

    asyncio.run(send())


def create(url: str, topic: str, queues: int) -> None:
    with HttpClient(url) as client:
        client.send("PUT", path_of("topics", topic), {"queues": queues}, dict[str, Any])


def flush(url: str, topic: str) -> None:
    with HttpClient(url) as client:
        client.call("POST", path_of("topics", topic, "flush"))


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body)) for row in frame.select("body").collect())


def test_history_across_tier_and_store(service: Any, spark: SparkSession) -> None:
    """Sealed, then more, then sealed again under way: each message once by every way of reading."""
    create(service.url, "counted", 3)
    publish(service.url, "counted", messages(0, 3_000))
    flush(service.url, "counted")
    publish(service.url, "counted", messages(3_000, 2_000))
    tiered = history(spark, "counted", url=service.url)
    whole = history(spark, "counted", head=True, url=service.url)
    source = spark.read.format("millpond").options(topic="counted", url=service.url).load()
    assert numbers(tiered) == list(range(3_000))
    assert numbers(whole) == list(range(5_000))
    flush(service.url, "counted")
    assert numbers(whole) == list(range(5_000))
    assert numbers(source) == list(range(5_000))
    born = history(spark, "counted", start=1_500, end=4_500, clock="born", url=service.url)
    assert numbers(born) == list(range(500, 3_500))
    odd = spark.read.format("millpond").options(
        topic="counted", url=service.url, tag="odd", endTime="1011", clock="born"
    )
    assert numbers(odd.load()) == [1, 3, 5, 7, 9]


def replay(url: str, directory: Path) -> subprocess.Popen[bytes]:
    """The command, in a session of its own, so that all of its processes can be killed."""
    command = [sys.executable, "-m", "millpond", "replay", "source", "copy", "--url", url, "--tag", "even"]
    command += ["--from", "1000", "--clock", "born", "--id", "killed", "--rate", str(RATE), "--json"]
    return subprocess.Popen(  # noqa: S603  # this program
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(directory)},
    )


def wait_until_published(client: HttpClient, least: int) -> None:
    """Until the target holds some of the replay's messages."""
    pause = threading.Event()
    for _ in range(int(SEEN_SECONDS * 10)):
        if sum(queue.end_offset for queue in fetch_plan(client, "copy").queues) >= least:
            return
        pause.wait(0.1)
    raise AssertionError("the replay published nothing")


def copied(client: HttpClient, topic: str) -> dict[int, list[int]]:
    """Source queue -> source offsets in the order of the target, each target queue checked for order and route."""
    found: dict[int, list[int]] = defaultdict(list)
    plan = fetch_plan(client, topic)
    for queue in plan.queues:
        per_source: dict[int, list[int]] = defaultdict(list)
        for batch in read_range(client, Range(topic, queue.queue, 0, queue.end_offset, plan.topic_id)):
            for key, origin in zip(batch["key"].to_pylist(), batch["origin"].to_pylist(), strict=True):
                came = json.loads(origin)
                assert hash_bytes(key) % len(plan.queues) == queue.queue
                per_source[came["queue"]].append(came["offset"])
        for source, offsets in per_source.items():
            assert offsets == sorted(offsets), "source order per source queue"
            found[source] += offsets
    return found


def test_a_replay_that_is_killed(service: Any, tmp_path: Path) -> None:
    """Replay and service are killed with -9 in the middle; run again, each message is at the target once."""
    create(service.url, "source", 2)
    create(service.url, "copy", 3)
    publish(service.url, "source", messages(0, 20_000))
    flush(service.url, "source")
    publish(service.url, "source", messages(20_000, 10_000))
    with HttpClient(service.url) as client:
        first = replay(service.url, tmp_path)
        wait_until_published(client, 1_000)
        service.kill()
        service.start()
        client.close()
        wait_until_published(client, 3_000)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        before = sum(queue.end_offset for queue in fetch_plan(client, "copy").queues)
        assert before < 15_000, "it was killed before its end"
        second = replay(service.url, tmp_path)
        told, _ = second.communicate()
        assert (second.returncode, json.loads(told)["published"]) == (0, 15_000)
        expected: dict[int, list[int]] = {}
        for queue in fetch_plan(client, "source").queues:
            batches = read_range(client, Range("source", queue.queue, 0, queue.end_offset))
            bodies = [
                (o, b)
                for batch in batches
                for o, b in zip(batch["offset"].to_pylist(), batch["tag"].to_pylist(), strict=True)
            ]
            expected[queue.queue] = [offset for offset, tag in bodies if tag == "even"]
        assert {queue: sorted(some) for queue, some in copied(client, "copy").items()} == expected
        row = client.get(path_of("replays", "killed"), dict[str, Any])
        assert (row["state"], row["published"]) == ("done", 15_000)
