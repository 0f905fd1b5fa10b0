"""`weft`: the table of commands, shell completion, and the exit status.

A command's module is imported when the command is called; its function's signature and docstring are its options and help.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from weft import __version__
from weft.errors import WeftError

# Command X is `X_command` in the module X, unless MODULES names another one.
COMMANDS = ("serve", "run", "ls", "pull", "ps", "load", "unload", "launch", "cache", "bench", "top", "doctor", "service")
MODULES = dict.fromkeys(("ls", "pull", "ps", "load", "unload"), "models") | {"service": "service_unit"}

ABOUT = "Run language models on your own machine: alone in a crowd."
# Plain text keeps the examples' lines, and starts in half the time of markdown.
app = App(name="weft", version=__version__, version_flags="--version", help=ABOUT, help_format="plaintext")
for _name in COMMANDS:
    app.command(f"weft.cli.{MODULES.get(_name, _name)}:{_name}_command", name=_name)


@app.command
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Which one.")], /) -> None:
    """Print a script that lets a shell complete weft's commands and options.

    For example:
      weft completion bash > ~/.local/share/bash-completion/completions/weft
      weft completion zsh > "${fpath[1]}/_weft"
      weft completion fish > ~/.config/fish/completions/weft.fish
    """
    sys.stdout.write(app.generate_completion(prog_name="weft", shell=shell))


def main() -> None:
    """Run the command line; errors of ours and of the user's end it with one sentence and status 1."""
    if not set(COMMANDS).intersection(sys.argv):
        app.resolved_commands()  # weft's own help shows the first line of every command
    try:
        app(print_error=False, exit_on_error=False)
    except (WeftError, CycloptsError) as error:
        sys.stderr.write(f"weft: {error}\n")
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has gone; the exit must not try to flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
