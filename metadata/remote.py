"""A `MetadataClient` over HTTP, for proxies and stores that run apart from the metadata part."""

from __future__ import annotations

from millpond.core.http import rpc
from millpond.core.http.client import HttpClient
from millpond.metadata.client import MetadataClient


def RemoteMetadata(base_url: str, secret: str, client: HttpClient | None = None) -> MetadataClient:
    """Named as the class it stands for: its methods follow from the interface. `base_url`: the metadata part's
    internal listener. `client`: shared connections; its owner closes them."""
    caller = rpc.Caller(base_url, secret, client)
    return rpc.remote(MetadataClient, caller)  # type: ignore[type-abstract]  # the interface itself is meant
