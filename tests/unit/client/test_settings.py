"""Settings: flag before environment before file before default, and nothing goes unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from millpond.client.command.settings import Settings, fields, flag_of, load, variable_of, with_settings
from millpond.core.config import Config
from millpond.core.errors import StartupError


def origin(settings: Settings, key: str) -> str:
    return next(setting.origin for setting in settings.all if setting.key == key)


def test_order_of_precedence(tmp_path: Path) -> None:
    """Each source hides the ones after it, and says where the value is from."""
    file = tmp_path / "m.toml"
    file.write_text('log_level = "debug"\n[store]\nsegment_bytes = 1\nlocal_bytes = 1\ndata = "f"\n')
    environment = {"MILLPOND_STORE_SEGMENT_BYTES": "2", "MILLPOND_STORE_LOCAL_BYTES": "2"}
    found = load({"store.segment_bytes": 3, "store.data": None}, environment, str(file))
    assert found.config.store.segment_bytes == 3
    assert found.config.store.local_bytes == 2
    assert found.config.store.data == "f"
    assert found.config.log_level == "debug"
    assert found.config.store.group == Config().store.group
    assert origin(found, "store.segment_bytes") == "flag --segment-bytes"
    assert origin(found, "store.local_bytes") == "environment MILLPOND_STORE_LOCAL_BYTES"
    assert origin(found, "store.data") == f"file {file}"
    assert origin(found, "store.group") == "default"


def test_defaults_are_the_configuration() -> None:
    """With nothing given, what is in force is `Config()`."""
    assert load({}, {}).config == Config()


def test_file_from_the_environment(tmp_path: Path) -> None:
    """MILLPOND_CONFIG names the file where --config does not."""
    file = tmp_path / "m.toml"
    file.write_text("log_json = true\n")
    assert load({}, {"MILLPOND_CONFIG": str(file)}).config.log_json


@pytest.mark.parametrize(
    ("text", "environment", "named"),
    [
        ("[store]\nsegmentbytes = 1\n", {}, "store.segmentbytes"),
        ("[shop]\nx = 1\n", {}, "shop.x"),
        ("[store\n", {}, "not TOML"),
        ("[store]\nsegment_bytes = 'many'\n", {}, "store.segment_bytes"),
        ("", {"MILLPOND_STORE_SEGMENTBYTES": "1"}, "MILLPOND_STORE_SEGMENTBYTES"),
        ("", {"MILLPOND_PROXY_CONNECTIONS": "few"}, "proxy.connections"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, environment: dict[str, str], named: str) -> None:
    """An unknown name or a bad value is an error that names it."""
    file = tmp_path / "m.toml"
    file.write_text(text)
    with pytest.raises(StartupError, match=named):
        load({}, environment, str(file))


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there is an error, not the defaults."""
    with pytest.raises(StartupError, match=r"absent\.toml"):
        load({}, {}, str(tmp_path / "absent.toml"))


def test_passwords_are_not_shown() -> None:
    """The password in a database URL is not printed."""
    found = load({}, {"MILLPOND_METADATA_DATABASE": "postgresql://me:hidden@host/db"})
    shown = next(setting.shown for setting in found.all if setting.key == "metadata.database")
    assert shown == "postgresql://me:***@host/db"


def test_every_setting_has_a_flag_and_a_variable() -> None:
    """All settings can be given in each of the three ways, and variables are distinct."""
    keys = [key for key, _ in fields()]
    assert len({variable_of(key) for key in keys}) == len(keys)
    assert flag_of("tier.url") == "--tier"
    app = typer.Typer()
    taken: list[Settings] = []

    @app.command()
    @with_settings("store.*", "tier.*")
    def start(settings: Settings, port: int = 1) -> None:
        taken.append(settings)

    arguments = ["--segment-bytes", "70000", "--tier", "/t", "--log-json", "--data", "d", "--port", "3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    config = taken[0].config
    assert (config.store.segment_bytes, config.tier.url, config.log_json, config.store.data) == (70000, "/t", True, "d")
