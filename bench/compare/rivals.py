"""The servers that are compared: who they are, and one of them running on a port of its own.

How they are installed is `install`'s, what is asked of them the workloads'. Every server gets the same weights and the
settings its own documentation recommends for many clients; nothing that would help one is turned off.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.compare.gguf import gguf_file
from bench.compare.install import (
    HOME,
    LLAMA_BIN,
    LOGS,
    ROOT,
    SDIST,
    VERSIONS,
    Unavailable,
    install_llama,
    install_package,
    last_words,
    python_of,
)
from bench.compare.weights import folder_of
from weft import __version__

__all__ = ["Rival", "Running", "Unavailable", "all_rivals", "install", "serving"]

START_SECONDS = 180.0
END_SECONDS = 10.0
FRESH = HOME / "home"  # the rivals' home folders, emptied before each start
BOUND = Path(__file__).parent / "bound"
SLOTS = 16
SLOT_TOKENS = {"smollm2": 4096, "tiny-hybrid": 2048}
# Continuous batching, flash attention and prompt caching are on unless told otherwise.
LLAMA_SERVER = "--model {file} --port {port} --parallel {slots} --ctx-size {context} --threads {cores} --jinja --offline"
LLAMA_KINDS = ("f32", "Q8_0", "Q4_1")


@dataclass(frozen=True)
class MlxServer:
    """How a server on MLX is started, with what its documentation says for many clients at once."""

    module: str  # words after `python`
    options: str
    model_id: str  # what it wants to hear in a request
    settings: tuple[tuple[str, str], ...] = ()  # environment variables


MLX_SERVERS = {
    "mlx-lm": MlxServer("-m mlx_lm server", "--model {folder} --port {port}", "default_model"),
    "vllm-mlx": MlxServer(
        "-m vllm_mlx.cli serve",
        "{folder} --served-model-name {model} --port {port} --continuous-batching --use-paged-cache",
        "{model}",
    ),
    "rapid-mlx": MlxServer(
        "-m rapid_mlx.cli serve",
        # By itself it waits for a shared prefix of 1,024 tokens and more, just above the one that is asked here.
        "{folder} --served-model-name {model} --port {port} --shared-prefix-wait-tokens 512",
        "{model}",
    ),
    "mlx-vlm": MlxServer(
        "-m mlx_vlm.server",
        "--model {folder} --host 127.0.0.1 --port {port}",
        "{folder}",
        (("APC_ENABLED", "1"), ("APC_NUM_BLOCKS", "4096")),
    ),
}


@dataclass(frozen=True)
class Rival:
    """One server in one set-up."""

    name: str
    kind: str  # "weft", "mlx" or "llama.cpp"
    version: str
    blas: str  # "weft's", "stock" or "own"
    drafts: str = ""  # where this set-up's drafts come from, as its label says; "" is the server's default
    options: str = ""  # what is added to the command line for that

    @property
    def label(self) -> str:
        """What the table calls it."""
        blas = "weft's BLAS" if self.kind == "mlx" and self.blas == "weft's" else ""
        return " + ".join(part for part in (self.name, blas, self.drafts) if part)


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    model: str  # the id it wants in a request
    pids: Callable[[], list[int]]  # its processes now
    started: float  # seconds until it said that it is ready
    spawned: float  # time.monotonic() when it was started


def all_rivals() -> list[Rival]:
    """weft and everybody else, weft first."""
    mlx = [Rival(name, "mlx", VERSIONS[name], blas) for name in MLX_SERVERS for blas in ("stock", "weft's")]
    llama = [Rival(f"llama.cpp {kind}", "llama.cpp", VERSIONS[SDIST], "own") for kind in LLAMA_KINDS]
    return [Rival("weft", "weft", __version__, "weft's"), *mlx, *llama]


def install(rival: Rival, say: Callable[[str], None]) -> None:
    """Have the rival ready to be started, if it is not yet."""
    if rival.kind == "mlx":
        install_package(rival.name, [*MLX_SERVERS[rival.name].module.split(), "--help"], say)
    elif rival.kind == "llama.cpp":
        install_llama(say)


@contextmanager
def serving(rival: Rival, model: str) -> Iterator[Running]:
    """The rival with this model, answering; all its processes are gone afterwards."""
    port = free_port()
    log = LOGS / f"{rival.label} {model}.log".replace(" ", "-").replace("'", "")
    LOGS.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    words, variables = command(rival, model, port), environment(rival)  # may make files: not counted as starting
    with log.open("wb") as said:
        spawned = time.monotonic()
        process = subprocess.Popen(
            words, stdout=said, stderr=said, stdin=subprocess.DEVNULL, env=variables, cwd=ROOT, start_new_session=True
        )
        try:
            wait_until_ready(process, f"{url}/health", log)
            yield Running(url, model_id(rival, model), lambda: processes_of(process.pid), time.monotonic() - spawned, spawned)
        finally:
            end(process)


def command(rival: Rival, model: str, port: int) -> list[str]:
    """How the rival is started."""
    match rival.kind:
        case "weft":
            return [sys.executable, "-m", "weft", "serve", model, "--port", str(port), *rival.options.split()]
        case "mlx":
            server = MLX_SERVERS[rival.name]
            options = filled(f"{server.options} {rival.options}", folder=folder_of(model), model=model, port=port)
            return [str(python_of(rival.name)), *server.module.split(), *options]
    file = gguf_file(model, rival.name.split()[1])
    context = SLOTS * SLOT_TOKENS[model]
    words = filled(LLAMA_SERVER, file=file, port=port, slots=SLOTS, context=context, cores=len(os.sched_getaffinity(0)))
    return [str(LLAMA_BIN / "llama-server"), *words, *rival.options.split()]


def filled(words: str, **values: object) -> list[str]:
    """A command line from its pattern; a value with blanks stays one word."""
    return [word.format(**values) for word in words.split()]


def model_id(rival: Rival, model: str) -> str:
    """The name under which the rival knows the model."""
    if rival.kind != "mlx":
        return model
    return MLX_SERVERS[rival.name].model_id.format(folder=folder_of(model), model=model)


def environment(rival: Rival) -> dict[str, str]:
    """Nobody may ask a hub; a rival has no memory of earlier starts; MLX finds weft's BLAS in its way or not."""
    if rival.kind == "weft":
        return dict(os.environ)
    home = FRESH / rival.label.replace(" ", "-")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    path = {"PYTHONPATH": str(BOUND) if rival.blas == "weft's" else ""}
    settings = MLX_SERVERS[rival.name].settings if rival.kind == "mlx" else ()
    return os.environ | path | dict(settings) | {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait for a 200; raises Unavailable with the server's last words when it dies or never comes up."""
    deadline = time.monotonic() + START_SECONDS
    while not is_ready(url):
        if process.poll() is not None:
            raise Unavailable(f"it ended with status {process.returncode} at start: {last_words(log)}")
        if time.monotonic() > deadline:
            raise Unavailable(f"it was not ready after {START_SECONDS:.0f} s: {last_words(log)}")
        time.sleep(0.05)


def is_ready(url: str) -> bool:
    """Whether the server says that it is well."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def processes_of(session: int) -> list[int]:
    """The processes of a session, read from /proc."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if session_of(path) == session]


def session_of(process: Path) -> int | None:
    """The session a process belongs to; none when it is gone."""
    with suppress(OSError):
        # The name in brackets may hold anything; state, parent, group and session come after it.
        return int((process / "stat").read_text().rpartition(")")[2].split()[3])
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End the whole session: politely, then not."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        for pid in processes_of(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while processes_of(process.pid) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)
    process.wait()
