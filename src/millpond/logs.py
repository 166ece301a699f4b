"""Logging of a process: lines for people, or JSON lines for machines. No secret is ever given to a logger."""

from __future__ import annotations

import logging
import sys

import msgspec

from millpond.core.clock import Clock
from millpond.core.errors import StartupError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class JsonLines(logging.Formatter):
    """One object a line: `ts` in ms since 1970 UTC, `level`, `logger`, `worker` where there are several, `message`,
    and `trace` of an exception."""

    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._worker: dict[str, object] = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._worker,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(level: str, as_json: bool, worker: int | None = None) -> None:
    """Send the root logger to stderr; lines of a `worker` say which. Raises StartupError for an unknown level."""
    if level not in LEVELS:
        raise StartupError(f"log_level: {level!r} is not a level", f"use one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    who = "" if worker is None else f"worker {worker} "
    plain = logging.Formatter(f"%(asctime)s %(levelname)-7s {who}%(name)s: %(message)s")
    handler.setFormatter(JsonLines(worker) if as_json else plain)
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    logging.getLogger("botocore").setLevel(logging.WARNING)


def log_failure(clock: Clock, message: str, as_json: bool) -> None:
    """The last words of a process that cannot start or go on, on stderr."""
    if as_json:
        line = {"ts": clock.wall_ms(), "level": "error", "logger": "millpond", "message": message}
        sys.stderr.write(msgspec.json.encode(line).decode() + "\n")
    else:
        sys.stderr.write(f"millpond: {message}\n")
    sys.stderr.flush()
