"""`weft`: the commands, their options and their help. Each command's work is imported when it is called."""

from __future__ import annotations

import os
import sys

from cyclopts import App

from weft import __version__
from weft.errors import WeftError

app = App(name="weft", version=__version__, help="Run language models on your own machine: alone in a crowd.")


@app.command
def run(
    model: str,
    prompt: str | None = None,
    /,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    think: bool | None = None,
    chat: bool | None = None,
) -> None:
    """Answer a prompt in the terminal, or open a chat when there is none. Ctrl-C stops the answer, not the program.

    Parameters
    ----------
    model
        A built-in name (smollm2, tiny-hybrid), a folder, a .gguf file, or a Hugging Face id.
    prompt
        What to ask. Without it a chat opens; Ctrl-D leaves it.
    max_tokens
        The longest answer, in tokens. Default: the rest of the context.
    temperature
        0 is greedy. Default: what the model's makers recommend.
    top_p
        Sample from the likeliest tokens that make up this share.
    top_k
        Sample from this many likeliest tokens; 0 for all.
    seed
        The same seed gives the same answer.
    think
        Ask the model to think first, or not to; where its template can.
    chat
        Ask through the model's chat template, or have it continue the text as it is. Default: chat, where there is a
        template; the built-in tiny-hybrid, a teller of stories, continues.
    """
    from weft.cli.run import Options, run_command

    run_command(Options(model, prompt, max_tokens, temperature, top_p, top_k, seed, think, chat))


def main() -> None:
    """Run the command line; errors of ours end it with one sentence and status 1."""
    try:
        app()
    except WeftError as error:
        sys.stderr.write(f"weft: {error}\n")
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has gone; the exit must not try to flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
