"""A store that answers as a script says, and a proxy's parts around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from millpond.core.frame import Sidecar, unpack_sidecar
from millpond.core.schema import message_schema
from millpond.metadata.client import QueueInfo, Span, TopicInfo, TopicSettings
from millpond.store.client import AppendOutcome, AppendRequest, AppendResult, QueueAppend

Script = Callable[[QueueAppend], AppendOutcome | None]


def topic_of(queues: int = 1, **settings: object) -> TopicInfo:
    infos = [QueueInfo(100 + number, number, [Span(0, "a")]) for number in range(queues)]
    return TopicInfo(1, "default", 9, "orders", "orders", TopicSettings(queues, **settings), infos, 0, 1)


@dataclass
class Frame:
    """One append the store took, opened."""

    append: QueueAppend
    batch: pa.RecordBatch
    sidecar: Sidecar

    @property
    def bodies(self) -> list[bytes]:
        return self.batch.column("body").to_pylist()


def opened(append: QueueAppend) -> Frame:
    batch = pa.ipc.read_record_batch(append.payload, message_schema(append.columns))
    batch.validate(full=True)
    assert batch.num_rows == append.count
    return Frame(append, batch, unpack_sidecar(append.sidecar, append.count, append.columns))


@dataclass(eq=False)
class ScriptedStore:
    """Counts offsets by queue from 0; `script` may answer an append itself (None: it is appended). While `gate` is not
    set, appends wait."""

    frames: list[Frame] = field(default_factory=list)
    requests: list[AppendRequest] = field(default_factory=list)
    script: Script | None = None
    raises: Exception | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    ends: dict[int, int] = field(default_factory=dict)

    async def append(self, request: AppendRequest) -> AppendResult:
        self.requests.append(request)
        self.arrived.set()
        await self.gate.wait()
        if self.raises is not None:
            raise self.raises
        return AppendResult([self._one(append) for append in request.appends], 1)

    def _one(self, append: QueueAppend) -> AppendOutcome:
        answer = None if self.script is None else self.script(append)
        if answer is not None:
            return answer
        self.frames.append(opened(append))
        first = self.ends.get(append.queue.queue_id, 0)
        self.ends[append.queue.queue_id] = first + append.count
        return AppendOutcome(first, 1_000)


@pytest.fixture
async def store() -> ScriptedStore:
    store = ScriptedStore()
    store.gate.set()
    return store
