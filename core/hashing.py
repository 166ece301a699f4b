"""Hashes of keys, tags and dedup ids, by columns: what the sidecar of a frame stores of each row.

    tag_hash, key_hash   MurmurHash3 x86-32, seed 0, of the UTF-8 or raw bytes; 0 stands for null, so a hash of 0
                         becomes 1. Queue of a key = key_hash mod n. Both are on disk: pinned by golden values.
    dedup_hash           BLAKE2b-128 of the dedup id; random in rows without one that share a frame with such
    dedup_check          CRC32C of the body; tells another body under the same dedup id

MurmurHash3 goes through all rows at once, four bytes of every key in each step. Few rows are cheaper one by one
(`hash_bytes`, cached), and tags are few different words in many rows (`hash_tags` hashes each word once).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.core.texts import offsets_and_data

Hashes = npt.NDArray[np.uint32]
DEDUP_HASH_BYTES = 16
DEDUP_DTYPE = np.dtype("V16")

_C1, _C2, _M5, _N = 0xCC9E2D51, 0x1B873593, 5, 0xE6546B64
_F1, _F2 = 0x85EBCA6B, 0xC2B2AE35
_MASK = 0xFFFFFFFF
_FEW = 8  # rows below which one cached hash each beats the fixed cost of the columns
_CACHED_HASHES = 65_536


@lru_cache(_CACHED_HASHES)
def hash_bytes(value: bytes) -> int:
    """MurmurHash3 x86-32 of one value, never 0."""
    h = 0
    blocks = len(value) & ~3
    for at in range(0, blocks, 4):
        k = int.from_bytes(value[at : at + 4], "little") * _C1 & _MASK
        k = ((k << 15 | k >> 17) & _MASK) * _C2 & _MASK
        h ^= k
        h = ((h << 13 | h >> 19) & _MASK) * _M5 + _N & _MASK
    if len(value) > blocks:
        k = int.from_bytes(value[blocks:], "little") * _C1 & _MASK
        h ^= ((k << 15 | k >> 17) & _MASK) * _C2 & _MASK
    h ^= len(value)
    h = (h ^ h >> 16) * _F1 & _MASK
    h = (h ^ h >> 13) * _F2 & _MASK
    return h ^ h >> 16 or 1


@lru_cache(_CACHED_HASHES)
def hash_text(value: str) -> int:
    """`hash_bytes` of the UTF-8 of a tag."""
    return hash_bytes(value.encode())


def hash_binary(array: pa.Array) -> Hashes:
    """u32[n] of a binary or utf8 array; null -> 0, a hash of 0 -> 1."""
    if len(array) <= _FEW:
        values = array.cast(pa.binary()).to_pylist()
        return np.array([0 if value is None else hash_bytes(value) for value in values], np.uint32)
    offsets, data = offsets_and_data(array)
    hashes = _murmur3(offsets.astype(np.int64), data)
    hashes[hashes == 0] = 1
    if array.null_count:
        hashes[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes


def hash_tags(array: pa.Array) -> Hashes:
    """As `hash_binary`, for columns of few different values."""
    encoded = array.dictionary_encode()
    hashes = np.append(hash_binary(encoded.dictionary), np.uint32(0))  # the last one is what null becomes
    indices = encoded.indices
    if indices.null_count:
        indices = indices.fill_null(len(hashes) - 1)
    taken: Hashes = hashes[indices.to_numpy()]
    return taken


def dedup_hash(dedup_id: str) -> bytes:
    return hashlib.blake2b(dedup_id.encode(), digest_size=DEDUP_HASH_BYTES).digest()


def dedup_hashes(dedup_ids: list[str | None], unique: Callable[[int], bytes]) -> npt.NDArray[np.void]:
    """V16[n]. A row without id gets `unique(16)`, random bytes: it repeats nothing and nothing repeats it."""
    digests = [unique(DEDUP_HASH_BYTES) if one is None else dedup_hash(one) for one in dedup_ids]
    return np.frombuffer(b"".join(digests), DEDUP_DTYPE)


def dedup_checks(bodies: pa.Array) -> Hashes:
    """u32[n]: CRC32C of each body."""
    return np.fromiter(map(google_crc32c.value, bodies.to_pylist()), np.uint32, len(bodies))


def _murmur3(offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> Hashes:
    first, end = int(offsets[0]), int(offsets[-1])
    starts = offsets[:-1] - first
    lengths = np.diff(offsets)
    padded = np.zeros(end - first + 4, np.uint8)  # the last value's last word may reach beyond its end
    padded[: end - first] = data[first:end]
    words = np.ndarray(end - first + 1, "<u4", padded, strides=(1,))  # the four bytes at every position
    hashes = np.zeros(len(starts), np.uint32)
    blocks = lengths >> 2
    shared = int(blocks.min())
    for block in range(shared):  # blocks that every row has
        hashes = _mix(hashes, words[starts + 4 * block])
    rows = np.flatnonzero(blocks > shared)
    for block in range(shared, int(blocks.max())):
        hashes[rows] = _mix(hashes[rows], words[starts[rows] + 4 * block])
        rows = rows[blocks[rows] > block + 1]
    return _finish(hashes, words, starts, lengths)


def _mix(hashes: Hashes, words: Hashes) -> Hashes:
    """One block of every row, in place (a temporary for each step would cost as much as the step)."""
    hashes ^= _scramble(words)
    high = hashes >> np.uint32(19)
    hashes <<= np.uint32(13)
    hashes |= high
    hashes *= np.uint32(_M5)
    hashes += np.uint32(_N)
    return hashes


def _scramble(words: Hashes) -> Hashes:
    """In place; `words` is the caller's own copy."""
    words *= np.uint32(_C1)
    high = words >> np.uint32(17)
    words <<= np.uint32(15)
    words |= high
    words *= np.uint32(_C2)
    return words


def _finish(hashes: Hashes, words: Hashes, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Hashes:
    rest = (lengths & 3).astype(np.uint32)
    if rest.any():
        tails = words[starts + (lengths & ~3)] & ((np.uint32(1) << np.uint32(8) * rest) - np.uint32(1))
        hashes = hashes ^ _scramble(tails)  # a tail of no bytes is 0, and scrambles to 0
    hashes = hashes ^ lengths.astype(np.uint32)
    hashes = (hashes ^ hashes >> np.uint32(16)) * np.uint32(_F1)
    hashes = (hashes ^ hashes >> np.uint32(13)) * np.uint32(_F2)
    return hashes ^ hashes >> np.uint32(16)
