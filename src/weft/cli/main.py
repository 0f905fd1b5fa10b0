"""`weft`: the commands, their options and their help. Each command's work is imported when it is called."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Env

from weft import __version__
from weft.config import ServerConfig
from weft.errors import WeftError

if TYPE_CHECKING:
    from cyclopts import ArgumentCollection

app = App(
    name="weft",
    version=__version__,
    version_flags="--version",
    help="Run language models on your own machine: alone in a crowd.",
    help_format="plaintext",  # keeps the examples' lines, and starts in half the time of markdown
)


def _files(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    from weft.cli.settings import from_files

    from_files(app, commands, arguments)


def _values(hint: Any, text: str, **_: Any) -> list[str]:
    """A variable's values: several, where the setting has several."""
    if get_origin(hint) is not tuple:
        return [text]
    return [part.strip() for part in text.split(",") if part.strip()]


def _flag(field: str) -> str:
    return "api-key" if field == "api_keys" else field.replace("_", "-")


Settings = Annotated[ServerConfig, Parameter(name="*", name_transform=_flag, env_var_split=_values, negative_iterable="")]
Switch = Annotated[bool, Parameter(negative="", show_default=False)]
AsJson = Annotated[bool, Parameter(name="--json", negative="", show_default=False)]


@app.command(config=[Env("WEFT_", command=False), _files])
def serve(
    settings: Settings = ServerConfig(),  # noqa: B008 - frozen
    *,
    config: Path | None = None,  # noqa: ARG001 - read by `_files`
    dump_config: Switch = False,
) -> int:
    """Serve models to OpenAI clients until Ctrl-C.

    A flag wins over its variable, that over the table [serve] of ./weft.toml,
    that over the same table of ~/.config/weft/config.toml. Flags with several
    values are repeated; variables take commas.

    For example:
      weft serve
      weft serve smollm2 mlx-community/Qwen3-4B-4bit
      weft serve smollm2 --host 0.0.0.0 --api-key SECRET
      WEFT_PORT=9000 weft serve --dump-config

    Parameters
    ----------
    config
        Take the settings from this TOML file alone.
    dump_config
        Print the settings as they were understood, keys masked, and end.
    """
    from weft.cli.serve import serve_command

    return serve_command(settings, dump_config=dump_config)


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
    local: Switch = False,
) -> None:
    """Answer a prompt in the terminal, or open a chat when there is none. Ctrl-C stops the answer, not the program.

    A running server that serves the model is asked (at WEFT_URL, else on this
    machine's port 8400); without one the model is loaded here. What is piped in
    is the prompt, or follows the prompt that is given.

    For example:
      weft run smollm2 "Why is the sky blue?"
      weft run tiny-hybrid "Once upon a time" --seed 7
      weft run smollm2 "Sum this up:" < notes.txt

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
        Ask through the model's chat template, or let it continue the text: the default without a template, and for tiny-hybrid.
    local
        Load the model here even if a server has it.
    """
    from weft.cli.run import RunOptions, run_command

    run_command(RunOptions(model, prompt, max_tokens, temperature, top_p, top_k, seed, think, chat, local))


@app.command
def ls(*, as_json: AsJson = False) -> None:
    """List the models on this machine: built in, converted by weft, and in the Hugging Face cache.

    FITS says whether a server's engine would fit into the memory that is free
    now: the least it needs, and what it could have.

    For example:
      weft ls
      weft ls --json

    Parameters
    ----------
    as_json
        Print a JSON list with name, kind, size_bytes, folder, needed_bytes, free_bytes and verdict.
    """
    from weft.cli.models import ls_command

    ls_command(as_json)


@app.command
def pull(model: str, /) -> None:
    """Fetch a model, and convert it if need be, so that it is there when it is wanted. Prints its folder.

    For example:
      weft pull smollm2
      weft pull mlx-community/Qwen3-4B-4bit

    Parameters
    ----------
    model
        A built-in name (smollm2, tiny-hybrid), a .gguf file, or a Hugging Face id.
    """
    from weft.cli.models import pull_command

    pull_command(model)


