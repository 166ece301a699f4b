"""Settings: where each value comes from. Flag, else environment, else the TOML file, else the default.

    Config field          flag                  environment                     TOML
    store.segment_bytes   --segment-bytes       MILLPOND_STORE_SEGMENT_BYTES    [store] segment_bytes
    tier.url              --tier                MILLPOND_TIER_URL               [tier] url
    log_level             --log-level           MILLPOND_LOG_LEVEL              log_level

A name that no setting has, in the file or in the environment, is an error: a typing mistake must not go unnoticed.
The file is the one that `--config` or MILLPOND_CONFIG names; there is none by default.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer

from millpond.client.command.session import guarded
from millpond.core.config import Config
from millpond.core.errors import StartupError

PREFIX = "MILLPOND_"
OTHER_VARIABLES = {"MILLPOND_URL", "MILLPOND_KEY", "MILLPOND_CONFIG"}
SECTIONS = ("store", "tier", "metadata", "proxy")
FLAG_NAMES = {"tier.url": "tier"}  # flags that are not the field's own name


class Setting(NamedTuple):
    """One value in force. `key`: `store.segment_bytes`; `origin`: in words, where it comes from."""

    key: str
    value: Any
    origin: str

    @property
    def shown(self) -> Any:
        """The value without a password."""
        if self.key == "metadata.database" and isinstance(self.value, str):
            password = urlsplit(self.value).password
            return self.value.replace(f":{password}@", ":***@") if password else self.value
        return self.value


class Settings(NamedTuple):
    config: Config
    all: list[Setting]


def fields() -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """Every setting as (key, field): those of the sections, then the top level's own."""
    top = {field.name: field for field in msgspec.structs.fields(Config)}
    for section in SECTIONS:
        for field in msgspec.structs.fields(top[section].type):
            yield f"{section}.{field.name}", field
    for name, field in top.items():
        if name not in SECTIONS:
            yield name, field


def load(flags: Mapping[str, object], environment: Mapping[str, str], file: str | None = None) -> Settings:
    """What is in force. `flags`: key -> value, None where a flag was not given. Raises StartupError."""
    path = file or environment.get("MILLPOND_CONFIG")
    written = _read(Path(path)) if path else {}
    known = dict(fields())
    _refuse_unknown(known, environment, written, path)
    found = [_setting(key, field, flags, environment, written, path) for key, field in known.items()]
    values: dict[str, Any] = {section: {} for section in SECTIONS}
    for setting in found:
        section, _, name = setting.key.rpartition(".")
        (values[section] if section else values)[name] = setting.value
    return Settings(msgspec.convert(values, Config), found)


def variable_of(key: str) -> str:
    return PREFIX + key.replace(".", "_").upper()


def flag_of(key: str) -> str:
    return "--" + FLAG_NAMES.get(key, key.rpartition(".")[2]).replace("_", "-")


def _setting(
    key: str,
    field: msgspec.structs.FieldInfo,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    written: Mapping[str, object],
    path: str | None,
) -> Setting:
    if flags.get(key) is not None:
        origin, value = f"flag {flag_of(key)}", flags[key]
    elif variable_of(key) in environment:
        origin, value = f"environment {variable_of(key)}", environment[variable_of(key)]
    elif key in written:
        origin, value = f"file {path}", written[key]
    else:
        return Setting(key, field.default, "default")
    try:
        return Setting(key, msgspec.convert(value, field.type, strict=False), origin)
    except msgspec.ValidationError as error:
        raise StartupError(f"{key}: {value!r} ({origin}) is not valid: {error}", "correct it") from error


def _read(path: Path) -> dict[str, object]:
    """The file's values by key."""
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}", "check the path given by --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not TOML: {error}", "correct it") from error
    values: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            values |= {f"{name}.{inner}": item for inner, item in value.items()}
        else:
            values[name] = value
    return values


def _refuse_unknown(
    known: Mapping[str, object], environment: Mapping[str, str], written: Mapping[str, object], path: str | None
) -> None:
    for key in written:
        if key not in known:
            raise StartupError(f"{path}: no setting is named {key!r}", "`millpond config` lists all settings")
    variables = {variable_of(key) for key in known} | OTHER_VARIABLES
    starts = tuple(f"{PREFIX}{section.upper()}_" for section in SECTIONS)
    for name in environment:
        if name.startswith(starts) and name not in variables:
            raise StartupError(f"no setting is named {name} (environment)", "`millpond config` lists all settings")


def with_settings(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of these settings (`store.*` is all of a section), and for the log.

    The command's function takes `settings: Settings` first; its other parameters stay as they are.
    """
    chosen = [(key, field) for key, field in fields() if key in keys or f"{key.partition('.')[0]}.*" in keys]
    chosen += [(key, field) for key, field in fields() if "." not in key]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        flags = [_parameter(key, field) for key, field in chosen]
        config = inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None,
            annotation=Annotated[str | None, typer.Option("--config", metavar="FILE", help="TOML file with settings")],
        )  # fmt: skip

        def command(**given: Any) -> None:
            import os

            file = given.pop("config")
            values = {key: given.pop(_argument(key)) for key, _ in chosen}
            function(guarded(lambda: load(values, os.environ, file), False), **given)

        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        parameters = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *flags, config]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _argument(key: str) -> str:
    return "setting_" + key.replace(".", "_")


def _parameter(key: str, field: msgspec.structs.FieldInfo) -> inspect.Parameter:
    name = flag_of(key)
    names = (name, "--no-" + name[2:]) if field.type is bool else (name,)
    default = f"{field.default}" if field.default != "" else "none"
    shown = f"{variable_of(key)}; default {default}"
    option = typer.Option("/".join(names) if len(names) > 1 else name, help=shown, rich_help_panel="Settings")
    return inspect.Parameter(
        _argument(key),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[field.type | None, option],
    )
