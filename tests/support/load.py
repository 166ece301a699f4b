"""Traffic over HTTP that tells a `Checker` everything it did: producers, consumers, readers and a watcher of progress.

    topic `flushed`   4 queues, durability flush    batches, singles, a session for each queue, dedup ids with retries
    topic `memory`    2 queues, durability memory   batches, a session

Each topic has the groups `careful` (acks by receipt) and `careless` (acks by lease id, forgets some, nacks some).
Everything goes on through a fault: what was refused surely is not tried again, what is unknown only where a
session or a dedup id makes that harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Literal, NamedTuple, Self

import aiohttp

from support.checker import Checker, Place

FLUSHED, MEMORY = "flushed", "memory"
QUEUES = {FLUSHED: 4, MEMORY: 2}
GROUPS = ("careful", "careless")
UNKNOWN_CODES = {"unknown_outcome", "deadline_exceeded", "internal"}
CALL_SECONDS = 15.0
PACE_SECONDS = 0.02  # between requests of one producer: bounds the load
AWAY_SECONDS = 0.05  # before the next try while the service is away
LEASE_MS = {"careful": 5000, "careless": 1000}
DRAIN_SECONDS = 60.0


class Answer(NamedTuple):
    """`outcome` fail: surely nothing was done."""

    outcome: Literal["ok", "fail", "unknown"]
    status: int = 0
    body: Any = None

    @property
    def code(self) -> str:
        return str(self.body.get("code", "")) if isinstance(self.body, dict) else ""


class Http:
    """A client of the public interface that never raises for a fault."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=CALL_SECONDS), connector=aiohttp.TCPConnector(limit=0)
        )

    async def call(self, method: str, path: str, json: Any = None, **kind: Any) -> Answer:
        try:
            async with self.session.request(method, self.url + path, json=json, **kind) as response:
                body = await response.json(content_type=None)
                if response.status < 300:
                    return Answer("ok", response.status, body)
                unknown = body.get("code") in UNKNOWN_CODES
                return Answer("unknown" if unknown else "fail", response.status, body)
        except aiohttp.ClientConnectorError:
            return Answer("fail")
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
            return Answer("unknown")

    async def ok(self, method: str, path: str, json: Any = None, **kind: Any) -> Any:
        """The answer's body; AssertionError when it is not 2xx."""
        answer = await self.call(method, path, json, **kind)
        assert answer.outcome == "ok", f"{method} {path}: {answer}"
        return answer.body

    async def queues(self, topic: str) -> list[dict[str, int]]:
        body = await self.ok("GET", f"/v1/topics/{topic}/queues")
        found: list[dict[str, int]] = body["queues"]
        return found

    async def whole(self, topic: str, queue: int) -> tuple[int, int, list[dict[str, Any]]]:
        """(start, end, all messages between) of a queue."""
        ends = await self.ok("GET", f"/v1/topics/{topic}/queues/{queue}/messages?tail=1")
        offset, found = ends["start_offset"], []
        while offset < ends["end_offset"]:
            page = await self.ok("GET", f"/v1/topics/{topic}/queues/{queue}/messages?offset={offset}&limit=2000")
            found += page["messages"]
            assert page["next_offset"] > offset, page
            offset = page["next_offset"]
        return ends["start_offset"], offset, found

    async def close(self) -> None:
        await self.session.close()


