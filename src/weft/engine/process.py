"""The engine process, `python -m weft.engine.process ADDRESS`: loads a model, reports that it is ready, serves the front.

The front starts it, sends its settings as the first message and is its only user. `bring_up` makes an engine from settings
for this process and for `weft.LLM`. Nothing here imports mlx before weft's BLAS is bound.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.metadata
import logging
import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft import log
from weft.config import RESERVE_SHARE, SAFE_SHARE, Device, EngineConfig, EngineSettings, available_memory_bytes
from weft.engine.lockstep import AgreedChannel
from weft.engine.ranks import Rank, leading
from weft.errors import ModelError
from weft.grammar.compiler import DEEP_STACK_BYTES, Compiler
from weft.ipc.channel import FRONT_PID, EngineEnd
from weft.ipc.messages import Beat, Failed, Loading, Ready
from weft.kernels import blas
from weft.kernels.blas import BlasReport
from weft.model.load_phases import LoadPhases

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.model.download import Progress
    from weft.model.loader import LoadedModel

BEAT_SECONDS = 0.25
SETTINGS_SECONDS = 60.0  # how long the front may take to send the settings
MIN_ROW_TOKENS = 64  # of prompt and answer: an engine with memory for less is of no use
CLOSE_SECONDS = 2.0  # to write queued prefixes to disk before the front loses patience


def main() -> None:
    """Run the engine process: receive settings, load the model, serve it over the channel until the front sends Shutdown."""
    address = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM):  # these reach the whole group; the front decides when we end
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the front asks a hung engine for its stack before it kills it
    threading.stack_size(DEEP_STACK_BYTES)  # before the first thread: grammars are compiled recursively
    folder = Path(address.removeprefix("ipc://")).parent
    end_with_parent(int(os.environ.get(FRONT_PID, os.getppid())), folder)
    channel = EngineEnd(address)
    channel.send(Loading("starting"))
    try:
        with heartbeat(channel):
            settings = channel.receive_settings(SETTINGS_SECONDS)
            log.setup(settings.log_format)
            _serve(channel, settings, folder)
    except ModelError as error:
        channel.send(Failed(str(error)))
    finally:
        channel.close()


def _serve(channel: EngineEnd, settings: EngineSettings, folder: Path) -> None:
    if settings.shards > 1:  # they share the cores
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, blas.default_threads() // settings.shards)))
    phases = LoadPhases()
    phases.begin("imports")
    report = blas.bind()  # before anything imports mlx
    import_mlx_lm()

    def progress(what: str, done: int, total: int | None) -> None:
        channel.send(Loading(what, done, total or 0))

    notices = [report.warning] if report.warning else []
    safe = safe_memory()
    shared = None if safe is None else int(safe * settings.memory_share / settings.shards)
    settings = msgspec.structs.replace(settings, memory_bytes=settings.memory_bytes or shared)
    if settings.shards > 1:
        progress("starting the other ranks", 0, None)
    with contextlib.nullcontext() if settings.shards == 1 else leading(settings, folder) as rank:
        _serve_rank(channel, settings, report, rank, notices, phases)


def _serve_rank(
    channel: EngineEnd, settings: EngineSettings, report: BlasReport, rank: Rank | None, notices: list[str], phases: LoadPhases
) -> None:
    """Load the model, as a whole or as rank 0 of several, and serve it."""
    from weft.engine.host import Host, memory_in_use

    def progress(what: str, done: int, total: int | None) -> None:
        channel.send(Loading(what, done, total or 0))

    engine, loaded, problem = bring_up_or_fallback(settings, report, progress, phases, rank)
    name = settings.model
    if problem is not None and settings.fallback:
        notices.append(f"{name} could not be had, so {settings.fallback} is served instead: {problem}")
        name = settings.fallback
    phases.begin("vocabulary")
    compiler = Compiler(loaded.folder / "tokenizer.json", loaded.vocab_size, loaded.eos_token_ids)
    channel.send(Loading("reading the vocabulary"))
    problem = compiler.tokenizer.problem  # built now: building it holds the interpreter, and streams would feel it
    if problem is not None:
        notices.append(f"its answers can not be constrained, and requests that ask for it are refused: {problem}")
        logging.getLogger("weft.engine").warning("%s: %s", name, notices[-1])
    ready = Ready(
        model=name,
        folder=str(loaded.folder),
        limits=engine.limits,
        max_rows=engine.config.max_rows,
        device=device_in_use(),
        versions="-".join(f"{part}{importlib.metadata.version(part)}" for part in ("weft", "mlx")),
        memory=memory_in_use(engine),
        notice="; ".join(notices) or None,
        speculation=engine.speculation.names,
        no_speculation=engine.speculation.unused,
        has_vision=engine.adapter.vision is not None,
        no_vision=engine.adapter.no_vision,
    )
    phases.end()
    logging.getLogger("weft.engine").info("%s is ready after %s", name, phases, extra={"fields": {"phases": phases.seconds}})
    channel.send(ready)
    connected = channel if rank is None else AgreedChannel(rank.lockstep, channel)
    Host(engine, compiler, connected, has_canary=settings.cache_canary, has_reports=settings.report_prefixes).run()
    if engine.prefix.disk is not None:
        engine.prefix.disk.close(CLOSE_SECONDS)


def import_mlx_lm() -> None:
    """Import mlx-lm without transformers, which only its tokenizers need: half of the start. Not in a user's own process."""
    unused = type("Unused", (), {"register": lambda *_, **__: None})
    for name in (names := [] if "transformers" in sys.modules else ["transformers", "transformers.tokenization_utils_base"]):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name])["__getattr__"] = lambda _: unused
    try:
        importlib.import_module("mlx_lm.utils")
    except Exception:  # an mlx-lm that needs more of it gets the real one
        names += [name for name in sys.modules if name.partition(".")[0] == "mlx_lm"]
    for name in names:
        del sys.modules[name]


