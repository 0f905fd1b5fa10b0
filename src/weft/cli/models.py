"""`weft ls`, `pull`, `ps`, `load`, `unload`: the models on this machine, and those a running server serves."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.filesize import decimal

from weft.cli.client import SILENCE_SECONDS, ServerClient
from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.serving.registry import Fit

STATUS_SECONDS = 5.0
LOOK_SECONDS = 0.2  # between two looks at how far a model is


def ls_command(as_json: bool) -> None:
    """Print what is here: name, size, whether it fits into memory now, kind, folder."""
    from weft.model.resolve import local_models
    from weft.serving.registry import Fit, free_bytes, needed_bytes

    models, free = local_models(), free_bytes()
    fits = [Fit(needed_bytes(model), free) for model in models]
    if as_json:
        rows = [
            asdict(model) | {"folder": str(model.folder) if model.folder else None, **asdict(fit), "verdict": fit.verdict}
            for model, fit in zip(models, fits, strict=True)
        ]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    lines = [
        (model.name, decimal(model.size_bytes), _fit(fit), model.kind, str(model.folder or "not fetched yet"))
        for model, fit in zip(models, fits, strict=True)
    ]
    write_columns([("NAME", "SIZE", "FITS", "KIND", "FOLDER"), *lines])


def _fit(fit: Fit) -> str:
    if fit.needed_bytes is None or fit.free_bytes is None:
        return fit.verdict
    return f"{fit.verdict} ({decimal(fit.needed_bytes)} of {decimal(fit.free_bytes)})"


def pull_command(name: str) -> None:
    """Fetch and convert, with bars on stderr; the folder goes to stdout."""
    from weft.engine.process import device_in_use  # how a GGUF file is converted depends on it
    from weft.model.resolve import resolve

    sys.stdout.write(f"{resolve(name, quantized=device_in_use() != 'cpu')}\n")


class ModelStatus(msgspec.Struct):
    """What a server says of one model, as far as it is shown here."""

    id: str
    status: dict[str, str] = {}
    context_length: int | None = None
    rows_running: int = 0
    rows_waiting: int = 0
    engine_pid: int | None = None
    engine_restarts: int = 0
    memory: dict[str, int] = {}
    condition: dict[str, Any] = {}


class ServerStatus(msgspec.Struct):
    """What a server says of itself."""

    models: list[ModelStatus]
    version: str = "unknown"
    uptime_seconds: float = 0.0


def ps_command(url: str | None, as_json: bool) -> None:
    """Print what the server at `url` says of itself."""
    client = ServerClient(url)
    if as_json:
        sys.stdout.write(json.dumps(client.get("/v1/status", dict[str, Any], STATUS_SECONDS), indent=2) + "\n")
        return
    server = client.get("/v1/status", ServerStatus, STATUS_SECONDS)
    sys.stdout.write(f"{client.url}: weft {server.version}, up for {timedelta(seconds=round(server.uptime_seconds))}\n")
    heads = ("MODEL", "STATUS", "CONTEXT", "RUNNING", "WAITING", "PID", "RESTARTS", "MEMORY")
    write_columns([heads, *map(_model_line, server.models)])


def _model_line(model: ModelStatus) -> tuple[str, ...]:
    memory = ", ".join(f"{kind} {decimal(size)}" for kind, size in model.memory.items())
    numbers = (model.context_length, model.rows_running, model.rows_waiting, model.engine_pid, model.engine_restarts)
    return (model.id, model.status.get("value", "-"), *("-" if number is None else str(number) for number in numbers), memory)


def load_command(name: str, url: str | None, fetch: bool, force: bool) -> None:
    """Have the server at `url` load a model, and wait until it answers. Raises WeftError where it never will."""
    from weft.model.download import shown

    client = ServerClient(url)
    name = _name_there(client, name)
    told = client.post("/v1/models/load", {"model": name, "fetch": fetch, "force": force}, ModelStatus, SILENCE_SECONDS)
    with shown(None) as report:
        while told.status.get("value") == "loading":
            if (progress := told.condition.get("progress")) is not None:
                report(f"{name}: {progress['what']}", progress.get("done", 0), progress.get("total") or None)
            time.sleep(LOOK_SECONDS)
            models = client.get("/v1/status", ServerStatus, STATUS_SECONDS).models
            told = next((model for model in models if model.id == name), ModelStatus(name, {"value": "unloaded"}))
    if told.status.get("value") != "loaded":
        raise WeftError(f"{name} is not loaded: {told.status.get('message') or told.status.get('value')}")
    sys.stdout.write(f"{name} is loaded\n")


def unload_command(name: str, url: str | None) -> None:
    """Have the server at `url` unload a model, and wait until its memory is free."""
    client = ServerClient(url)
    name = _name_there(client, name)
    client.post("/v1/models/unload", {"model": name}, dict[str, Any], SILENCE_SECONDS)
    sys.stdout.write(f"{name} is unloaded\n")


def _name_there(client: ServerClient, name: str) -> str:
    """A name as the server must be told it: its current folder is another one than ours."""
    from weft.model.resolve import ALIASES

    path, server = Path(name).expanduser(), client.get("/v1/status", ServerStatus, STATUS_SECONDS)
    is_known = name in ALIASES or any(model.id == name for model in server.models)
    return name if is_known or not path.exists() else str(path.absolute())


def write_columns(rows: list[tuple[str, ...]]) -> None:
    """Print a table whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
