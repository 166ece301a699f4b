"""An object store that speaks S3: `S3Objects`, an `ObjectStore` over boto3.

boto3 blocks, so every request runs in a bounded pool of threads; it is imported at the first request, because
it costs 30 MB that a directory tier does not need. Its own retries are off: `_call` is the one place that
retries, with jittered pauses. Every object is sent with its SHA-256, which the server verifies; `head` asks for
it (a server that does not keep checksums still keeps the copy in the object's metadata).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from millpond.core.clock import Random
from millpond.core.errors import Conflict, MillpondError, NotFound, Unavailable
from millpond.core.limits import (
    OBJECT_ATTEMPTS,
    OBJECT_BYTES_PER_SECOND,
    OBJECT_CONNECT_SECONDS,
    OBJECT_PAUSE_SECONDS,
    OBJECT_SECONDS,
    OBJECT_THREADS,
)
from millpond.core.tier.keys import check_key
from millpond.core.tier.objects import ObjectMeta
from millpond.core.tier.pool import ObjectPool
from millpond.core.tier.staged import StagedInMemory

T = TypeVar("T")

_HASH_NAME = "sha256"  # of the object's own metadata
# Answers that another attempt may change: the server is busy, or the bytes were damaged on the way.
_AGAIN_STATUS = {408, 409, 429, 500, 502, 503, 504}
_AGAIN_CODES = {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "RequestTimeout", "SlowDown"}
_NO_RANGE = 416


class S3Objects:
    """Objects in `bucket` under `prefix` (no slashes at its ends; may be empty).

    `endpoint` empty: AWS. Credentials come from where boto3 looks for them (environment, profile, role).
    """

    def __init__(self, bucket: str, prefix: str, endpoint: str, region: str, random: Random) -> None:
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._endpoint = endpoint
        self._region = region
        self._random = random
        self._pool = ObjectPool(OBJECT_THREADS, "tier-s3")
        self._client: Any = None
        self._connecting = threading.Lock()

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    async def put_new(self, key: str, data: bytes | memoryview, sha256: str) -> None:
        name = self._prefix + check_key(key)

        def put(s3: Any) -> None:
            request = {**_checked(bytes(data), sha256), "Key": name, "IfNoneMatch": "*"}  # boto3 takes no view
            s3.put_object(Bucket=self._bucket, **request)

        await self._call("put", key, put, len(data))

    def stage(self) -> StagedInMemory:
        """In memory: S3 wants the length and the checksum before the first byte."""
        return StagedInMemory(self)

    async def replace(self, key: str, data: bytes, etag: str | None) -> str:
        name = self._prefix + check_key(key)
        sha256 = hashlib.sha256(data).hexdigest()
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        request = {**_checked(data, sha256), "Key": name, **condition}
        try:
            answer = await self._call(
                "replace", key, lambda s3: s3.put_object(Bucket=self._bucket, **request), len(data)
            )
        except (Conflict, NotFound):
            # An earlier attempt whose answer was lost may have been the one that changed it.
            if (theirs := await self._etag_if(key, name, sha256)) is not None:
                return theirs
            raise Conflict("object_exists", f"{key} in {self.url} is not the version that was read") from None
        return str(answer["ETag"])

    async def get(self, key: str, first: int = 0, end: int | None = None) -> bytes:
        name = self._prefix + check_key(key)
        if end is not None and end <= first:
            return b""
        span = {"Range": f"bytes={first}-{'' if end is None else end - 1}"} if first or end is not None else {}
        size = 0 if end is None else end - first

        def read(s3: Any) -> bytes:
            with s3.get_object(Bucket=self._bucket, Key=name, **span)["Body"] as body:
                return bytes(body.read())

        return await self._call("get", key, read, size, beyond=b"")

    async def head(self, key: str) -> ObjectMeta:
        name = self._prefix + check_key(key)
        answer = await self._call("head", key, lambda s3: self._head(s3, name))
        return ObjectMeta(key, int(answer["ContentLength"]), _sha256(answer))

    async def list(self, prefix: str, after: str = "", limit: int = 1000) -> list[ObjectMeta]:
        found: list[ObjectMeta] = []
        while len(found) < limit:
            page = await self._page(prefix, after, min(1000, limit - len(found)))
            found += [ObjectMeta(o["Key"].removeprefix(self._prefix), int(o["Size"]), None) for o in page]
            if not page:
                break
            after = found[-1].key
        return found

    async def delete(self, key: str) -> None:
        name = self._prefix + check_key(key)
        await self._call("delete", key, lambda s3: s3.delete_object(Bucket=self._bucket, Key=name))

    async def check(self) -> None:
        key = f"v1/_system/check-{self._random.bytes(8).hex()}"
        try:
            await self.put_new(key, b"millpond", hashlib.sha256(b"millpond").hexdigest())
            await self.get(key)
            await self.delete(key)
        except MillpondError as error:
            raise Unavailable("tier_unavailable", f"{self.url} cannot be written and read: {error.detail}") from error

    async def close(self) -> None:
        self._pool.close()
        if self._client is not None:
            self._client.close()

    async def _page(self, prefix: str, after: str, limit: int) -> Sequence[dict[str, Any]]:
        request = {"Prefix": self._prefix + prefix, "MaxKeys": limit}
        if after:
            request["StartAfter"] = self._prefix + after
        answer = await self._call("list", prefix, lambda s3: s3.list_objects_v2(Bucket=self._bucket, **request))
        contents: Sequence[dict[str, Any]] = answer.get("Contents", [])
        return contents

    async def _etag_if(self, key: str, name: str, sha256: str) -> str | None:
        """The etag of what is there now, when it has this checksum."""
        try:
            head = await self._call("head", key, lambda s3: self._head(s3, name))
        except NotFound:
            return None
        return str(head["ETag"]) if _sha256(head) == sha256 else None

    def _head(self, s3: Any, name: str) -> Any:
        return s3.head_object(Bucket=self._bucket, Key=name, ChecksumMode="ENABLED")

    async def _call(
        self, verb: str, key: str, request: Callable[[Any], T], size: int = 0, beyond: T | None = None
    ) -> T:
        """`request(client)` in a thread, again while it may help; `beyond` answers a range past the object's end."""
        what = f"{verb} {key} in {self.url}"
        seconds = OBJECT_SECONDS + OBJECT_CONNECT_SECONDS + size / OBJECT_BYTES_PER_SECOND
        pause = OBJECT_PAUSE_SECONDS
        for attempt in range(1, OBJECT_ATTEMPTS + 1):
            outcome = await self._pool.run(seconds, what, lambda: self._attempt(what, request, beyond))
            if not isinstance(outcome, _Failure):
                return outcome
            if not outcome.again or attempt == OBJECT_ATTEMPTS:
                raise outcome.error
            await asyncio.sleep(self._random.uniform(0, 2 * pause))
            pause *= 3
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, what: str, request: Callable[[Any], T], beyond: T | None) -> T | _Failure:
        """One attempt, in a thread."""
        from botocore import exceptions

        try:
            return request(self._connected())
        except exceptions.ClientError as error:
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if status == _NO_RANGE and beyond is not None:
                return beyond
            return _refused(what, status, str(error.response.get("Error", {}).get("Code", "")))
        except (
            exceptions.NoCredentialsError,
            exceptions.PartialCredentialsError,
            exceptions.ParamValidationError,
        ) as error:
            return _Failure(Unavailable("tier_unavailable", f"{what}: {error}"), again=False)
        except (exceptions.BotoCoreError, exceptions.HTTPClientError, OSError) as error:
            return _Failure(Unavailable("tier_unavailable", f"{what}: {type(error).__name__}: {error}"), again=True)

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = _connect(self._endpoint, self._region)
            return self._client


