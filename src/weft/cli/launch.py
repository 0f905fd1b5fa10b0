"""`weft launch`: start an agent against a running server, or show how that is done.

The model's name and its context are asked from the server; how an agent is told is `agents`' table.
"""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weft.cli.agents import AGENTS, KEY, Agent, Start, Target
from weft.cli.client import ServerClient
from weft.errors import WeftError

ASK_SECONDS = 5.0
NO_KEY = "none"  # agents want one, also for a server that does not
SHORT_CONTEXT = 32768  # tokens; what agents say first takes 10,000 to 25,000


class _LaunchModel(msgspec.Struct):
    id: str
    context_length: int | None = None  # known once it is loaded
    capabilities: list[str] = []


class _LaunchModels(msgspec.Struct):
    data: list[_LaunchModel]


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line said."""

    agent: str
    model: str | None = None
    url: str | None = None
    api_key: str | None = None
    show: bool = False
    arguments: tuple[str, ...] = ()  # for the agent


def launch_command(options: LaunchOptions) -> None:
    """Become the agent, or print what it would be started with."""
    agent = _agent(options.agent)
    client = ServerClient(options.url, options.api_key)
    model = _model(client.get("/v1/models", _LaunchModels, ASK_SECONDS).data, options.model)
    assert model.context_length is not None
    target = Target(client.url, client.key or NO_KEY, model.id, model.context_length, data_folder() / "agents" / options.agent)
    start = agent.start(target)
    command = [agent.command, *start.arguments, *options.arguments]
    if options.show:
        sys.stdout.write(f"# {options.agent} speaks {agent.wire}\n" + script(start, target, command))
        return
    path = shutil.which(agent.command)
    if path is None:
        raise WeftError(f"{agent.command} is not installed, or not in PATH; install it with `{agent.install}`")
    for note in _notes(model):
        sys.stderr.write(f"weft: {note}\n")
    _write(start, target.folder)
    os.execve(path, command, {**os.environ, **start.environment})


def script(start: Start, target: Target, command: Sequence[str]) -> str:
    """The same as lines for a shell. The key is not among them: it is taken from WEFT_API_KEY."""
    lines = [f"# the server's key is expected in {KEY}"] if target.key != NO_KEY else []
    for name, value in start.environment.items():
        if target.key == NO_KEY or name != KEY:
            lines.append(f"export {name}={_quoted(value, target)}")
    lines.append(f"mkdir -p {shlex.quote(str(target.folder))}")
    for name, text in start.files.items():
        lines += [f"cat > {shlex.quote(str(target.folder / name))} << 'END'", text.rstrip("\n"), "END"]
    return "\n".join([*lines, shlex.join(command)]) + "\n"


def data_folder() -> Path:
    """Where weft keeps what programs write for it: the platform's folder for data."""
    if base := os.environ.get("XDG_DATA_HOME"):
        return Path(base).expanduser().absolute() / "weft"
    home = Path.home()
    return home / "Library" / "Application Support" / "weft" if sys.platform == "darwin" else home / ".local" / "share" / "weft"


def _agent(name: str) -> Agent:
    if name not in AGENTS:
        close = difflib.get_close_matches(name, AGENTS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(AGENTS)}"
        raise WeftError(f"weft knows no agent {name!r}; {hint}")
    return AGENTS[name]


def _model(models: Sequence[_LaunchModel], asked: str | None) -> _LaunchModel:
    names = ", ".join(model.id for model in models)
    found = [model for model in models if asked in (None, model.id)]
    if not found:
        raise WeftError(f"no model {asked!r} is served; there is {names}")
    if len(found) > 1:
        raise WeftError(f"the server has several models ({names}); choose one with --model")
    if found[0].context_length is None:
        raise WeftError(f"{found[0].id} is still being loaded; try again when `weft ps` shows its context")
    return found[0]


def _notes(model: _LaunchModel) -> list[str]:
    """What will go wrong, before it does."""
    notes = []
    if "tools" not in model.capabilities:
        notes.append(f"the chat template of {model.id} has no place for tools, and agents live by them")
    if (model.context_length or 0) < SHORT_CONTEXT:
        notes.append(f"{model.id} has a context of {model.context_length} tokens; an agent's first prompt may be longer")
    return notes


def _write(start: Start, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in start.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise WeftError(f"{folder} can not be written: {error.strerror}") from error


def _quoted(value: str, target: Target) -> str:
    return f'"${KEY}"' if value == target.key != NO_KEY else shlex.quote(value)
