"""Settings of every part, as frozen structs: defaults here, sources in `client.command.settings`.

Each field is a flag (`--segment-bytes`), an environment variable (`MILLPOND_STORE_SEGMENT_BYTES`) and a key of
one TOML file (`[store] segment_bytes`), in that order of precedence.
"""

from __future__ import annotations

import msgspec

from millpond.core import limits


class StoreConfig(msgspec.Struct, frozen=True):
    data: str = "millpond-data"
    group: str = "a"
    segment_bytes: int = limits.SEGMENT_BYTES
    local_bytes: int = 16 * 1024 * limits.MIB  # the local disk is a cache of the log: how much to keep before recycling
    checkpoint_bytes: int = limits.CHECKPOINT_BYTES
    checkpoint_frames: int = limits.CHECKPOINT_FRAMES
    listen: str = "127.0.0.1:8082"
    advertise: str = ""
    metadata: str = "http://127.0.0.1:8081"
    cluster_secret_file: str = ""


class TierConfig(msgspec.Struct, frozen=True):
    """`url`: a directory or `s3://bucket/prefix`; empty: `tier/` in the data directory."""

    url: str = ""
    s3_endpoint: str = ""
    s3_region: str = "us-east-1"
    seal_bytes: int = limits.SEAL_BYTES
    seal_trickle_bytes: int = limits.SEAL_TRICKLE_BYTES
    seal_trickle_ms: int = limits.SEAL_TRICKLE_MS
    seal_age_ms: int = limits.SEAL_AGE_MS


class MetadataConfig(msgspec.Struct, frozen=True):
    """`database`: a SQLAlchemy URL; empty: SQLite `metadata.db` in the data directory."""

    data: str = "millpond-data"
    database: str = ""
    listen: str = "127.0.0.1:8081"
    cluster_secret_file: str = ""


class ProxyConfig(msgspec.Struct, frozen=True):
    listen: str = "127.0.0.1:8080"
    metadata: str = "http://127.0.0.1:8081"
    cluster_secret_file: str = ""
    processes: int = 1  # of `millpond proxy`, behind one port
    connections: int = limits.CONNECTIONS
    frame_cache_bytes: int = limits.FRAME_CACHE_BYTES
    tier_cache_bytes: int = limits.TIER_CACHE_BYTES
    cold_reads: int = limits.COLD_READS
    header_seconds: float = limits.HEADER_SECONDS
    body_seconds: float = limits.BODY_SECONDS


class Config(msgspec.Struct, frozen=True):
    store: StoreConfig = StoreConfig()
    tier: TierConfig = TierConfig()
    metadata: MetadataConfig = MetadataConfig()
    proxy: ProxyConfig = ProxyConfig()
    log_level: str = "info"
    log_json: bool = False
