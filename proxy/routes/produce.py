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
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from aiohttp import web

from millpond.core import arrow as core_arrow
from millpond.core.errors import BadRequest, MillpondError, Unprocessable, UnsupportedMedia, from_info
from millpond.core.hashing import dedup_hash, hash_bytes, hash_text
from millpond.core.http.call import Body, media_type_of
from millpond.core.http.prompt import Prompt, PromptCall
from millpond.core.http.routing import Route
from millpond.core.http.whole import whole
from millpond.core.limits import BATCH_BYTES, DEDUP_ID_BYTES
from millpond.core.message import check_single, size_of
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
from millpond.proxy.frame_plan import Placed, PlacedRun, PlacedSingle
from millpond.proxy.incoming import Incoming, Request, Session, Single, gather
from millpond.proxy.parts import Parts, ProxyCall

JSON, MSGPACK, ARROW = json.MEDIA_TYPE, msgpack.MEDIA_TYPE, arrow.MEDIA_TYPE
_IN_HEADERS = ("queue", "producer", "key", "tag", "dedup-id", "born-ts")  # raw bodies; the first two also Arrow
_ANSWERS = {JSON, ARROW, MSGPACK}
_msgpack_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()


class _Asked(msgspec.Struct, frozen=True):
    """What the headers say of a request. `accepted`: the answer's media type; `minimal`: by ranges; `found`: its
    `Millpond-*` headers."""

    media: str
    found: dict[str, str]
    accepted: str
    minimal: bool
    idempotency_key: str | None


async def produce(call: ProxyCall) -> web.StreamResponse:
    tenant, name = call.principal.tenant, call.params["topic"]
    catalog = call.parts.catalog
    topic = catalog.known_topic(tenant, name) or await catalog.topic(tenant, check_name("topic", name))
    asked = _asked(call.request.headers, call.media_type, call.accepts(JSON, ARROW, MSGPACK))
    work = _begin(call.parts, topic, asked, await call.body(_body_bytes(asked.media)))
    answer = work.encode(await work.future)
    assert isinstance(answer, bytes)
    return whole(call.request, answer, work.media_type)


def prompt(call: PromptCall[Parts]) -> Prompt | None:
    """A request for a known topic that has come as a whole."""
    topic = call.parts.catalog.known_topic(call.principal.tenant, call.params["topic"])
    if topic is None:
        return None
    asked: _Asked | None = call.seen.get("produce")
    if asked is None:
        headers = call.headers
        accepted = headers.get("Accept", "*/*")
        accepted = JSON if accepted == "*/*" else accepted
        if accepted not in _ANSWERS or "Content-Encoding" in headers:
            return None
        asked = call.seen["produce"] = _asked(headers, media_type_of(headers), accepted)
    if len(call.body) > _body_bytes(asked.media):
        return None
    return _begin(call.parts, topic, asked, call.body)


def _asked(headers: Mapping[str, str], media: str, accepted: str) -> _Asked:
    found = raw.millpond_headers(headers)
    if media in {JSON, MSGPACK}:
        misplaced = [name for name in found if name in _IN_HEADERS or name.startswith("property-")]
        if misplaced:
            raise BadRequest.field(f"Millpond-{misplaced[0].title()}", "no such header here: it stands in the body")
    elif media.startswith("application/cloudevents"):
        raise UnsupportedMedia("unsupported_media_type", "Content-Type: CloudEvents are not taken yet")
    minimal = accepted == ARROW or "return=minimal" in headers.get("Prefer", "")
    key = headers.get("Idempotency-Key")
    return _Asked(media, found, accepted, minimal, None if key is None else _checked_key(key))


def _body_bytes(media: str) -> int:
    return core_arrow.DECODED_BYTES if media == ARROW else BATCH_BYTES


