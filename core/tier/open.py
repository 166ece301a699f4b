"""Which object store a tier URL means: `open_objects`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from millpond.core.clock import Clock, Random
from millpond.core.config import TierConfig
from millpond.core.errors import BadRequest
from millpond.core.tier.directory import DirectoryObjects
from millpond.core.tier.gentle import Steps
from millpond.core.tier.objects import ObjectStore
from millpond.core.tier.s3 import S3Objects

_EXPECTED = "a directory, file:///directory or s3://bucket/prefix"


def open_objects(
    config: TierConfig, data_dir: str | Path, clock: Clock, random: Random, steps: Steps | None = None
) -> ObjectStore:
    """The tier that `config.url` names; `tier/` in the data directory when it is empty. Nothing is contacted yet.
    `steps`: as of `DirectoryObjects`."""
    if "://" not in config.url:
        return DirectoryObjects(Path(config.url) if config.url else Path(data_dir) / "tier", clock, random, steps)
    url = urlsplit(config.url)
    if url.scheme == "file" and not url.netloc:
        return DirectoryObjects(Path(unquote(url.path)), clock, random, steps)
    if url.scheme == "s3" and url.netloc:
        return S3Objects(url.netloc, url.path.strip("/"), config.s3_endpoint, config.s3_region, random)
    raise BadRequest.field("tier.url", _EXPECTED, config.url)