class _Failure:
    """Why an attempt failed, and whether another one may help."""

    def __init__(self, error: MillpondError, again: bool) -> None:
        self.error = error
        self.again = again


def _refused(what: str, status: int, code: str) -> _Failure:
    """What an error answer of the server means."""
    if status == 404 and code != "NoSuchBucket":
        return _Failure(NotFound("object_not_found", f"{what}: there is no such object"), again=False)
    if status == 412:
        return _Failure(
            Conflict("object_exists", f"{what}: it is there, or not the version that was read"), again=False
        )
    again = status in _AGAIN_STATUS or code in _AGAIN_CODES
    return _Failure(Unavailable("tier_unavailable", f"{what}: the server answered {status} {code}"), again)


def _connect(endpoint: str, region: str) -> Any:
    """A client, safe for many threads. Making one takes 0.2 s."""
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=OBJECT_CONNECT_SECONDS,
        read_timeout=OBJECT_SECONDS,
        retries={"total_max_attempts": 1},
        max_pool_connections=OBJECT_THREADS,
        s3={"addressing_style": "path"},
        # Our own SHA-256 goes with every PUT; further checksums would only turn bodies into trailers,
        # which older servers do not read.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.session.Session().client("s3", endpoint_url=endpoint or None, region_name=region, config=config)


def _checked(data: bytes, sha256: str) -> dict[str, Any]:
    """The part of a PUT that carries the bytes and their checksum."""
    checksum = base64.b64encode(bytes.fromhex(sha256)).decode()
    return {"Body": data, "ChecksumSHA256": checksum, "Metadata": {_HASH_NAME: sha256}}


def _sha256(head: Any) -> str | None:
    """In hex, what a HEAD answer says of the object's SHA-256."""
    if checksum := head.get("ChecksumSHA256"):
        return base64.b64decode(checksum).hex()
    kept = head.get("Metadata", {}).get(_HASH_NAME)
    return str(kept) if kept else None
