"""Peers, by the name that PEERS= takes. Each in a file of its own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers.peer import Peer

NAMES = ["kafka", "rocketmq", "nats", "redis", "rabbitmq", "elasticmq"]


def named(name: str) -> type[Peer]:
    found: type[Peer] = import_module(f"benchmarks.peers.{name}").PEER
    return found
