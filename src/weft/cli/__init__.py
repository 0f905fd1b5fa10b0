"""The `weft` command line: its commands, the parameters they share, output helpers, and `main`, which sets the exit status.

A command's module is imported when the command is called; its function's signature and docstring are its options and help.
Importing any of these modules is cheap: mlx, tokenizers and the server are imported by the functions that need them.
"""

import difflib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from weft import __version__
from weft.errors import WeftError

# Command X is `X_command` in the module X, unless MODULES names another one. A summary is the first line of the command's own
# help: so weft's help is printed without reading the commands' modules.
COMMANDS = {
    "serve": "Serve models to OpenAI clients until Ctrl-C.",
    "run": "Answer a prompt in the terminal, or open a chat when there is none. Ctrl-C stops the answer, not the program.",
    "ls": "List the models on this machine: built in, converted by weft, and in the Hugging Face cache.",
    "pull": "Fetch a model, and convert it if need be, so that it is there when it is wanted. Prints its folder.",
    "ps": "Show what a running server serves, and how busy it is.",
    "load": "Have a running server load one more model, and wait until it answers.",
    "unload": "Have a running server end a model, and wait until its memory is free.",
    "launch": "Start a coding agent against a running server: claude, codex, opencode, copilot, qwen, pi, goose, crush or aider.",
    "cache": "What a running server keeps of computed prompts, and why it had to compute one.",
    "bench": "How fast a running server is, from outside.",
    "top": "Watch a running server: requests and their states, rows, memory, tokens per second. Ctrl-C leaves.",
    "doctor": "Look whether all is well here: versions, settings, disk, device, memory, and a small server tried out.",
    "service": "The server as a service of your own session: launchd on macOS, systemd on Linux. Never as root.",
    "keys": "Make API keys for the keys file of `weft serve --keys-file`.",
    "engine": "Run an engine that servers on any machine can use: `weft serve --engines HOST:PORT,…`.",
    "key": "Write a new engine key. Copy the file to every machine that has an engine or a server of yours, and keep it secret.",
}
MODULES = dict.fromkeys(("ls", "pull", "ps", "load", "unload", "cache"), "models") | {"service": "service_unit"}
MODULES |= dict.fromkeys(("engine", "key"), "engine_server")

ABOUT = "Run language models on your own machine: alone in a crowd."
Switch = Annotated[bool, Parameter(negative="", show_default=False)]
Show = Annotated[Switch, Parameter(name="--print")]
AsJson = Annotated[Switch, Parameter(name="--json", help="Print what the server says as JSON.")]
Url = Annotated[str | None, Parameter(help="The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.")]
ApiKey = Annotated[str | None, Parameter(help="The server's key. Default: WEFT_API_KEY.")]
ChosenModel = Annotated[str | None, Parameter(help="The model, where the server has several.")]


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Which one.")], /) -> None:
    """Print a script that lets a shell complete weft's commands and options.

    For example:
      weft completion bash > ~/.local/share/bash-completion/completions/weft
      weft completion zsh > "${fpath[1]}/_weft"
      weft completion fish > ~/.config/fish/completions/weft.fish
    """
    sys.stdout.write(app.generate_completion(prog_name="weft", shell=shell))


def make_command_line(*, has_summaries: bool = False) -> App:
    """Make the command line; with summaries it can print its own help, and no command's, without reading their modules."""
    # Plain text keeps the examples' lines, and starts in half the time of markdown.
    found = App(name="weft", version=__version__, version_flags="--version", help=ABOUT, help_format="plaintext")
    for name, summary in COMMANDS.items():
        path = f"weft.cli.{MODULES.get(name, name)}:{name}_command"
        found.command(path, name=name, **({"help": summary} if has_summaries else {}))
    found.command(completion)
    return found


app = make_command_line()


def main() -> None:
    """Run the command line; a WeftError or a usage error is printed to stderr as one line and exits with status 1."""
    is_overview = sys.argv[1:] in ([], ["--help"], ["-h"])
    try:
        (make_command_line(has_summaries=True) if is_overview else app)(print_error=False, exit_on_error=False)
    except (WeftError, CycloptsError) as error:
        sys.stderr.write(f"weft: {error}\n")
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output is gone; the exit must not try to flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)


def write_columns(rows: list[tuple[str, ...]]) -> None:
    """Print rows to stdout as a left-aligned table; the first row holds the column headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def write_json(value: Any) -> None:
    """Print a value to stdout as indented JSON; paths and other types unknown to JSON are written as strings."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager that turns an OSError raised in its block into a WeftError saying that `path` can not be written."""
    try:
        yield
    except OSError as error:
        raise WeftError(f"{path} can not be written: {error.strerror}") from error


def spelling_hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return "did you mean …?" with the known name closest to `name`; return `otherwise` if no known name is close."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}?" if close else otherwise