@contextmanager
def heartbeat(channel: EngineEnd) -> Iterator[None]:
    """Context manager: send heartbeats to the front from a background thread, even during long forwards and compilations.

    What takes long in an engine releases the GIL (measured: evaluating, reading arrays, compiling grammars).
    """
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            turns, since = channel.listened
            channel.send(Beat(turns, time.monotonic() - since if turns else 0.0))

    thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()  # then the channel can be closed


def end_with_parent(parent: int, folder: Path) -> None:
    """Start a watcher thread that removes the channel's folder and exits this process once the parent process is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the front").start()


def keeps_packed() -> bool:
    """Whether a GGUF file's own 4- and 8-bit weights are kept: on a CPU only weft's own operations multiply them fast."""
    blas.bind()  # before mlx is imported; bound already in an engine
    return device_in_use() != "cpu" or missing_operations() is None


def missing_operations() -> str | None:
    """Return why weft's own operations for CPUs are not there, and what to do; None if they are."""
    from weft.kernels import primitives

    return primitives.missing


def bring_up(
    settings: EngineSettings,
    report: BlasReport,
    progress: Progress,
    config: EngineConfig | None = None,
    phases: LoadPhases | None = None,
    rank: Rank | None = None,
) -> tuple[Engine, LoadedModel]:
    """Resolve and load the model, open the disk cache and build an Engine; raises ModelError. Call `blas.bind` first.

    `rank`: this process's place among those that the engine is divided over.
    """
    from weft.engine.engine import Engine
    from weft.engine.faults import Faults
    from weft.engine.warm_up import warm_up
    from weft.memory.disk import DiskTier
    from weft.memory.disk_files import identity_of
    from weft.model.adapter import Adapter
    from weft.model.loader import load
    from weft.model.resolve import resolve

    phases = phases or LoadPhases()
    phases.begin("files")
    device = device_in_use()
    group = None if rank is None else rank.group
    source = resolve(settings.model, quantized=keeps_packed(), progress=progress)
    loaded = load(source, progress=progress, phases=phases, group=group)
    adapter = Adapter(loaded, with_head="mtp" in (settings if config is None else config).speculate, phases=phases)
    is_row_invariant = report.skinny or adapter.is_row_invariant
    config = config or EngineConfig.resolve(settings, device, is_row_invariant=is_row_invariant)
    if config.width is not None and adapter.head is not None:
        adapter = Adapter(loaded, with_head=False, phases=phases)  # steps of constant width have no room for its guesses
    disk = None
    if settings.cache_folder is not None and config.cache_bytes:
        progress("reading cached prefixes on disk", 0, None)
        phases.begin("prefixes on disk")
        versions = [f"{part} {importlib.metadata.version(part)}" for part in ("weft", "mlx", "mlx-lm")]
        shape = f"{len(adapter.specs)} {config.chunk_tokens} {config.width} {config.exact} {adapter.ragged is not None}"
        facts = (*versions, device, report.name, shape)
        place = Path(settings.cache_folder)
        disk = DiskTier(place, identity_of(loaded.folder, facts, place / "weights.json"), settings.cache_folder_bytes)
        disk.open()
    if device == "cuda":
        limit_freed_memory(config.memory_bytes or safe_memory())
        progress("warming up", 0, None)
        phases.begin("warm-up")
        warm_up(adapter, config)
    clock, lockstep = (time.monotonic, None) if rank is None else (rank.lockstep.clock, rank.lockstep)
    engine = Engine(adapter, config, clock, disk, Faults.of_environment(), lockstep)
    check_memory(engine.limits.memory_tokens, adapter.weights_bytes, config.memory_bytes)
    phases.end()
    return engine, loaded


