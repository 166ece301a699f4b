"""A small service for the Spark part: the calls it makes, over real HTTP, with real Parquet files as the tier."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from millpond.core.schema import TIER_SCHEMA
from millpond.spark.session import session

ARROW = "application/vnd.apache.arrow.stream"


def rows(queue: int, first: int, count: int, ms: int = 1_000, **columns: list[Any]) -> pa.Table:
    """`count` messages of a queue from offset `first` on, one a ms from `ms` on in both clocks."""
    stamps = [ms + row for row in range(count)]
    table: dict[str, list[Any]] = {
        "queue": [queue] * count,
        "offset": [first + row for row in range(count)],
        "store_ts": stamps,
        "born_ts": stamps,
        "key": [f"key {row % 7}".encode() for row in range(count)],
        "tag": [("red", "blue", None)[row % 3] for row in range(count)],
        "properties": [[("parity", str(row % 2))] for row in range(count)],
        "body": [f"{queue}/{first + row}".encode() for row in range(count)],
        "origin": [None] * count,
    }
    table.update(columns)
    arrays = [
        pa.array(table[f.name], pa.int64()).cast(f.type) if "_ts" in f.name else pa.array(table[f.name], f.type)
        for f in TIER_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=TIER_SCHEMA)


class FakeTopic:
    """Messages per queue; `tiered_to` of each and the objects that hold them."""

    def __init__(self, topic_id: int, queues: int) -> None:
        self.topic_id = topic_id
        self.queues = {queue: TIER_SCHEMA.empty_table() for queue in range(queues)}
        self.start = dict.fromkeys(range(queues), 0)
        self.damaged = range(0)  # offsets of queue 0
        self.tiered_to = dict.fromkeys(range(queues), 0)
        self.objects: list[dict[str, Any]] = []
        self.sessions: dict[str, dict[int, int]] = {}

    def add(self, table: pa.Table) -> None:
        queue = table["queue"][0].as_py()
        assert table["offset"][0].as_py() == self.queues[queue].num_rows
        self.queues[queue] = pa.concat_tables([self.queues[queue], table]).combine_chunks()

    def seal(self, directory: Path, queue: int, end: int) -> None:
        """One more object with all of `queue` below `end` that is not in one yet."""
        first = self.tiered_to[queue]
        table = self.queues[queue].slice(first, end - first)
        path = directory / "tier {a} b" / f"topic={self.topic_id}" / "date=1970-01-01" / f"{queue}-{first}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        store, born = table["store_ts"].cast(pa.int64()).to_pylist(), table["born_ts"].cast(pa.int64()).to_pylist()
        part = {
            "queue": queue, "first": first, "end": end, "rows": end - first,
            "min_store_ts": min(store), "max_store_ts": max(store), "min_born_ts": min(born), "max_born_ts": max(born),
        }  # fmt: skip
        self.objects.append({"url": path.as_uri(), "bytes": path.stat().st_size, "footer_bytes": 0, "ranges": [part]})
        self.tiered_to[queue] = end


class FakeService:
    """`drop_answers`: of that many publishes the answer is lost after they were done. `requests`: all targets."""

    def __init__(self) -> None:
        self.topics: dict[str, FakeTopic] = {}
        self.replays: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.published_bytes: list[int] = []
        self.drop_answers = 0
        self.lock = threading.Lock()
        service = self

        class Handler(_Handler):
            fake = service

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def topic(self, name: str, queues: int) -> FakeTopic:
        self.topics[name] = FakeTopic(len(self.topics) + 1, queues)
        return self.topics[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # -- calls: (status, answer) ------------------------------------------------------------------------------

    def history(self, topic: str, query: dict[str, str]) -> tuple[int, Any]:
        found = self.topics[topic]
        clock = query["clock"]
        low, high = int(query.get("from", 0)), int(query.get("to", 1 << 60))
        objects = [
            o for o in found.objects
            if any(p[f"max_{clock}_ts"] >= low and p[f"min_{clock}_ts"] < high for p in o["ranges"])
        ]  # fmt: skip
        queues = [
            {"queue": q, "start_offset": found.start[q], "tiered_to": found.tiered_to[q], "end_offset": t.num_rows}
            for q, t in found.queues.items()
        ]
        return 200, {
            "topic": topic, "topic_id": found.topic_id, "tier_version": len(found.objects),
            "objects": objects, "queues": queues,
        }  # fmt: skip

    def read(self, topic: str, queue: int, query: dict[str, str]) -> tuple[int, Any]:
        found = self.topics[topic]
        offset, limit = int(query["offset"]), int(query["limit"])
        if offset < found.start[queue]:
            return 410, {"code": "offset_expired", "detail": "expired", "start_offset": found.start[queue]}
        if queue == 0 and offset in found.damaged:
            return 500, {
                "code": "corrupt_range",
                "detail": "damaged",
                "offset": offset,
                "next_offset": found.damaged.stop,
            }
        if queue == 0 and offset < found.damaged.start:
            limit = min(limit, found.damaged.start - offset)
        table = found.queues[queue].slice(offset, limit)
        beside = {
            "topic": topic, "start_offset": found.start[queue], "next_offset": offset + table.num_rows,
            "end_offset": found.queues[queue].num_rows,
        }  # fmt: skip
        return 200, table.replace_schema_metadata({"millpond": json.dumps(beside)})

    def publish(self, topic: str, queue: int, part: dict[str, Any], table: pa.Table) -> tuple[int, Any]:
        found = self.topics[topic]
        session = found.sessions.setdefault(part["id"], {})
        last = session.get(queue)
        if last is None or part["last"] > last:
            if part["previous"] != last:
                return 409, {"code": "out_of_order", "detail": "out of order"}
            session[queue] = part["last"]
            first = found.queues[queue].num_rows
            sizes = [None] * table.num_rows
            columns = {n: table[n].to_pylist() if n in table.schema.names else sizes for n in TIER_SCHEMA.names[4:]}
            found.add(rows(queue, first, table.num_rows, **columns))
        return 200, {"ranges": [{"queue": queue, "first_offset": 0, "count": table.num_rows}]}

    def put_replay(self, replay_id: str, asked: dict[str, Any]) -> tuple[int, Any]:
        source, target = self.topics[asked["topic"]], self.topics[asked["target"]]
        row = self.replays.setdefault(
            replay_id,
            {
                "replay_id": replay_id, "state": "planned", "source_topic_id": source.topic_id,
                "target_queues": len(target.queues), "read": 0, "published": 0, "asked": asked,
                "queues": [
                    {"queue": q, "first": source.start[q], "end": t.num_rows, "at": source.start[q]}
                    for q, t in source.queues.items()
                ],
            },
        )  # fmt: skip
        if row["asked"] != asked:
            return 409, {"code": "replay_differs", "detail": "another plan"}
        return 200, row

    def report(self, replay_id: str, body: dict[str, Any]) -> tuple[int, Any]:
        row = self.replays[replay_id]
        row.update({name: body[name] for name in ("state", "read", "published", "detail")})
        for part in row["queues"]:
            part["at"] = body["progress"].get(str(part["queue"]), part["at"])
        return 200, row


class _Handler(BaseHTTPRequestHandler):
    fake: FakeService
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def log_message(self, *_: Any) -> None:
        """Nothing: tests look at `requests`."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        with self.fake.lock:
            self.fake.requests.append(f"{method} {self.path}")
            parts = [unquote(part) for part in url.path.split("/")[2:]]
            status, answer = self._route(method, parts, dict(parse_qsl(url.query)), body)
            if method == "POST" and parts[-1] == "messages" and self.fake.drop_answers:
                self.fake.drop_answers -= 1
                self.close_connection = True
                return
        self._send(status, answer)

    def _route(self, method: str, parts: list[str], query: dict[str, str], body: bytes) -> tuple[int, Any]:
        fake = self.fake
        match (method, *parts):
            case ("GET" | "POST", "topics", topic, *_) if topic not in fake.topics:
                return 404, {"code": "topic_not_found", "detail": f"no topic {topic}"}
            case ("GET", "topics", topic, "history"):
                return fake.history(topic, query)
            case ("GET", "topics", topic, "queues", queue, "messages"):
                return fake.read(topic, int(queue), query)
            case ("POST", "topics", topic, "messages"):
                table = pa.ipc.open_stream(body).read_all()
                fake.published_bytes.append(len(body))
                part = json.loads(self.headers["Millpond-Producer"])
                return fake.publish(topic, int(self.headers["Millpond-Queue"]), part, table)
            case ("GET", "topics", topic, "producers", producer):
                held = fake.topics[topic].sessions.get(producer, {})
                return 200, {"queues": [{"queue": q, "last": last} for q, last in held.items()]}
            case ("DELETE", "topics", topic, "producers", producer):
                fake.topics[topic].sessions.pop(producer, None)
                return 204, None
            case ("PUT", "replays", replay_id):
                return fake.put_replay(replay_id, json.loads(body))
            case ("POST", "replays", replay_id, "progress"):
                return fake.report(replay_id, json.loads(body))
        return 404, {"code": "route_not_found", "detail": self.path}

    def _send(self, status: int, answer: Any) -> None:
        kind, data = "application/json", b""
        if isinstance(answer, pa.Table):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, answer.schema) as writer:
                writer.write_table(answer)
            kind, data = ARROW, sink.getvalue().to_pybytes()
        elif answer is not None:
            data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def make_rows() -> Callable[..., pa.Table]:
    return rows


@pytest.fixture
def pond(service: FakeService, tmp_path: Path) -> FakeTopic:
    """Topic `pond`: queue 0 has 1,000 messages from ms 1,000 on, 600 of them in two objects; queue 1 300 hot ones."""
    topic = service.topic("pond", 2)
    topic.add(rows(0, 0, 1_000))
    topic.add(rows(1, 0, 300))
    topic.seal(tmp_path, 0, 400)
    topic.seal(tmp_path, 0, 600)
    return topic


@pytest.fixture
def service() -> Iterator[FakeService]:
    fake = FakeService()
    yield fake
    fake.close()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark for all tests: it takes seconds to start."""
    made = session("millpond tests", master="local[2]", config={"spark.sql.shuffle.partitions": "2"})
    yield made
    made.stop()
