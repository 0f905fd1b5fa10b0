"""`weft serve`: reads settings from flags, WEFT_* environment variables and TOML files; shows start-up progress on stderr."""

import json
import os
import shlex
import sys
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, get_origin

from cyclopts import App, ArgumentCollection, Parameter
from cyclopts.config import Dict, Env
from rich.console import Console
from rich.filesize import decimal

from weft.cli import Switch, spelling_hint
from weft.config import ServerConfig, read_toml
from weft.errors import WeftError
from weft.model.download import Progress, shown

FILES = ("weft.toml", "~/.config/weft/config.toml")  # the nearer one wins
TABLE = "serve"


def _key(field: str) -> str:
    return "api_key" if field == "api_keys" else field


def _flag(field: str) -> str:
    return _key(field).replace("_", "-")


def _values(hint: Any, text: str, **_: Any) -> list[str]:
    """Split an environment variable's text at commas if its setting is a tuple; otherwise return it as the only value."""
    return [part.strip() for part in text.split(",") if part.strip()] if get_origin(hint) is tuple else [text]


def read_files(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in unset settings from the TOML file named by --config, or without it from each file of FILES that exists."""
    chosen = arguments.match("--config")[0].tokens
    for name in [chosen[0].value] if chosen else FILES:
        path = Path(name).expanduser()
        if chosen or path.is_file():
            Dict({TABLE: _read_table(path)}, source=str(path))(app, commands, arguments)


def _read_table(path: Path) -> dict[str, Any]:
    document = read_toml(path, str(path))
    table = document.pop(TABLE, {})
    if document or not isinstance(table, dict):
        raise WeftError(f"{path} has {next(iter(document), TABLE)!r} outside of the table [{TABLE}], the only one weft knows")
    keys = [_key(field.name) for field in fields(ServerConfig)]
    for key in table:
        if (name := key.replace("-", "_")) not in keys:
            hint = spelling_hint(name, keys, "see `weft serve --help`")
            raise WeftError(f"{path} has a setting {key!r} that weft does not know; {hint}")
    return table


def dump_settings(config: ServerConfig) -> str:
    """Return the settings as the text of a TOML file that `read_files` accepts, with the API keys masked."""
    values = asdict(config) | {"api_keys": ["********"] * len(config.api_keys)}
    # JSON's strings, numbers, truths and lists are TOML's; None is not.
    lines = [f"{_key(name)} = {json.dumps(value)}" for name, value in values.items() if value is not None]
    return "\n".join([f"[{TABLE}]", *lines]) + "\n"


serve_command = App(name="serve", config=[Env("WEFT_", command=False), read_files])

Settings = Annotated[ServerConfig, Parameter(name="*", name_transform=_flag, env_var_split=_values, negative_iterable="")]
SettingsFile = Annotated[Path | None, Parameter(help="Take the settings from this TOML file alone.")]
Dump = Annotated[Switch, Parameter(help="Print the settings as they were understood, keys masked, and end.")]


@serve_command.default
def start_server(settings: Settings = ServerConfig(), *, config: SettingsFile = None, dump_config: Dump = False) -> int:  # noqa: ARG001, B008
    """Serve models to OpenAI clients until Ctrl-C.

    A flag wins over its variable, that over the table [serve] of ./weft.toml,
    that over the same table of ~/.config/weft/config.toml. Flags with several
    values are repeated; variables take commas.

    For example:
      weft serve
      weft serve smollm2 mlx-community/Qwen3-4B-4bit
      weft serve smollm2 --host 0.0.0.0 --api-key SECRET
      WEFT_PORT=9000 weft serve --dump-config
    """
    settings.check()
    if not settings.has_keys and not os.environ.get("WEFT_API_KEY", "-").strip(" ,"):
        raise WeftError("WEFT_API_KEY is set and has no key in it: everybody would be let in; give it one, or unset it")
    if dump_config:
        sys.stdout.write(dump_settings(settings))
        return 0
    from weft.api.app import make_app
    from weft.serving.server import serve

    with Terminal(has_key=settings.has_keys) as screen:
        return serve(settings, screen, make_app)


class Terminal(ExitStack):
    """Prints a server's start-up on stderr: progress bars while models load, a line per model, three example commands."""

    def __init__(self, *, has_key: bool = False) -> None:
        super().__init__()
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._has_key = has_key
        self._report: Progress | None = None
        self._url: str | None = None  # None again once the lines to copy are printed
        self._model: str | None = None

    def loading(self, model: str, what: str, done: int, total: int) -> None:
        """Show the progress of fetching, converting or reading a model: `done` bytes of `total` (0: unknown)."""
        if self._report is None:
            self._report = self.enter_context(shown(None))
        self._report(what if model in what else f"{model}: {what}", done, total or None)

    def ready(self, model: str, context: int, device: str, memory: dict[str, int], notice: str | None = None) -> None:
        self._end_bars()
        plan = ", ".join(f"{name} {decimal(size)}" for name, size in memory.items())
        self._console.print(f"{model}: context {context:,} tokens, on {device}; memory: {plan}", style="green")
        if notice:
            self._console.print(f"{model}: {notice}", style="yellow")
        self._model = self._model or model
        self._invite()

    def failed(self, model: str, message: str) -> None:
        self._end_bars()
        self._console.print(f"weft: {model}: {message}", style="red")

    def serving(self, url: str) -> None:
        """Print the server's address, and three example commands if a model is already loaded."""
        self._console.print(f"weft listens at {url} (Ctrl-C ends it)", style="bold")
        self._url = url
        self._invite()

    def _end_bars(self) -> None:
        self.close()
        self._report = None

    def _invite(self) -> None:
        if self._url is None or self._model is None:
            return
        url, model, self._url = self._url, json.dumps(self._model), None
        messages = '[{"role": "user", "content": "Hello!"}]'
        body = shlex.quote(f'{{"model": {model}, "messages": {messages}}}')
        header = '-H "Authorization: Bearer $WEFT_API_KEY" ' if self._has_key else ""
        code = (
            f'import openai, os; client = openai.OpenAI(base_url="{url}/v1", api_key=os.getenv("WEFT_API_KEY", "none")); '
            f"print(client.chat.completions.create(model={model}, messages={messages}).choices[0].message.content)"
        )
        self._console.print(f"curl {url}/v1/chat/completions {header}-H 'content-type: application/json' -d {body}")
        self._console.print(f"python -c {shlex.quote(code)}")
        key = "$WEFT_API_KEY" if self._has_key else "none"
        self._console.print(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}")