@app.command
def ps(*, url: str | None = None, as_json: AsJson = False) -> None:
    """Show what a running server serves, and how busy it is.

    For example:
      weft ps
      weft ps --url http://127.0.0.1:9000 --json

    Parameters
    ----------
    url
        The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.
    as_json
        Print what the server says as JSON.
    """
    from weft.cli.models import ps_command

    ps_command(url, as_json)


@app.command
def load(model: str, /, *, fetch: Switch = False, force: Switch = False, url: str | None = None) -> None:
    """Have a running server load one more model, and wait until it answers.

    For example:
      weft load tiny-hybrid
      weft load mlx-community/Qwen3-4B-4bit --fetch

    Parameters
    ----------
    model
        A built-in name (smollm2, tiny-hybrid), a folder, a .gguf file, or a Hugging Face id.
    fetch
        Let the server download it where it is not on its machine.
    force
        Try it even if it does not seem to fit into memory.
    url
        The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.
    """
    from weft.cli.models import load_command

    load_command(model, url, fetch, force)


@app.command
def unload(model: str, /, *, url: str | None = None) -> None:
    """Have a running server end a model, and wait until its memory is free.

    Answers that it is giving may end first, for as long as the server's
    --drain-seconds.

    For example:
      weft unload tiny-hybrid
      weft unload smollm2 --url http://127.0.0.1:9000

    Parameters
    ----------
    model
        Its name, as `weft ps` has it.
    url
        The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.
    """
    from weft.cli.models import unload_command

    unload_command(model, url)


@app.command
def launch(
    agent: str,
    /,
    *arguments: str,
    model: str | None = None,
    url: str | None = None,
    api_key: str | None = None,
    show: Annotated[bool, Parameter(name="--print", negative="", show_default=False)] = False,
) -> None:
    """Start a coding agent against a running server: claude, codex, opencode, copilot, qwen, pi, goose, crush or aider.

    The agent gets a folder of its own for what it keeps, the served model's name
    and its true context; your own settings of it are not touched. What follows
    -- is handed on to it.

    For example:
      weft launch claude
      weft launch codex --model mlx-community/Qwen3-4B-4bit -- exec "What is this?"
      weft launch opencode --print

    Parameters
    ----------
    agent
        Its name.
    arguments
        What the agent is told on its own command line.
    model
        The model, where the server has several.
    url
        The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.
    api_key
        The server's key. Default: WEFT_API_KEY.
    show
        Print environment, files and command as lines for a shell, without the key, and start nothing.
    """
    from weft.cli.launch import LaunchOptions, launch_command

    launch_command(LaunchOptions(agent, model, url, api_key, show, arguments))


cache = App(name="cache", help="What a running server keeps of computed prompts, and why it had to compute one.")
app.command(cache)


@cache.command(name="ls")
def cache_ls(*, url: str | None = None, as_json: AsJson = False) -> None:
    """List the conversations whose computed prompts a running server keeps, the latest used first.

    For example:
      weft cache ls
      weft cache ls --url http://127.0.0.1:9000 --json

    Parameters
    ----------
    url
        The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.
    as_json
        Print what the server says as JSON: every chunk, not only the conversations' ends.
    """
    from weft.cli.cache import ls_command

    ls_command(url, as_json)


@cache.command(name="clear")
def cache_clear(model: str | None = None, /, *, url: str | None = None) -> None:
    """Make a running server forget its computed prompts, on disk too; those of running requests stay.

    For example:
      weft cache clear
      weft cache clear smollm2

    Parameters
    ----------
    model
        Only this model's.
    url
        The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.
    """
    from weft.cli.cache import clear_command

    clear_command(model, url)


@cache.command(name="why")
def cache_why(request_id: str, /, *, url: str | None = None, as_json: AsJson = False) -> None:
    """Say how much of a request's prompt was known, why no more, and where its time went.

    For example:
      weft cache why chatcmpl-0123456789abcdef0123456789abcdef

    Parameters
    ----------
    request_id
        The id of the reply, or what the header x-request-id said.
    url
        The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.
    as_json
        Print what the server says as JSON.
    """
    from weft.cli.cache import why_command

    why_command(request_id, url, as_json)


bench = App(name="bench", help="How fast a running server is, from outside.")
app.command(bench)


