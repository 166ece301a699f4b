"""Answers without a task: for calls that are made tens of thousands of times a second.

    usual    parser -> (loop) -> connection's task -> (loop) -> request's task -> handler .. (loop) -> .. answer
    prompt   parser -> prompt handler .. (loop) -> answer

A route may have a prompt handler beside its usual one: a plain function that is called as soon as a whole request has
been read. It either puts the work on its way and returns a `Prompt`, or does nothing and returns None: then, and when
it raises, the request goes the usual way, which decides and tells what is wrong. So it may leave out every rare case.
Large requests come to it where the route says so (`Route.large`) and the connection has seen their head before.
One connection has one such request at a time; what it sends meanwhile waits (`connection.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeAlias

import msgspec

from millpond.core.gathered import Buffer
from millpond.core.http.call import Body, PartsT, Principal

PROMPT_BYTES = 64 * 1024  # larger requests are not read in one piece anyway


class Headed(Protocol):
    """A request, or its head alone."""

    @property
    def headers(self) -> Mapping[str, str]: ...


class PromptCall(Generic[PartsT]):
    """What a prompt handler knows of its request; as in `Call`, with the whole body at hand. `seen`: what handlers have
    found in these very headers, when they come again (`again.py`); a handler puts it there under a name of its own."""

    __slots__ = ("body", "headers", "params", "parts", "principal", "seen")

    def __init__(
        self,
        headers: Mapping[str, str],
        params: dict[str, str],
        body: Body,
        parts: PartsT,
        principal: Principal,
        seen: dict[str, Any],
    ) -> None:
        self.headers = headers
        self.params = params
        self.body = body
        self.parts = parts
        self.principal = principal
        self.seen = seen


Encoded: TypeAlias = bytes | list[Buffer]
"""A body, whole or in buffers that follow each other and are not copied."""


class Prompt(msgspec.Struct, frozen=True):
    """Work under way. `encode` makes the body (of `media_type`, status 200) of the future's result, or raises. `leave`
    is called, of a long poll, when the client goes away or the listener stops: it cancels the future; other work goes
    on. `lost` is called when there is a result and nobody to take it."""

    future: asyncio.Future[Any]
    encode: Callable[[Any], Encoded]
    media_type: str
    leave: Callable[[], None] | None = None
    lost: Callable[[], None] | None = None


PromptHandler: TypeAlias = Callable[[PromptCall[Any]], Prompt | None]
