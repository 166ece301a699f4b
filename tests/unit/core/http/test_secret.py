from __future__ import annotations

from pathlib import Path

import pytest

from millpond.core.http.secret import load_or_create_secret, load_secret, same_secret


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    """The first call makes the file for its owner alone, the next ones read it."""
    path = tmp_path / "secret"
    secret = load_or_create_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_secret(path) == load_secret(path) == secret
    assert len(secret) >= 32


def test_a_readable_secret_is_refused(tmp_path: Path) -> None:
    """A file that others can read is no secret; the message says what to do."""
    path = tmp_path / "secret"
    load_or_create_secret(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        load_secret(path)


def test_an_empty_secret_is_refused(tmp_path: Path) -> None:
    """A file that was cut short never opens the cluster."""
    path = tmp_path / "secret"
    path.touch(0o600)
    with pytest.raises(ValueError, match="no cluster secret"):
        load_secret(path)


def test_only_the_same_secret_is_the_same() -> None:
    """Missing, other and non-ASCII values are refused without an error."""
    assert same_secret("abc", "abc")
    assert not any(same_secret(given, "abc") for given in (None, "", "abd", "äbc"))
