"""What a database driver's exception means, as a `MillpondError`.

A locked, unreachable, read-only or full database is `Unavailable(metadata_unavailable)`: the same call may
succeed later. A damaged one is `Internal(metadata_corrupt)`: it needs a person. Anything else is a bug in this
part and goes up as it is. Texts name what to do and never carry the URL, which may hold a password.
"""

from __future__ import annotations

import sqlite3

from sqlalchemy import exc

from millpond.core.errors import BadRequest, Internal, MillpondError, Unavailable

# The server picked our transaction to give way (serialization failure, deadlock): running it again is right.
_GIVE_WAY = frozenset({"40001", "40P01"})
# A table, column or schema that must be there is not; or the server found a damaged page or index.
_SQLSTATE_CORRUPT = frozenset({"42P01", "42703", "3F000", "XX001", "XX002"})
_SQLITE_CORRUPT = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_SQLITE_BUSY = ("SQLITE_BUSY", "SQLITE_LOCKED")
_SQLITE_AWAY = ("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_IOERR", "SQLITE_FULL", "SQLITE_NOLFS")


def gives_way(error: BaseException) -> bool:
    """Whether the transaction lost against a concurrent one and must be run again from its start."""
    return isinstance(error, exc.DBAPIError) and getattr(error.orig, "sqlstate", None) in _GIVE_WAY


def translate(error: Exception, place: str) -> MillpondError | None:
    """The error to raise instead of `error`; None when it is a bug. `place`: the database as a user knows it."""
    if isinstance(error, exc.TimeoutError):
        return Unavailable("metadata_unavailable", f"{place}: every connection is busy")
    if isinstance(error, (exc.DataError, OverflowError, UnicodeEncodeError)):
        return BadRequest("invalid_request", f"a value cannot be stored: {_first_line(error)}")
    cause = error.orig if isinstance(error, exc.DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        return _translate_sqlite(cause, place)
    if isinstance(error, exc.DBAPIError):
        return _translate_server(error, place)
    return None


def away(error: OSError, place: str) -> Unavailable:
    """The file or its folder cannot be made or opened."""
    return Unavailable("metadata_unavailable", f"{place}: {error.strerror or error}")


def _translate_sqlite(cause: sqlite3.Error, place: str) -> MillpondError | None:
    name = getattr(cause, "sqlite_errorname", "")
    if name.startswith(_SQLITE_BUSY):
        return Unavailable("metadata_unavailable", f"{place}: locked by another process")
    if name.startswith(_SQLITE_CORRUPT):
        return Internal("metadata_corrupt", f"{place}: {cause}; restore it from a backup")
    if name.startswith(_SQLITE_AWAY):
        return Unavailable("metadata_unavailable", f"{place}: {cause}")
    if str(cause).startswith(("no such table", "no such column")):
        return Internal("metadata_corrupt", f"{place}: {cause}; restore it from a backup")
    return None


def _translate_server(error: exc.DBAPIError, place: str) -> MillpondError | None:
    state = getattr(error.orig, "sqlstate", None)
    reason = _first_line(error.orig or error)
    if state in _SQLSTATE_CORRUPT:
        return Internal("metadata_corrupt", f"{place}: {reason}")
    if isinstance(error, exc.OperationalError) or error.connection_invalidated or gives_way(error):
        return Unavailable("metadata_unavailable", f"{place}: {reason}")
    if state == "25006":  # a standby, or a database set read-only
        return Unavailable("metadata_unavailable", f"{place}: {reason}")
    return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
