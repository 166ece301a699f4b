"""A store engine on any disk, without the rest of the system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from millpond.core.clock import SystemClock, SystemRandom
from millpond.core.config import StoreConfig, TierConfig
from millpond.core.errors import NotFound
from millpond.core.frame import ProducerPart, Sidecar, pack_sidecar
from millpond.core.hashing import dedup_checks, dedup_hashes, hash_binary, hash_tags
from millpond.core.schema import DEDUP, KEY, TAG, message_schema
from millpond.core.tier.directory import DirectoryObjects
from millpond.metadata.client import StoreInfo, TopicInfo, TopicSettings
from millpond.store.client import (
    AppendRequest,
    AppendResult,
    Durability,
    QueueAppend,
    QueueRef,
    ReadRequest,
    StoredFrame,
)
from millpond.store.disk import Disk
from millpond.store.engine import Engine
from millpond.store.local import LocalStore

TENANT, TOPIC = 1, 1


class StoreMetadata:
    """The little that a store asks of metadata: epochs that only rise, and a tier that is empty at first."""

    def __init__(self) -> None:
        self.epoch = 0
        self.settings: dict[int, TopicSettings | None] = {}  # None: deleted
        self.tiered: dict[int, int] = {}
        self.deleted_groups: set[int] = set()

    async def register_store(self, store_group: str, node_id: str, address: str) -> StoreInfo:
        self.epoch += 1
        return StoreInfo(store_group, self.epoch, address)

    async def tiered_to(self, queue_ids: list[int]) -> dict[int, int]:
        return {queue_id: self.tiered[queue_id] for queue_id in queue_ids if queue_id in self.tiered}

    async def topic_settings(self, topic_ids: list[int]) -> dict[int, TopicSettings | None]:
        return {topic_id: self.settings[topic_id] for topic_id in topic_ids if topic_id in self.settings}

    async def living_groups(self, group_ids: list[int]) -> list[int]:
        return [group_id for group_id in group_ids if group_id not in self.deleted_groups]

    async def topic_by_id(self, topic_id: int) -> TopicInfo:
        raise NotFound("topic_not_found", f"no topic {topic_id}")


async def open_store(
    disk: Disk, metadata: Any, tier: Path, *, clock: Any = None, tier_config: TierConfig | None = None, **config: Any
) -> LocalStore:
    """A store with small segments on `disk`; its tier is a directory."""
    settings = {"segment_bytes": 64 * 1024, "local_bytes": 1 << 40, **config}
    clock, random = clock or SystemClock(), SystemRandom()
    objects = DirectoryObjects(tier, clock, random)
    engine = await Engine.open(
        StoreConfig(**settings), tier_config or TierConfig(), disk, metadata, objects, clock, random
    )
    return LocalStore(engine)


def queue(number: int = 0) -> QueueRef:
    return QueueRef(TENANT, TOPIC, number + 1, number)


def messages(
    bodies: list[bytes],
    *,
    number: int = 0,
    keys: list[bytes] | None = None,
    tags: list[str] | None = None,
    dedup_ids: list[str | None] | None = None,
    part: ProducerPart | None = None,
    durability: Durability = "flush",
) -> QueueAppend:
    """An append of these bodies to queue `number`."""
    count = len(bodies)
    columns = (KEY if keys else 0) | (TAG if tags else 0)
    schema = message_schema(columns)
    values = {"key": keys, "tag": tags, "body": bodies}
    batch = pa.record_batch([pa.array(values[name], schema.field(name).type) for name in schema.names], schema=schema)
    payload = batch.serialize()
    none = np.zeros(count, np.uint32)
    hashes = checks = None
    if dedup_ids is not None:
        hashes = dedup_hashes(dedup_ids, os.urandom)
        checks = dedup_checks(batch["body"])
        columns |= DEDUP
    sidecar = Sidecar(
        hash_tags(batch["tag"]) if tags else none, hash_binary(batch["key"]) if keys else none, None, hashes, checks, []
    )
    return QueueAppend(
        queue(number),
        count,
        columns,
        0,
        pa.py_buffer(pack_sidecar(sidecar)),
        payload,
        google_crc32c.value(payload),
        sum(map(len, bodies)),
        durability,
        [part] if part is not None else [],
        300_000 if dedup_ids is not None else 0,
    )


async def append(store: LocalStore, *appends: QueueAppend) -> AppendResult:
    return await store.append(AppendRequest(list(appends), 5000))


def bodies_of(frame: StoredFrame) -> list[bytes]:
    batch = pa.ipc.read_record_batch(frame.payload, message_schema(frame.columns))
    return [bytes(body) for body in batch["body"].to_pylist()]


async def texts(store: LocalStore, offset: int = 0, number: int = 0) -> list[bytes]:
    """All message bodies of a queue from `offset` on."""
    found: list[bytes] = []
    end = (await store.queues([number + 1]))[0].end_offset
    while offset < end:
        result = await store.read(ReadRequest(number + 1, offset, 1000, 1 << 20))
        found += [body for frame in result.frames for body in bodies_of(frame)]
        offset = result.next_offset
    return found
