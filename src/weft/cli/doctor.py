"""`weft doctor`: one line with a verdict for each thing that must be well, and a file with all of it for a report.

Facts of the machine and of MLX are read in this process, which loads mlx for it; what a server does is tried by `trials`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from weft import __version__
from weft.cli.client import ServerClient
from weft.cli.service import log_end
from weft.cli.trials import MODEL, Finding, trials
from weft.config import cache_folder
from weft.engine.budget import MemoryBudget
from weft.errors import RequestError, WeftError

STYLES = {"ok": "green", "slow": "yellow", "wrong": "bold red"}
ROOM_BYTES = 1_000_000_000  # the default model takes 0.7 GB while it is fetched and converted
LOG_LINES = 300
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")  # in the name of a variable


def doctor_command(bundle: Path | None) -> int:
    """Print the verdicts as they come. Gives the exit status: 1 where something is wrong."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        for verdict in examine(log):
            console.print(Text.assemble((verdict.grade, STYLES[verdict.grade]), str(verdict).removeprefix(verdict.grade)))
            verdicts.append(verdict)
        if bundle is not None:
            write_bundle(bundle, verdicts, log)
            console.print(f"{bundle} has this report, settings, versions and the end of the logs; no keys, no prompts")
    return 1 if any(verdict.grade == "wrong" for verdict in verdicts) else 0


def examine(log: Path) -> Iterator[Finding]:
    """Everything that is looked at, cheap things first. The trial server's log is written to `log`."""
    yield versions()
    yield settings()
    yield disk(cache_folder())
    yield running_server()
    yield from device()
    yield from trials(log)


def versions() -> Finding:
    """Of Python and of what weft stands on, the model definitions being pinned."""
    found = {name: _version(name) for name in ("mlx", "mlx-lm", "llguidance")}
    words = f"weft {__version__}, Python {platform.python_version()}, " + ", ".join(f"{name} {found[name]}" for name in found)
    needed = next((need for need in importlib.metadata.requires("weft") or () if need.startswith("mlx-lm==")), "")
    if needed and needed != f"mlx-lm=={found['mlx-lm']}":
        return Finding("wrong", "versions", words, f"weft needs {needed}: install it with pip")
    return Finding("ok", "versions", words)


def settings() -> Finding:
    """What `weft serve` would start with here."""
    done = _dumped()
    if done.returncode:
        return Finding("wrong", "settings", done.stderr.strip().removeprefix("weft: "), "`weft serve` says the same")
    table = tomllib.loads(done.stdout)["serve"]
    keys = f"{len(table['api_key'])} API keys" if table["api_key"] else "no API key"
    models = ", ".join(table["models"]) or "the default model"
    return Finding("ok", "settings", f"{models} at {table['host']}:{table['port']}, {keys}")


