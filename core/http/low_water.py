"""How much of a large body is to come before the event loop is told: the receive low-water mark (SO_RCVLOWAT).

A body comes in segments of some 64 KiB. Each of them wakes whoever waits for it, at the cost of the sender where both
are on one machine, and is then received by a call of its own.
"""

from __future__ import annotations

import asyncio
import socket

from millpond.core import limits

LEAST_BYTES = 128 * limits.KIB  # less comes in a segment or two
MOST_BYTES = 2 * limits.MIB  # beyond that, receiving goes on beside sending


class LowWater:
    """Of one connection. Where there is no such mark, everything is told as it comes; as with TLS, whose transport
    takes what it has not passed on yet out of the socket."""

    __slots__ = ("_mark", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        over_tcp = transport.get_extra_info("socket") is not None and not transport.get_extra_info("sslcontext")
        self._transport: asyncio.Transport | None = transport if over_tcp else None
        self._mark = 1

    def expect(self, left: int) -> None:
        """So many bytes are sure to come, or the end of the connection, which is always told. After each read of
        them: what comes behind them, or instead, is told at once with 0."""
        mark = min(left, MOST_BYTES) if left >= LEAST_BYTES else max(1, min(left, self._mark))
        if mark == self._mark or self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
        except OSError:  # not in every sandbox
            self._transport = None
            return
        self._mark = mark
