"""Where `weft serve` takes its settings from beside flags and variables: TOML files. And how they are shown.

The files are read here and handed to cyclopts, which fills what flags and WEFT_* variables left open. What a setting
means is `config.ServerConfig`'s.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts.config import Dict

from weft.config import ServerConfig
from weft.errors import WeftError

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection

FILES = ("weft.toml", "~/.config/weft/config.toml")  # the nearer one wins
TABLE = "serve"
KEYS = {field.name: "api_key" if field.name == "api_keys" else field.name for field in fields(ServerConfig)}


def from_files(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A source for cyclopts: the file named by --config, else those of FILES that are there."""
    chosen = arguments.match("--config")[0].tokens
    for name in [chosen[0].value] if chosen else FILES:
        path = Path(name).expanduser()
        if chosen or path.is_file():
            Dict({TABLE: _table(path)}, source=str(path))(app, commands, arguments)


def dump(config: ServerConfig) -> str:
    """The settings as a file of settings, with the keys masked."""
    values = asdict(config) | {"api_keys": ["********"] * len(config.api_keys)}
    # JSON's strings, numbers, truths and lists are TOML's; None is not.
    lines = [f"{KEYS[name]} = {json.dumps(value)}" for name, value in values.items() if value is not None]
    return "\n".join([f"[{TABLE}]", *lines]) + "\n"


def _table(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeftError(f"{path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise WeftError(f"{path} is not TOML: {error}") from error
    table = document.pop(TABLE, {})
    if document or not isinstance(table, dict):
        raise WeftError(f"{path} has {next(iter(document), TABLE)!r} outside of the table [{TABLE}], the only one weft knows")
    for key in table:
        if (name := key.replace("-", "_")) not in KEYS.values():
            close = difflib.get_close_matches(name, KEYS.values(), 1)
            hint = f"did you mean {close[0]!r}?" if close else "see `weft serve --help`"
            raise WeftError(f"{path} has a setting {key!r} that weft does not know; {hint}")
    return table
