"""`POST /v1/topics/{topic}/messages`: the door every message comes in by.

The way of a message: here -> codec (bytes to columns) -> encode (queue, hashes, frame payload) -> coalesce (who goes
together) -> the store. One message alone takes a shorter way: no columns of its own, it joins the next frame.

What refuses the whole request: what is malformed, too large, or breaks a session or an idempotency key. What is
wrong with one message only is that message's `error`, the others go on. A request of which nothing was accepted is a
problem, never a 200. An answer by ranges cannot name messages, so there every refused message refuses the request
before anything is sent; should a store fail for some queues only, JSON falls back to `results`, and the problem an
Arrow client gets names in `ranges` what stands nevertheless. A reused idempotency key is 422 for the whole request;
keyless messages of one such request share a queue, so nothing of it is written, while messages with other keys (or
queues) than at first may have been written in queues that had not seen the key.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from aiohttp import web

from millpond.core import arrow as core_arrow
from millpond.core.errors import BadRequest, MillpondError, Unprocessable, UnsupportedMedia, from_info
from millpond.core.hashing import dedup_hash, hash_bytes, hash_text
from millpond.core.http.call import media_type_of
from millpond.core.http.prompt import Prompt, PromptCall
from millpond.core.http.routing import Route
from millpond.core.http.whole import whole
from millpond.core.limits import BATCH_BYTES, DEDUP_ID_BYTES
from millpond.core.message import check_single
from millpond.core.names import check_name
from millpond.metadata.client import QueueInfo, TopicInfo
from millpond.proxy.codec import arrow, json, msgpack, raw
from millpond.proxy.codec.placed import (
    ProduceRanges,
    ProduceResults,
    QueuePlaced,
    ranges,
    ranges_table,
    result_of,
    results,
    results_json,
)
from millpond.proxy.counters import Counters
from millpond.proxy.encode import Split, no_queue, split, sticky_queue
from millpond.proxy.frame_plan import PlacedSingle
from millpond.proxy.incoming import Incoming, Request, Session, Single, gather
from millpond.proxy.parts import Parts, ProxyCall

JSON, MSGPACK, ARROW = json.MEDIA_TYPE, msgpack.MEDIA_TYPE, arrow.MEDIA_TYPE
_IN_HEADERS = ("queue", "producer", "key", "tag", "dedup-id", "born-ts")  # raw bodies; the first two also Arrow
_ANY_OR_JSON = {"*/*", JSON}
PROMPT_JSON_BYTES = 4_096  # more may well be several messages, which would be decoded twice
_msgpack_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()


async def produce(call: ProxyCall) -> web.StreamResponse:
    parts = call.parts
    tenant, name = call.principal.tenant, call.params["topic"]
    topic = parts.catalog.known_topic(tenant, name) or await parts.catalog.topic(tenant, check_name("topic", name))
    accepted = call.accepts(JSON, ARROW, MSGPACK)
    headers = call.request.headers
    minimal = accepted == ARROW or "return=minimal" in headers.get("Prefer", "")
    idempotency_key = _idempotency_key(headers.get("Idempotency-Key"))
    request, queue = await _decode(call)
    if request.single is not None and not minimal and queue is None:
        return await _one(call, topic, request.single, idempotency_key, accepted)
    batch = request.batch if request.batch is not None else _alone(request.single)
    count, errors, placed = await _many(parts, topic, batch, request.session, queue, idempotency_key, minimal)
    parts.counters.add("produced_messages_total", count)
    return _answer(call, count, errors, placed, accepted, minimal)


async def _decode(call: ProxyCall) -> tuple[Request, int | None]:
    """The request, and the queue its header names for all of it (Arrow)."""
    media = call.media_type
    found = raw.millpond_headers(call.request.headers)
    if media in {JSON, MSGPACK}:
        misplaced = [name for name in found if name in _IN_HEADERS or name.startswith("property-")]
        if misplaced:
            raise BadRequest.field(f"Millpond-{misplaced[0].title()}", "no such header here: it stands in the body")
        body = await call.body(BATCH_BYTES)
        return (json if media == JSON else msgpack).decode(body), None
    if media == ARROW:
        body = await call.body(core_arrow.DECODED_BYTES)
        queue = raw.number("queue", found["queue"]) if "queue" in found else None
        return Request(None, arrow.decode(body), raw.session_of(found)), queue
    if media.startswith("application/cloudevents"):
        raise UnsupportedMedia("unsupported_media_type", "Content-Type: CloudEvents are not taken yet")
    return raw.decode(bytes(await call.body(BATCH_BYTES)), found), None


def _idempotency_key(key: str | None) -> str | None:
    if key is None:
        return None
    if not (key.isascii() and key.isprintable() and 1 <= len(key) <= DEDUP_ID_BYTES - 6):  # leaves room for "/9999"
        raise BadRequest.field("Idempotency-Key", f"1 to {DEDUP_ID_BYTES - 6} printable ASCII characters")
    return key


# -- one message ----------------------------------------------------------------------------------------------


def prompt(call: PromptCall[Parts]) -> Prompt | None:
    """One message to a known topic, answered with its result in JSON: the call that is made most often."""
    headers, parts = call.headers, call.parts
    if headers.get("Accept", "*/*") not in _ANY_OR_JSON or "Prefer" in headers or "Idempotency-Key" in headers:
        return None
    topic = parts.catalog.known_topic(call.principal.tenant, call.params["topic"])
    if topic is None or "Content-Encoding" in headers:
        return None
    media = media_type_of(headers)
    found = raw.millpond_headers(headers)
    if media == JSON:
        if found or len(call.body) > PROMPT_JSON_BYTES:
            return None
        request = json.decode(call.body)
    elif media in {MSGPACK, ARROW} or media.startswith("application/cloudevents"):
        return None
    else:
        request = raw.decode(call.body, found)
    if request.single is None:
        return None
    queue, future = _send_one(parts, topic, request.single, None)
    return Prompt(future, partial(_prompt_answer, parts.counters, queue), JSON)


def _prompt_answer(counters: Counters, queue: QueueInfo, placed: PlacedSingle | MillpondError) -> bytes | MillpondError:
    if isinstance(placed, MillpondError):
        return placed
    counters.add("produced_messages_total")
    return _json_encoder.encode(ProduceResults([result_of(queue, placed)]))


async def _one(
    call: ProxyCall, topic: TopicInfo, single: Single, idempotency_key: str | None, accepted: str
) -> web.StreamResponse:
    queue, future = _send_one(call.parts, topic, single, idempotency_key)
    placed = await future
    if isinstance(placed, MillpondError):
        raise from_info(placed.info())  # one error may be many requests'; each raises its own
    call.parts.counters.add("produced_messages_total")
    return _encoded(call, ProduceResults([result_of(queue, placed)]), accepted)


def _send_one(
    parts: Parts, topic: TopicInfo, single: Single, idempotency_key: str | None
) -> tuple[QueueInfo, asyncio.Future[PlacedSingle | MillpondError]]:
    """Check the message, choose its queue and hand it to the coalescer."""
    if idempotency_key is not None:
        if single.dedup_id is not None:
            raise _two_ids()
        single = single._replace(dedup_id=f"{idempotency_key}/0")
    body, key, tag, properties, born_ts, dedup_id, asked = single
    size = len(body) if isinstance(body, bytes) or body.isascii() else len(body.encode())
    check_single(size, topic.settings.max_message_bytes, key, tag, properties, born_ts, dedup_id)
    key_hash = 0 if key is None else hash_bytes(key if isinstance(key, bytes) else key.encode())
    dedup = None if dedup_id is None else dedup_hash(dedup_id)
    queues = len(topic.queues)
    if asked is not None:
        number = _checked_queue("queue", asked, queues)
    elif key_hash:
        number = key_hash % queues
    elif dedup is not None:
        routed = dedup if idempotency_key is None else dedup_hash(idempotency_key)
        number = int.from_bytes(routed[:4], "little") % queues
    else:
        number = sticky_queue(parts.clock, topic.topic_id, queues)
    queue = topic.queues[number]
    tag_hash = 0 if tag is None else hash_text(tag)
    return queue, parts.coalescer.send_single(topic, queue, single, key_hash, tag_hash, dedup)


def _checked_queue(field: str, number: int, queues: int) -> int:
    if not 0 <= number < queues:
        raise no_queue(field, number, queues)
    return number


def _two_ids() -> BadRequest:
    return BadRequest.field("dedup_id", "none beside an Idempotency-Key")


# -- a batch --------------------------------------------------------------------------------------------------


def _alone(single: Single | None) -> Incoming:
    """One message whose answer is by ranges takes the way of batches."""
    assert single is not None
    body, *others = single
    return gather((body,), *((value,) for value in others))


async def _many(
    parts: Parts,
    topic: TopicInfo,
    batch: Incoming,
    session: Session | None,
    queue: int | None,
    idempotency_key: str | None,
    minimal: bool,
) -> tuple[int, dict[int, MillpondError], list[QueuePlaced]]:
    """Send a batch: (messages, refused before sending, what became of the others by queue)."""
    count, queues = batch.batch.num_rows, len(topic.queues)
    if queue is not None:
        _checked_queue("Millpond-Queue", queue, queues)
        if batch.queues is not None:
            raise BadRequest.field("queue", "no such column beside a Millpond-Queue header")
    if session is not None:
        queue = _session_queue(session, batch, queue, queues, idempotency_key)
    if idempotency_key is not None:
        if batch.dedup_ids is not None:
            raise _two_ids()
        batch.dedup_ids = pa.array([f"{idempotency_key}/{row}" for row in range(count)], pa.string())
    hashed = None if idempotency_key is None else int.from_bytes(dedup_hash(idempotency_key)[:4], "little")
    sticky = sticky_queue(parts.clock, topic.topic_id, queues)
    shares = split(batch, queues, topic.settings.max_message_bytes, sticky, parts.random, queue, hashed)
    if shares.errors and (minimal or session is not None or not shares):
        raise _first(shares.errors)
    placed = await _send(parts, topic, shares, session, idempotency_key is not None)
    return count, shares.errors, placed


def _session_queue(
    session: Session, batch: Incoming, queue: int | None, queues: int, idempotency_key: str | None
) -> int:
    if queue not in {None, session.queue} or batch.queues is not None:
        raise BadRequest.field("queue", "none beside a producer part, which names its own")
    if idempotency_key is not None or batch.dedup_ids is not None:
        raise BadRequest.field("producer", "no dedup ids beside it: a sequence already tells duplicates")
    session.part(batch.batch.num_rows)
    return _checked_queue("producer.queue", session.queue, queues)


async def _send(
    parts: Parts, topic: TopicInfo, shares: Split, session: Session | None, idempotent: bool
) -> list[QueuePlaced]:
    futures = []
    for number, _, rows in shares:
        part = None if session is None else session.part(len(rows))
        futures.append(parts.coalescer.send_batch(topic, topic.queues[number], rows, part, idempotent))
    answers = [await futures[0]] if len(futures) == 1 else await asyncio.gather(*futures)
    placed = [QueuePlaced(topic.queues[share[0]], share[1], one) for share, one in zip(shares, answers, strict=True)]
    mismatched = [error for one in answers for error in one.errors.values() if isinstance(error, Unprocessable)]
    if idempotent and mismatched:
        detail = "Idempotency-Key: it was used for another request within the topic's dedup window"
        raise Unprocessable("dedup_mismatch", detail)
    return placed


def _first(errors: dict[int, MillpondError]) -> MillpondError:
    """The first message's error as the whole request's, naming the message."""
    row = min(errors)
    info = errors[row].info()
    fields = [msgspec.structs.replace(one, field=f"messages[{row}].{one.field}") for one in info.fields]
    return from_info(msgspec.structs.replace(info, detail=f"messages[{row}]: {info.detail}", fields=fields))


# -- the answer -----------------------------------------------------------------------------------------------


def _answer(
    call: ProxyCall,
    count: int,
    errors: dict[int, MillpondError],
    placed: list[QueuePlaced],
    accepted: str,
    minimal: bool,
) -> web.StreamResponse:
    failed = [error for part in placed for error in part.placed.errors.values()]
    if len(failed) + len(errors) == count:
        raise from_info(failed[0].info())  # nothing was accepted (all refused before sending was raised earlier)
    if not minimal or (failed and accepted != ARROW):
        text = results_json(placed) if accepted == JSON else None
        if text is not None:
            return whole(call.request, text, JSON)
        return _encoded(call, ProduceResults(results(count, errors, placed)), accepted)
    found = ranges(placed)
    if failed:
        info = failed[0].info()
        extra: dict[str, Any] = {**info.extra, "ranges": msgspec.to_builtins(found)}
        raise from_info(msgspec.structs.replace(info, extra=extra))
    if accepted == ARROW:
        return whole(call.request, ranges_table(found).to_pybytes(), ARROW)
    return _encoded(call, ProduceRanges(found), accepted)


def _encoded(call: ProxyCall, value: ProduceResults | ProduceRanges, accepted: str) -> web.StreamResponse:
    encoder = _msgpack_encoder if accepted == MSGPACK else _json_encoder
    return whole(call.request, encoder.encode(value), accepted)


ROUTES = [
    Route(
        method="POST",
        path="/v1/topics/{topic}/messages",
        handler=produce,
        prompt=prompt,
        summary="Publish messages",
        description=(
            "Answers once the topic's durability holds. Results stand in the order of the messages. Any Content-Type "
            "not listed is one message as it is, with Millpond-Key, -Tag, -Property-<Name>, -Dedup-Id, -Born-Ts and "
            "-Queue headers. With `Idempotency-Key: K` message i has the dedup id K/i. `Prefer: return=minimal`, or "
            "Accept of an Arrow stream, answers ranges of offsets instead of one result for each message."
        ),
        body={JSON: json.ProduceIn, MSGPACK: msgpack.ProduceIn, ARROW: None, "application/octet-stream": None},
        answer={JSON: ProduceResults, MSGPACK: ProduceResults, ARROW: None},
        scope="produce",
        tag="messages",
    )
]
