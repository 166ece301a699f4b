"""deploy/millpond.example.toml is complete, correct and explained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from millpond.client.command import settings
from millpond.core.config import Config

FILE = Path(__file__).parents[3] / "deploy" / "millpond.example.toml"


def test_every_setting_with_its_default() -> None:
    """The file names each field of `core.config` once, with the default that it has there, and nothing else."""
    tree = tomllib.loads(FILE.read_text())
    written = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    for section, values in tree.items():
        if isinstance(values, dict):
            written |= {f"{section}.{key}": value for key, value in values.items()}
    assert written == {key: field.default for key, field in settings.fields()}


def test_it_loads() -> None:
    """The service takes it, and it changes nothing."""
    assert settings.load({}, {}, str(FILE)).config == Config()


def test_every_setting_is_explained() -> None:
    """Each block of settings has a comment above it."""
    for block in re.split(r"\n\s*\n", FILE.read_text()):
        lines = [line for line in block.splitlines() if not line.startswith("[")]
        if not all(line.startswith("#") for line in lines):
            assert lines[0].startswith("#"), f"no comment above {lines[0]}"
