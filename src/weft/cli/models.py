"""`weft ls`, `weft pull`, `weft ps`: the models on this machine, and those a running server serves."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import msgspec
from rich.filesize import decimal

from weft.cli.client import Client

STATUS_SECONDS = 5.0


def ls_command(as_json: bool) -> None:
    """Print what is here: name, size, kind, folder."""
    from weft.model.resolve import local_models

    models = local_models()
    if as_json:
        rows = [asdict(model) | {"folder": str(model.folder) if model.folder else None} for model in models]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    lines = [(model.name, decimal(model.size_bytes), model.kind, str(model.folder or "not fetched yet")) for model in models]
    write_columns([("NAME", "SIZE", "KIND", "FOLDER"), *lines])


def pull_command(name: str) -> None:
    """Fetch and convert, with bars on stderr; the folder goes to stdout."""
    from weft.engine.bring_up import device_in_use  # how a GGUF file is converted depends on it
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


class ServerStatus(msgspec.Struct):
    """What a server says of itself."""

    models: list[ModelStatus]
    version: str = "unknown"
    uptime_seconds: float = 0.0


def ps_command(url: str | None, as_json: bool) -> None:
    """Print what the server at `url` says of itself."""
    client = Client(url)
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


def write_columns(rows: list[tuple[str, ...]]) -> None:
    """Print a table whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
