"""The metadata service on the internal listener: the routes that `metadata.remote` calls."""

from __future__ import annotations

from dataclasses import replace

from millpond.core.http import rpc
from millpond.core.http.routing import Route
from millpond.metadata.client import MetadataClient


def routes(metadata: MetadataClient) -> list[Route]:
    """One route for each method. `changes` is a long poll: it ends when its client goes away or the listener stops;
    every other call runs to its end once it was accepted."""
    return [
        replace(route, waits=True) if route.path.endswith("/changes") else route
        for route in rpc.serve(MetadataClient, metadata)  # type: ignore[type-abstract]  # the interface itself is meant
    ]