def _begin(parts: Parts, topic: TopicInfo, asked: _Asked, body: Body) -> Prompt:
    """Decode the request and put its messages on their way; or raise, and nothing is on its way."""
    media, found, queue = asked.media, asked.found, None
    if media == ARROW:
        queue = raw.number("queue", found["queue"]) if "queue" in found else None  # of all its messages
        request = Request(None, arrow.decode(body), raw.session_of(found))
    elif media in {JSON, MSGPACK}:
        request = (json if media == JSON else msgpack).decode(body)
    else:
        request = raw.decode(bytes(body), found)
    if request.single is not None and not asked.minimal:
        return _one(parts, topic, request.single, asked)
    batch = request.batch if request.batch is not None else _alone(request.single)
    return _many(parts, topic, batch, request.session, queue, asked)


def _checked_key(key: str) -> str:
    if not (key.isascii() and key.isprintable() and 1 <= len(key) <= DEDUP_ID_BYTES - 6):  # leaves room for "/9999"
        raise BadRequest.field("Idempotency-Key", f"1 to {DEDUP_ID_BYTES - 6} printable ASCII characters")
    return key


# -- one message ----------------------------------------------------------------------------------------------


def _one(parts: Parts, topic: TopicInfo, single: Single, asked: _Asked) -> Prompt:
    """Check the message, choose its queue and hand it to the coalescer."""
    idempotency_key, accepted = asked.idempotency_key, asked.accepted
    if idempotency_key is not None:
        if single.dedup_id is not None:
            raise _two_ids()
        single = single._replace(dedup_id=f"{idempotency_key}/0")
    body, key, tag, properties, born_ts, dedup_id, wanted = single
    most = topic.settings.max_message_bytes
    size = check_single(size_of(body), most, key, tag, properties, born_ts, dedup_id)
    key_hash = 0 if key is None else hash_bytes(key if isinstance(key, bytes) else key.encode())
    dedup = None if dedup_id is None else dedup_hash(dedup_id)
    queues = len(topic.queues)
    if wanted is not None:
        number = _checked_queue("queue", wanted, queues)
    elif key_hash:
        number = key_hash % queues
    elif dedup is not None:
        routed = dedup if idempotency_key is None else dedup_hash(idempotency_key)
        number = int.from_bytes(routed[:4], "little") % queues
    else:
        number = sticky_queue(parts.clock, topic.topic_id, queues)
    queue = topic.queues[number]
    tag_hash = 0 if tag is None else hash_text(tag)
    future = parts.coalescer.send_single(topic, queue, single, size, key_hash, tag_hash, dedup)
    return Prompt(future, partial(_one_answer, parts.counters, queue, accepted), accepted)


def _one_answer(counters: Counters, queue: QueueInfo, accepted: str, placed: PlacedSingle | MillpondError) -> bytes:
    if isinstance(placed, MillpondError):
        raise from_info(placed.info())  # one error may be many requests'; each raises its own
    counters.add("produced_messages_total")
    return _encoded(ProduceResults([result_of(queue, placed)]), accepted)


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


def _many(
    parts: Parts, topic: TopicInfo, batch: Incoming, session: Session | None, queue: int | None, asked: _Asked
) -> Prompt:
    """Part the batch by queue and send it."""
    count, queues, key = batch.rows, len(topic.queues), asked.idempotency_key
    if queue is not None:
        _checked_queue("Millpond-Queue", queue, queues)
        if batch.queues is not None:
            raise BadRequest.field("queue", "no such column beside a Millpond-Queue header")
    if session is not None:
        queue = _session_queue(session, batch, queue, queues, key)
    if key is not None:
        if batch.dedup_ids is not None:
            raise _two_ids()
        batch.dedup_ids = pa.array([f"{key}/{row}" for row in range(count)], pa.string())
    hashed = None if key is None else int.from_bytes(dedup_hash(key)[:4], "little")
    sticky = sticky_queue(parts.clock, topic.topic_id, queues)
    shares = split(batch, queues, topic.settings.max_message_bytes, sticky, parts.random, queue, hashed)
    if shares.errors and (asked.minimal or session is not None or not shares):
        raise _first(shares.errors)
    sent = _send(parts, topic, shares, session, key is not None)
    return Prompt(sent, partial(_answer, parts.counters, topic, count, shares, asked), asked.accepted)


