"""`weft launch`: start a coding agent against a running server, or print how; agents.toml says what each agent needs."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import msgspec
from cyclopts import Parameter

from weft.cli import ApiKey, ChosenModel, Show, Url, spelling_hint, writing
from weft.cli.client import ServerClient, choose_model
from weft.config import own_folder
from weft.errors import WeftError

ASK_SECONDS = 5.0
KEY = "WEFT_API_KEY"
NO_KEY = "none"  # agents want one, also for a server that does not
MAX_OUTPUT = 32768  # tokens of one answer: what the agents' own makers take for large models
PLACEHOLDER = re.compile(r'"\{(\w+)\}"|\{(\w+)\}')
SHORT_CONTEXT = 32768  # tokens; what agents say first takes 10,000 to 25,000

AgentName = Annotated[str, Parameter(name="AGENT", help="Its name.")]
Word = Annotated[str, Parameter(help="What the agent is told on its own command line.")]
SHOWN = "Print environment, files and command as lines for a shell, without the key, and start nothing."
Dry = Annotated[Show, Parameter(help=SHOWN)]


class Target(NamedTuple):
    """The server that a launched coding agent uses: address, key, model, context length, and the agent's own folder."""

    url: str  # without /v1
    key: str
    model: str
    context: int  # tokens
    folder: Path  # the agent's own

    @property
    def output(self) -> int:
        """Maximum answer length to configure in the agent, in tokens: a quarter of the context, at most MAX_OUTPUT."""
        return min(MAX_OUTPUT, self.context // 4)


class Agent(msgspec.Struct, frozen=True):
    """How one coding agent is installed, configured and started: an entry of agents.toml, which explains the fields."""

    endpoint: str
    install: str
    environment: dict[str, Any]
    files: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    arguments: list[str] = []

    def pointed_at(self, target: Target) -> Self:
        """Return a copy with placeholders filled in from `target`, variables and files as text, settings as `-c` arguments."""
        sizes = {"output": target.output, "input": target.context - target.output}
        values = {**target._asdict(), "folder": str(target.folder), **sizes}

        def value_of(found: re.Match[str]) -> str:  # all of a JSON string, or a part of one
            return json.dumps(values[found[1]]) if found[1] else json.dumps(str(values[found[2]]))[1:-1]

        filled = msgspec.json.decode(PLACEHOLDER.sub(value_of, msgspec.json.encode(self).decode()), type=type(self))
        flags = [word for name, value in filled.settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
        variables = {name: json.dumps(x) if isinstance(x, dict) else str(x) for name, x in filled.environment.items()}
        texts = {name: json.dumps(document, indent=2) + "\n" for name, document in filled.files.items()}
        return msgspec.structs.replace(filled, environment=variables, files=texts, arguments=[*flags, *filled.arguments])


AGENTS = msgspec.toml.decode(Path(__file__).with_name("agents.toml").read_bytes(), type=dict[str, Agent])


def launch_command(
    name: AgentName, /, *arguments: Word, model: ChosenModel = None, url: Url = None, api_key: ApiKey = None, show: Dry = False
) -> None:
    """Start a coding agent against a running server: claude, codex, opencode, copilot, qwen, pi, goose, crush or aider.

    The agent gets a folder of its own for what it keeps, the served model's name
    and its true context; your own settings of it are not touched. What follows
    -- is handed on to it.

    For example:
      weft launch claude
      weft launch codex --model mlx-community/Qwen3-4B-4bit -- exec "What is this?"
      weft launch opencode --print
    """
    if name not in AGENTS:
        raise WeftError(f"weft knows no agent {name!r}; {spelling_hint(name, AGENTS, 'there are ' + ', '.join(AGENTS))}")
    client = ServerClient(url, api_key)
    found = choose_model(client.models(ASK_SECONDS), model)
    if found.context_length is None:
        raise WeftError(f"{found.id} is still being loaded; try again when `weft ps` shows its context")
    folder = own_folder("XDG_DATA_HOME", "Library/Application Support", ".local/share") / "agents" / name
    target = Target(client.url, client.key or NO_KEY, found.id, found.context_length, folder)
    agent = AGENTS[name].pointed_at(target)
    command = [name, *agent.arguments, *arguments]
    path = shutil.which(name)
    if path is None and not show:
        raise WeftError(f"{name} is not installed, or not in PATH; install it with `{agent.install}`")
    if found.tools.get("shown_by") != "template":
        sys.stderr.write(f"weft: the chat template of {found.id} has no place for tools, and agents live by them\n")
    if target.context < SHORT_CONTEXT:
        sys.stderr.write(f"weft: {found.id} has a context of {target.context} tokens; an agent's first prompt may be longer\n")
    if show or path is None:
        sys.stdout.write(f"# {name} speaks {agent.endpoint}\n" + shell_script(agent, target, command))
        return
    with writing(target.folder):
        target.folder.mkdir(parents=True, exist_ok=True)
        for file, text in agent.files.items():
            (target.folder / file).write_text(text, encoding="utf-8")
    os.execve(path, command, {**os.environ, **agent.environment})


def shell_script(agent: Agent, target: Target, command: Sequence[str]) -> str:
    """Return shell lines that configure and start the agent; the server's key is left out and read from WEFT_API_KEY."""
    has_key = target.key != NO_KEY
    lines = [f"# the server's key is expected in {KEY}"] if has_key else []
    for name, value in agent.environment.items():
        if not has_key or name != KEY:
            lines.append(f"export {name}=" + (f'"${KEY}"' if has_key and value == target.key else shlex.quote(value)))
    lines.append(f"mkdir -p {shlex.quote(str(target.folder))}")
    for name, text in agent.files.items():
        lines += [f"cat > {shlex.quote(str(target.folder / name))} << 'END'", text.rstrip("\n"), "END"]
    return "\n".join([*lines, shlex.join(command)]) + "\n"