def limit_freed_memory(budget_bytes: int | None) -> None:
    """Limit what MLX keeps of freed memory for later to what is reserved for forwards.

    Without a limit it keeps all, and prompts of many lengths need arrays of many sizes, until the device is full. From then on it
    kept nothing from one step to the next, and steps of eight rows took a quarter longer (docs/log.md).
    """
    import mlx.core as mx

    if budget_bytes is not None:
        mx.set_cache_limit(int(budget_bytes * RESERVE_SHARE))


def check_memory(max_tokens: int | None, weights_bytes: int, budget_bytes: int | None) -> None:
    """Raise ModelError if the memory of an engine is too little for a row of MIN_ROW_TOKENS beside the weights."""
    if max_tokens is not None and max_tokens < MIN_ROW_TOKENS:
        message = (
            f"its weights take {weights_bytes} bytes, and of the {budget_bytes} bytes allowed too few are left for a request"
        )
        raise ModelError(f"{message} of {MIN_ROW_TOKENS} tokens; give the engine more with --memory, or serve a smaller model")


def bring_up_or_fallback(
    settings: EngineSettings,
    report: BlasReport,
    progress: Progress,
    phases: LoadPhases | None = None,
    rank: Rank | None = None,
) -> tuple[Engine, LoadedModel, str | None]:
    """Bring up the model, or the fallback if it can not be had; the third value says why not, and is None if it could.

    What the first attempt held is freed before the second begins: both models may not fit into memory.
    """
    try:
        return *bring_up(settings, report, progress, phases=phases, rank=rank), None
    except ModelError as error:
        if not settings.fallback or rank is not None:
            raise
        problem = str(error)
        error.__traceback__ = None  # its frames hold the model that failed
    import mlx.core as mx

    gc.collect()  # half-built models have cycles
    mx.clear_cache()
    fallback = msgspec.structs.replace(settings, model=settings.fallback, fallback=None)
    return *bring_up(fallback, report, progress, phases=phases), problem


def safe_memory() -> int | None:
    """Return the default memory budget in bytes: a share of available RAM on a CPU, of GPU memory on a GPU; None if unknown."""
    import mlx.core as mx

    if device_in_use() == "cpu":
        return available_memory_bytes()
    facts = mx.device_info()
    size = facts.get("max_recommended_working_set_size") or facts.get("total_memory") or facts.get("memory_size")
    return int(int(size) * SAFE_SHARE) if size else None


def device_in_use() -> Device:
    """Return the kind of MLX's default device: "cpu", "metal" or "cuda"."""
    import mlx.core as mx

    gpu: Device = "metal" if mx.metal.is_available() else "cuda"
    return gpu if mx.default_device() == mx.gpu else "cpu"


if __name__ == "__main__":
    main()