def disk(folder: Path) -> Finding:
    """Room where models are fetched and converted."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    words = f"{decimal(free)} free in {folder}"
    if not os.access(there, os.W_OK):
        return Finding("wrong", "disk", f"{there} can not be written", "set WEFT_CACHE to a folder that can")
    if free < ROOM_BYTES:
        return Finding("wrong", "disk", words, f"models need {decimal(ROOM_BYTES)} and more; set WEFT_CACHE to another disk")
    return Finding("ok", "disk", words)


def running_server() -> Finding:
    """What answers where other commands would ask."""
    client = ServerClient()
    try:
        status = client.get("/v1/status", dict[str, object], 5.0)
    except RequestError as error:
        return Finding("wrong", "port", f"{client.url}: {error}", "set WEFT_API_KEY to the server's key")
    except WeftError as error:
        if "no server answers" in str(error):
            return Finding("ok", "port", f"{client.url} is free")
        return Finding("wrong", "port", str(error), "end it, or serve elsewhere with --port")
    return Finding("ok", "port", f"{client.url} is weft {status.get('version')}, up for {status.get('uptime_seconds')} s")


def device() -> Iterator[Finding]:
    """What MLX computes on and with, and what fits into memory: asked from the model itself, loaded here."""
    try:
        from weft.llm import BLAS, LLM  # binds the BLAS, so it comes before whoever else imports mlx

        from weft.engine.process import safe_memory  # isort: skip

        llm = LLM(MODEL)
    except (ImportError, OSError, RuntimeError, WeftError) as error:
        yield Finding("wrong", "device", f"{MODEL} can not be loaded: {error}", "reinstall weft, and mlx with it")
        return
    machine = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"
    yield Finding("ok", "device", f"{machine}, MLX on {llm.device}")
    yield _products(BLAS.name, BLAS.threads, BLAS.warning)
    adapter = llm.engine.adapter
    yield _gated_delta(llm.device, adapter.gated_delta_modules)
    context, budget = llm.engine.limits.context_length, safe_memory()
    yield _memory(MemoryBudget(adapter.row_bytes, adapter.weights_bytes, budget), context, llm.config.max_rows)


def _products(name: str, threads: int | None, warning: str | None) -> Finding:
    match name:
        case "none":
            return Finding("ok", "products", "MLX's own on this device")
        case "weft+openblas":
            return Finding("ok", "products", f"weft's sgemm in front of OpenBLAS, {threads} threads")
        case "openblas":
            advice = "reinstall weft with a C compiler present: small batches would be faster, and exact"
            return Finding("slow", "products", f"OpenBLAS alone, {threads} threads", advice)
    return Finding("slow", "products", warning or "MLX's reference BLAS", "" if warning else "reinstall weft")


def _gated_delta(device: str, modules: list[str]) -> Finding:
    if modules:
        return Finding("ok", "gated delta", f"weft's, in chunks, on {device} ({', '.join(modules)})")
    if device == "metal":
        return Finding("ok", "gated delta", "mlx-lm's Metal kernel")
    return Finding("slow", "gated delta", "mlx-lm's loop over tokens", "install the mlx-lm that weft names")


def _memory(budget: MemoryBudget, context: int, max_rows: int) -> Finding:
    weights, row = decimal(budget.weights_bytes), budget.bytes_of(context)
    words = f"{MODEL}: weights {weights}, a row of {context:,} tokens {decimal(row)}"
    if budget.budget_bytes is None or budget.room_bytes is None:
        return Finding("ok", "memory", f"{words}; how much there is is not known here", "set --memory")
    fitting = budget.room_bytes // row
    words = f"--memory would be {budget.budget_bytes >> 20:,} (MiB); {words}, {fitting:,} fit, {max_rows} run together"
    if not fitting:
        return Finding("wrong", "memory", words, "end other programs: not even this model has room")
    return Finding("ok", "memory", words)


def write_bundle(file: Path, verdicts: list[Finding], log: Path) -> None:
    """All that a report needs, in one zip."""
    logs: dict[str, Callable[[], str]] = {
        "report.txt": lambda: "".join(f"{verdict}\n" for verdict in verdicts),
        "config.toml": lambda: _dumped().stdout,
        "versions.txt": _all_versions,
        "log.txt": lambda: _end(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else "",
        "service-log.txt": lambda: _end(log_end(LOG_LINES)),
    }
    try:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in logs.items():
                archive.writestr(name, without_secrets(text()))
    except OSError as error:
        raise WeftError(f"{file} can not be written: {error.strerror}") from error


def without_secrets(text: str) -> str:
    """The text without the value of any variable whose name says that it is secret. Prompts are never logged at all."""
    secrets = {value for name, value in os.environ.items() if SECRET.search(name.upper())}
    for secret in {part.strip() for value in secrets for part in (value, *value.split(","))}:
        if len(secret) > 3:  # shorter ones are in any text
            text = text.replace(secret, "********")
    return text


def _dumped() -> subprocess.CompletedProcess[str]:
    """The settings as `weft serve` understands them, keys masked."""
    command = [sys.executable, "-m", "weft", "serve", "--dump-config"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _all_versions() -> str:
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    head = f"Python {sys.version}\n{platform.platform()}\n"
    return head + "".join(f"{name}=={found[name]}\n" for name in sorted(found, key=str.lower))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _end(text: str) -> str:
    return "".join(line + "\n" for line in text.splitlines()[-LOG_LINES:])
