"""`weft ls`, `pull`, `ps`, `load`, `unload`: the models on this machine, and those of a running server."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.filesize import decimal

from weft.cli import AsJson, Switch, Url, write_columns, write_json
from weft.cli.client import SILENCE_SECONDS, ListedModel, ServerClient
from weft.errors import WeftError

STATUS_SECONDS = 5.0
POLL_SECONDS = 0.2  # between two questions how far a model is loaded

LIST_HELP = "Print a JSON list with name, kind, size_bytes, folder, needed_bytes, free_bytes and verdict."
Fetchable = Annotated[str, Parameter(help="A built-in name (smollm2, tiny-hybrid), a .gguf file, or a Hugging Face id.")]
AnyModel = Annotated[str, Parameter(help="A built-in name (smollm2, tiny-hybrid), a folder, a .gguf file, or a Hugging Face id.")]
Fetch = Annotated[Switch, Parameter(help="Let the server download it where it is not on its machine.")]
Force = Annotated[Switch, Parameter(help="Try it even if it does not seem to fit into memory.")]


class ServerStatus(msgspec.Struct):
    """What GET /v1/status says."""

    models: list[ListedModel]
    version: str = "unknown"
    uptime_seconds: float = 0.0


def ls_command(*, as_json: Annotated[AsJson, Parameter(help=LIST_HELP)] = False) -> None:
    """List the models on this machine: built in, converted by weft, and in the Hugging Face cache.

    FITS says whether a server's engine would fit into the memory that is free
    now: the least it needs, and what it could have.

    For example:
      weft ls
      weft ls --json
    """
    from weft.model.resolve import local_models
    from weft.serving.registry import Fit, free_bytes, needed_bytes

    free = free_bytes()
    models = [(model, Fit(needed_bytes(model), free)) for model in local_models()]
    if as_json:
        write_json([asdict(model) | asdict(fit) | {"verdict": fit.verdict} for model, fit in models])
        return
    rows: list[tuple[str, ...]] = [("NAME", "SIZE", "FITS", "KIND", "FOLDER")]
    for model, fit in models:
        fits: str = fit.verdict
        if fit.needed_bytes is not None and fit.free_bytes is not None:
            fits += f" ({decimal(fit.needed_bytes)} of {decimal(fit.free_bytes)})"
        rows.append((model.name, decimal(model.size_bytes), fits, model.kind, str(model.folder or "not fetched yet")))
    write_columns(rows)


def pull_command(model: Fetchable, /) -> None:
    """Fetch a model, and convert it if need be, so that it is there when it is wanted. Prints its folder.

    For example:
      weft pull smollm2
      weft pull mlx-community/Qwen3-4B-4bit
    """
    from weft.engine.process import device_in_use  # how a GGUF file is converted depends on it
    from weft.model.resolve import resolve

    sys.stdout.write(f"{resolve(model, quantized=device_in_use() != 'cpu')}\n")


def ps_command(*, url: Url = None, as_json: AsJson = False) -> None:
    """Show what a running server serves, and how busy it is.

    For example:
      weft ps
      weft ps --url http://127.0.0.1:9000 --json
    """
    client = ServerClient(url)
    if as_json:
        write_json(client.fetch("/v1/status", dict[str, Any], STATUS_SECONDS))
        return
    server = client.fetch("/v1/status", ServerStatus, STATUS_SECONDS)
    sys.stdout.write(f"{client.url}: weft {server.version}, up for {timedelta(seconds=round(server.uptime_seconds))}\n")
    rows: list[tuple[str, ...]] = [("MODEL", "STATUS", "CONTEXT", "RUNNING", "WAITING", "PID", "RESTARTS", "MEMORY")]
    for model in server.models:
        memory = ", ".join(f"{kind} {decimal(size)}" for kind, size in model.memory.items())
        numbers = (model.context_length, model.rows_running, model.rows_waiting, model.engine_pid, model.engine_restarts)
        shown = ("-" if number is None else str(number) for number in numbers)
        rows.append((model.id, model.status.get("value", "-"), *shown, memory))
    write_columns(rows)


def load_command(model: AnyModel, /, *, fetch: Fetch = False, force: Force = False, url: Url = None) -> None:
    """Have a running server load one more model, and wait until it answers.

    For example:
      weft load tiny-hybrid
      weft load mlx-community/Qwen3-4B-4bit --fetch
    """
    from weft.model.download import shown

    client = ServerClient(url)
    name = _name_on_server(client, model)
    body = {"model": name, "fetch": fetch, "force": force}
    found = client.fetch("/v1/models/load", ListedModel, SILENCE_SECONDS, body)
    with shown(None) as report:
        while found.status.get("value") == "loading":
            if (progress := found.condition.get("progress")) is not None:
                report(f"{name}: {progress['what']}", progress.get("done", 0), progress.get("total") or None)
            time.sleep(POLL_SECONDS)
            models = client.fetch("/v1/status", ServerStatus, STATUS_SECONDS).models
            found = next((one for one in models if one.id == name), ListedModel(name, status={"value": "unloaded"}))
    if found.status.get("value") != "loaded":
        raise WeftError(f"{name} is not loaded: {found.status.get('message') or found.status.get('value')}")
    sys.stdout.write(f"{name} is loaded\n")


def unload_command(model: Annotated[str, Parameter(help="Its name, as `weft ps` has it.")], /, *, url: Url = None) -> None:
    """Have a running server end a model, and wait until its memory is free.

    Answers that it is giving may end first, for as long as the server's
    --drain-seconds.

    For example:
      weft unload tiny-hybrid
      weft unload smollm2 --url http://127.0.0.1:9000
    """
    client = ServerClient(url)
    name = _name_on_server(client, model)
    client.fetch("/v1/models/unload", dict[str, Any], SILENCE_SECONDS, {"model": name})
    sys.stdout.write(f"{name} is unloaded\n")


def _name_on_server(client: ServerClient, name: str) -> str:
    """A model's name, or the absolute path of its folder: the server's current folder is another one than ours."""
    from weft.model.resolve import ALIASES

    path, server = Path(name).expanduser(), client.fetch("/v1/status", ServerStatus, STATUS_SECONDS)
    is_known = name in ALIASES or any(model.id == name for model in server.models)
    return name if is_known or not path.exists() else str(path.absolute())