class Load:
    """`async with Load(url, checker)`: makes the topics and groups; `start` begins, `finish` drains and reads all."""

    def __init__(self, url: str, checker: Checker, topics: tuple[str, ...] = (FLUSHED, MEMORY)) -> None:
        self.http = Http(url)
        self.checker = checker
        self.topics = topics
        self._payloads = count()
        self._producing = True
        self._consuming = True
        self._producers: list[asyncio.Task[None]] = []
        self._consumers: list[asyncio.Task[None]] = []
        self._progress = asyncio.Condition()

    async def __aenter__(self) -> Self:
        for topic in self.topics:
            wanted = {"queues": QUEUES[topic], "durability": "flush" if topic == FLUSHED else "memory"}
            await self.http.ok("PUT", f"/v1/topics/{topic}", wanted)
            for group in GROUPS:
                await self.http.ok("PUT", f"/v1/topics/{topic}/groups/{group}", {"start": "earliest"})
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (*self._producers, *self._consumers):
            task.cancel()
        await asyncio.gather(*self._producers, *self._consumers, return_exceptions=True)
        await self.http.close()

    def start(self) -> None:
        for topic in self.topics:
            for name in ("a", "b"):
                self._produce(self._batches(topic, f"{topic}.{name}"))
            self._produce(self._singles(topic, f"{topic}.single"))
            self._produce(self._dedup(topic, f"{topic}.dedup"))
            for queue in range(QUEUES[topic]):
                self._produce(self._session(topic, queue, f"{topic}.session.{queue}"))
            for group in GROUPS:
                for _ in range(2):
                    self._consume(self._consumer(topic, group))
                self._consume(self._watcher(topic, group))
            self._consume(self._reader(topic))

    def _produce(self, work: Coroutine[Any, Any, None]) -> None:
        self._producers.append(asyncio.create_task(work))

    def _consume(self, work: Coroutine[Any, Any, None]) -> None:
        self._consumers.append(asyncio.create_task(work))

    async def until(self, met: Callable[[], bool], seconds: float = DRAIN_SECONDS) -> None:
        """Until `met()`; AssertionError when a task of the load died, TimeoutError when it takes too long."""
        async with asyncio.timeout(seconds), self._progress:
            while not met():
                for task in (*self._producers, *self._consumers):
                    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                        raise error
                await self._progress.wait()

    async def acknowledged(self, more: int) -> None:
        """Until so many further messages are acknowledged."""
        goal = self.checker.acknowledged + more
        await self.until(lambda: self.checker.acknowledged >= goal)

    async def _progressed(self) -> None:
        async with self._progress:
            self._progress.notify_all()

    async def finish(self) -> None:
        """Stop producing, let the groups drain, then read everything."""
        self._producing = False
        async with asyncio.timeout(DRAIN_SECONDS):
            await asyncio.gather(*self._producers)
        await self._read_all()  # before: what is read now must also be there after the drain
        goals = [(group, topic) for group in GROUPS for topic in self.topics]
        ends = {topic: sum(one["end_offset"] for one in await self.http.queues(topic)) for topic in self.topics}
        await self.until(lambda: all(self.checker.drained(group, topic, ends[topic]) for group, topic in goals))
        self._consuming = False
        async with asyncio.timeout(DRAIN_SECONDS):
            await asyncio.gather(*self._consumers)
        await self._read_all()

    async def _read_all(self) -> None:
        for topic in self.topics:
            for queue in range(QUEUES[topic]):
                start, end, found = await self.http.whole(topic, queue)
                assert [one["offset"] for one in found] == list(range(start, end)), f"{topic}/{queue} is not dense"
                self.checker.read_whole(topic, queue, start, end, [one["body"] for one in found])

    # -- producers -----------------------------------------------------------------------------------------

    def _new(self, name: str, number: int) -> list[str]:
        return [f"{name}-{next(self._payloads)}" for _ in range(number)]

    async def _batches(self, topic: str, key: str) -> None:
        while self._producing:
            payloads = self._new(key, 10)
            await self._send(topic, payloads, {"messages": [{"body": one, "key": key} for one in payloads]}, key)

    async def _singles(self, topic: str, key: str) -> None:
        """Eight at a time: these are coalesced."""

        async def one(key: str) -> None:
            while self._producing:
                payloads = self._new(key, 1)
                await self._send(topic, payloads, {"messages": [{"body": payloads[0], "key": key}]}, key)

        await asyncio.gather(*(one(f"{key}.{number}") for number in range(4)))

    async def _dedup(self, topic: str, key: str) -> None:
        """The dedup id is the payload; what is unknown is sent again until it is known."""
        while self._producing:
            payloads = self._new(key, 5)
            messages = [{"body": one, "key": key, "dedup_id": one} for one in payloads]
            while await self._send(topic, payloads, {"messages": messages}, key, once=True) != "ok":
                pass

    async def _session(self, topic: str, queue: int, name: str) -> None:
        previous, first = None, 0
        while self._producing:
            payloads = self._new(name, 8)
            last = first + len(payloads) - 1
            part = {"id": name, "queue": queue, "previous": previous, "first": first, "last": last}
            body = {"messages": [{"body": one} for one in payloads], "producer": part}
            while await self._send(topic, payloads, body, None, once=True) != "ok":
                pass
            previous, first = last, last + 1

    async def _send(self, topic: str, payloads: list[str], body: Any, key: str | None, *, once: bool = False) -> str:
        """One request: what the checker was told of it."""
        self.checker.sending(topic, payloads, key, once=once)
        answer = await self.http.call("POST", f"/v1/topics/{topic}/messages", body)
        outcomes: set[str] = {answer.outcome}
        if answer.outcome == "ok":
            outcomes = set()
            for payload, result in zip(payloads, answer.body["results"], strict=True):
                outcomes.add(self._tell(payload, result))
        else:
            assert answer.status not in (400, 404, 409, 422), answer
            for payload in payloads:
                self._tell_not_ok(payload, answer.outcome == "unknown", f"{answer.status} {answer.body}")
        await self._progressed()
        await asyncio.sleep(PACE_SECONDS if outcomes == {"ok"} else AWAY_SECONDS)
        return outcomes.pop() if len(outcomes) == 1 else "some"

    def _tell(self, payload: str, result: dict[str, Any]) -> str:
        error = result.get("error")
        if error is None:
            self.checker.sent_ok(payload, result["queue"], result["offset"])
            return "ok"
        assert error["retryable"], error
        unknown = error["code"] in UNKNOWN_CODES
        self._tell_not_ok(payload, unknown, str(error))
        return "unknown" if unknown else "fail"

    def _tell_not_ok(self, payload: str, unknown: bool, why: str) -> None:
        if unknown:
            self.checker.sent_unknown(payload)
        else:
            self.checker.sent_fail(payload, why)

    # -- consumers -----------------------------------------------------------------------------------------

    async def _consumer(self, topic: str, group: str) -> None:
        at = f"/v1/topics/{topic}/groups/{group}/messages"
        lease_ms = LEASE_MS[group]
        for turn in count():
            if not self._consuming:
                return
            begun = self.checker.receiving()
            wanted = {"max_messages": 100, "wait_ms": 200, "lease_ms": lease_ms}
            answer = await self.http.call("POST", f"{at}/receive", wanted)
            if answer.outcome != "ok":
                await asyncio.sleep(AWAY_SECONDS)
                continue
            messages = answer.body["messages"]
            places = [Place(topic, one["queue"], one["offset"]) for one in messages]
            for place, one in zip(places, messages, strict=True):
                self.checker.delivered(group, place, one["body"], one["delivery_attempt"], begun, lease_ms)
            if messages and group == "careful":
                await self._ack_receipts(at, group, places, answer.body["receipts"])
            elif messages:
                await self._ack_leases(at, group, places, messages, turn)

    async def _ack_receipts(self, at: str, group: str, places: list[Place], receipts: list[dict[str, Any]]) -> None:
        for place in places:
            self.checker.acking(group, place)
        acks = [{"receipt": one["receipt"], "rows": one["rows"]} for one in receipts]
        answer = await self._settle(at, {"acks": acks})
        if answer is None:
            return
        first = 0
        for receipt, result in zip(receipts, answer["results"], strict=True):
            rows = sum(int(r.rpartition("-")[2]) - int(r.partition("-")[0]) + 1 for r in receipt["rows"].split(","))
            covered = places[first : first + rows]
            first += rows
            for place in covered:
                self.checker.acked(group, place, result["status"] if result.get("settled") in (0, rows) else "some")
        assert first == len(places), "receipts cover the messages"

    async def _ack_leases(
        self, at: str, group: str, places: list[Place], messages: list[dict[str, Any]], turn: int
    ) -> None:
        """Forget a tenth, nack a tenth, ack the others one by one; all of them from their third attempt on."""
        rows = list(zip(places, messages, strict=True))
        late = [one["delivery_attempt"] > 2 for one in messages]
        acks = [row for row, last in zip(rows, late, strict=True) if last or (row[0].offset + turn) % 10 > 1]
        nacks = [row for row, last in zip(rows, late, strict=True) if not last and (row[0].offset + turn) % 10 == 1]
        for place, _ in acks:
            self.checker.acking(group, place)
        for place, _ in nacks:
            self.checker.given_back(group, place)
        body = {
            "acks": [one["lease_id"] for _, one in acks],
            "nacks": [{"lease_id": one["lease_id"], "delay_ms": 100} for _, one in nacks],
        }
        answer = await self._settle(at, body)
        if answer is not None:
            for (place, _), result in zip(acks, answer["results"], strict=False):
                self.checker.acked(group, place, result["status"])

    async def _settle(self, at: str, body: dict[str, Any]) -> Any:
        """Tried again until it is answered: settling twice is harmless."""
        while True:
            answer = await self.http.call("POST", f"{at}/ack", body)
            if answer.outcome == "ok":
                return answer.body
            assert answer.status < 500 or answer.body.get("retryable") or answer.outcome == "unknown", answer
            await asyncio.sleep(AWAY_SECONDS)

    # -- others --------------------------------------------------------------------------------------------

    async def _watcher(self, topic: str, group: str) -> None:
        while self._consuming:
            answer = await self.http.call("GET", f"/v1/topics/{topic}/groups/{group}/lag")
            if answer.outcome == "ok":
                for one in answer.body["queues"]:
                    self.checker.committed(group, topic, one["queue"], one["committed"], one["end_offset"])
            await self._progressed()
            await asyncio.sleep(AWAY_SECONDS)

    async def _reader(self, topic: str) -> None:
        """Follows every queue by offset: whatever was read once is what is there for ever."""
        following = dict.fromkeys(range(QUEUES[topic]), 0)
        while self._consuming:
            for queue, offset in following.items():
                path = f"/v1/topics/{topic}/queues/{queue}/messages?offset={offset}&limit=1000"
                answer = await self.http.call("GET", path)
                assert answer.status not in (404, 410, 416), f"what was read is gone: {answer}"
                if answer.outcome == "ok":
                    for one in answer.body["messages"]:
                        self.checker.read(topic, queue, one["offset"], one["body"], "followed")
                    following[queue] = answer.body["next_offset"]
            await asyncio.sleep(AWAY_SECONDS)