def _session_queue(
    session: Session, batch: Incoming, queue: int | None, queues: int, idempotency_key: str | None
) -> int:
    if queue not in {None, session.queue} or batch.queues is not None:
        raise BadRequest.field("queue", "none beside a producer part, which names its own")
    if idempotency_key is not None or batch.dedup_ids is not None:
        raise BadRequest.field("producer", "no dedup ids beside it: a sequence already tells duplicates")
    session.part(batch.rows)
    return _checked_queue("producer.queue", session.queue, queues)


def _send(
    parts: Parts, topic: TopicInfo, shares: Split, session: Session | None, idempotent: bool
) -> asyncio.Future[Any]:
    """What became of the only share, or of each. Raises nothing: some may be on their way."""
    futures = []
    for number, _, rows in shares:
        part = None if session is None else session.part(len(rows))
        futures.append(parts.coalescer.send_batch(topic, topic.queues[number], rows, part, idempotent))
    return futures[0] if len(futures) == 1 else asyncio.gather(*futures)


def _first(errors: dict[int, MillpondError]) -> MillpondError:
    """The first message's error as the whole request's, naming the message."""
    row = min(errors)
    info = errors[row].info()
    fields = [msgspec.structs.replace(one, field=f"messages[{row}].{one.field}") for one in info.fields]
    return from_info(msgspec.structs.replace(info, detail=f"messages[{row}]: {info.detail}", fields=fields))


# -- the answer -----------------------------------------------------------------------------------------------


def _answer(
    counters: Counters,
    topic: TopicInfo,
    count: int,
    shares: Split,
    asked: _Asked,
    answered: Any,
) -> bytes:
    """What became of `count` messages; `answered` is the result of `_send`."""
    answers: list[Placed | PlacedRun] = [answered] if len(shares) == 1 else answered
    placed = [QueuePlaced(topic.queues[share[0]], share[1], one) for share, one in zip(shares, answers, strict=True)]
    failed = [error for part in placed for error in part.placed.errors.values()]
    if asked.idempotency_key is not None and any(isinstance(error, Unprocessable) for error in failed):
        detail = "Idempotency-Key: it was used for another request within the topic's dedup window"
        raise Unprocessable("dedup_mismatch", detail)
    accepted = count - len(failed) - len(shares.errors)
    counters.add("produced_messages_total", accepted)
    if not accepted:
        raise from_info(failed[0].info())  # all refused before sending was raised earlier
    if not asked.minimal or (failed and asked.accepted != ARROW):
        text = results_json(placed) if asked.accepted == JSON else None
        return text or _encoded(ProduceResults(results(count, shares.errors, placed)), asked.accepted)
    found = ranges(placed)
    if failed:
        info = failed[0].info()
        extra: dict[str, Any] = {**info.extra, "ranges": msgspec.to_builtins(found)}
        raise from_info(msgspec.structs.replace(info, extra=extra))
    if asked.accepted == ARROW:
        table: bytes = ranges_table(found).to_pybytes()
        return table
    return _encoded(ProduceRanges(found), asked.accepted)


def _encoded(value: ProduceResults | ProduceRanges, accepted: str) -> bytes:
    encoder = _msgpack_encoder if accepted == MSGPACK else _json_encoder
    return encoder.encode(value)


ROUTES = [
    Route(
        method="POST",
        path="/v1/topics/{topic}/messages",
        handler=produce,
        prompt=prompt,
        large=True,
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
        varies="Millpond-Producer",  # of the SDK each part of a session has its own
        tag="messages",
    )
]
