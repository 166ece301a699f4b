"""Parts of which single methods fail: `Faulty`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millpond.core.tier.staged import StagedInMemory


class Faulty:
    """`target`, except that `before(name)` or `after(name)` of a method may raise."""

    def __init__(self, target: Any, before: Callable[[str], None] | None, after: Callable[[str], None] | None) -> None:
        self.target, self.before, self.after = target, before, after

    def stage(self) -> StagedInMemory:
        return StagedInMemory(self)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.target, name)

        async def call(*arguments: Any) -> Any:
            if self.before:
                self.before(name)
            answer = await method(*arguments)
            if self.after:
                self.after(name)
            return answer

        return call


def raising(where: str, error: Exception, times: int = 1) -> Callable[[str], None]:
    left = [times]

    def act(name: str) -> None:
        if name == where and left[0]:
            left[0] -= 1
            raise error

    return act