@bench.command(name="serve")
def bench_serve(
    *,
    clients: int = 8,
    requests: int = 32,
    prompt_tokens: int = 256,
    max_tokens: int = 64,
    shared_prefix: int = 0,
    replay: Switch = False,
    model: str | None = None,
    url: str | None = None,
    api_key: str | None = None,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Load a running server from several clients at once and say what they saw: speeds, waits, gaps, errors.

    Prompts are of random tokens, so that nothing of them is known before. With
    --replay each client is an agent: its requests are the turns of one growing
    conversation with tool calls and their results. Status 1 where a request failed.

    For example:
      weft bench serve
      weft bench serve --clients 32 --requests 200 --shared-prefix 128
      weft bench serve --replay --clients 4 --requests 80 --json load.json

    Parameters
    ----------
    clients
        How many ask at the same time.
    requests
        How many requests there are in all.
    prompt_tokens
        The length of each prompt; agents have their own.
    max_tokens
        The length of each answer; it is not ended before, but agents' may be.
    shared_prefix
        So many tokens at the beginning are the same in all prompts.
    replay
        Ask as agents do.
    model
        The model, where the server has several.
    url
        The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.
    api_key
        The server's key. Default: WEFT_API_KEY.
    json_file
        Write all figures, those of every request too, to this file.
    """
    from weft.cli.bench import BenchOptions, bench_serve_command

    return bench_serve_command(
        BenchOptions(clients, requests, prompt_tokens, max_tokens, shared_prefix, replay, model, url, api_key, json_file)
    )


@app.command
def top(*, url: str | None = None, api_key: str | None = None) -> None:
    """Watch a running server: requests and their states, rows, memory, tokens per second. Ctrl-C leaves.

    For example:
      weft top
      weft top --url http://127.0.0.1:9000

    Parameters
    ----------
    url
        The server's address. Default: WEFT_URL, else http://127.0.0.1:8400.
    api_key
        The server's key. Default: WEFT_API_KEY.
    """
    from weft.cli.top import top_command

    top_command(url, api_key)


@app.command
def doctor(*, bundle: Path | None = None) -> int:
    """Look whether all is well here: versions, settings, disk, device, memory, and a small server tried out.

    Each line is ok, slow or wrong, and says what to do. Status 1 where something is
    wrong. Nothing is fetched; the model tried is the one that comes with weft.

    For example:
      weft doctor
      weft doctor --bundle report.zip

    Parameters
    ----------
    bundle
        Write report, settings, versions and the end of the logs to this zip, without keys or prompts.
    """
    from weft.cli.doctor import doctor_command

    return doctor_command(bundle)


service = App(
    name="service", help="The server as a service of your own session: launchd on macOS, systemd on Linux. Never as root."
)
app.command(service)


@service.command(name="install")
def service_install(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    show: Annotated[bool, Parameter(name="--print", negative="", show_default=False)] = False,
) -> None:
    """Start `weft serve` now and at every login, and again when it dies. Installing again replaces it.

    Its settings are what follows, and ~/.config/weft/config.toml; that is the
    place for an API key.

    For example:
      weft service install
      weft service install smollm2 --port 9000
      weft service install --print

    Parameters
    ----------
    arguments
        What `weft serve` is told.
    show
        Print the file that would be installed, and do nothing.
    """
    from weft.cli.service import install_command

    install_command(arguments, show)


@service.command(name="uninstall")
def service_uninstall() -> None:
    """Stop the service and take its file away.

    For example:
      weft service uninstall
    """
    from weft.cli.service import uninstall_command

    uninstall_command()


@service.command(name="status")
def service_status() -> int:
    """Say whether the service is installed, whether it runs, and whether its server answers. Status 1 where not.

    For example:
      weft service status
    """
    from weft.cli.service import status_command

    return status_command()


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that lets a shell complete weft's commands and options.

    For example:
      weft completion bash > ~/.local/share/bash-completion/completions/weft
      weft completion zsh > "${fpath[1]}/_weft"
      weft completion fish > ~/.config/fish/completions/weft.fish

    Parameters
    ----------
    shell
        Which one.
    """
    sys.stdout.write(app.generate_completion(prog_name="weft", shell=shell))


def main() -> None:
    """Run the command line; errors of ours and of the user's end it with one sentence and status 1."""
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
