"""The engine's process: `python -m weft.engine MODEL ADDRESS`. Loads, says it is ready, runs until the front ends it.

The front starts it and is its only user. A process of its own, so that nothing that happens to a model takes the server.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import os
import shutil
import signal
import threading
import time
from pathlib import Path

from weft.engine.heartbeat import Heartbeat
from weft.errors import ModelError
from weft.ipc.channel import FRONT_PID, EngineEnd
from weft.ipc.messages import Failed, Loading, Ready
from weft.kernels import blas

CLOSE_SECONDS = 2.0  # to write down what is left of computed prompts, before whoever ends us loses patience


def main() -> None:
    """Bring a model up and serve it over the channel."""
    asked = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM):  # these reach the whole group; the front decides when we end
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()  # a crash says where it was
    faulthandler.register(signal.SIGUSR1)  # and so does a hung engine, before the front kills it
    _end_with(int(os.environ.get(FRONT_PID, os.getppid())), Path(asked.address.removeprefix("ipc://")).parent)
    channel = EngineEnd(asked.address)
    channel.send(Loading("starting"))
    try:
        with Heartbeat(channel):
            _serve(channel, asked)
    except ModelError as error:
        channel.send(Failed(str(error)))
    finally:
        channel.close()


def _serve(channel: EngineEnd, asked: argparse.Namespace) -> None:
    report = blas.bind()  # before anything imports mlx

    from weft.engine.bring_up import bring_up, device_in_use, safe_memory
    from weft.engine.canary import Canary
    from weft.engine.host import Host, memory_in_use
    from weft.engine.prefix import PrefixSharing
    from weft.grammar.compiler import Compiler

    def progress(what: str, done: int, total: int | None) -> None:
        channel.send(Loading(what, done, total or 0))

    notices = [report.warning] if report.warning else []
    name = asked.model
    settings = {
        "exact": asked.exact,
        "max_rows": asked.max_rows,
        "memory_bytes": asked.memory_bytes or safe_memory(),
        "cache_bytes": asked.cache_bytes,
        "cache_folder": asked.cache_dir,
        "cache_folder_bytes": asked.cache_dir_bytes,
    }
    try:
        engine, loaded = bring_up(name, report, progress, **settings)
    except ModelError as error:
        if not asked.fallback:
            raise
        notices.append(f"{name} could not be had, so {asked.fallback} is served instead: {error}")
        name = asked.fallback
        engine, loaded = bring_up(name, report, progress, **settings)
    ready = Ready(
        model=name,
        folder=str(loaded.folder),
        limits=engine.limits,
        max_rows=engine.config.max_rows,
        device=device_in_use(),
        versions="-".join(f"{part}{importlib.metadata.version(part)}" for part in ("weft", "mlx")),
        memory=memory_in_use(engine),
        notice="; ".join(notices) or None,
    )
    compiler = Compiler(loaded.folder / "tokenizer.json", loaded.vocab_size, loaded.eos_token_ids)
    channel.send(Loading("reading the vocabulary"))
    assert compiler.tokenizer  # built now: it holds the interpreter, and streams would feel it
    channel.send(ready)
    host = Host(engine, compiler, channel, time.monotonic)
    host.canary = (
        Canary(engine.prefix, engine.runner) if asked.cache_canary and isinstance(engine.prefix, PrefixSharing) else None
    )
    host.run()
    if engine.prefix.disk is not None:
        engine.prefix.disk.close(CLOSE_SECONDS)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m weft.engine", description="The engine's process; the front starts it.")
    parser.add_argument("model")
    parser.add_argument("address")
    parser.add_argument("--fallback")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--max-rows", type=int)
    parser.add_argument("--memory-bytes", type=int)
    parser.add_argument("--cache-bytes", type=int, default=0)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--cache-dir-bytes", type=int, default=10 << 30)
    parser.add_argument("--cache-canary", action="store_true")
    return parser.parse_args()


def _end_with(parent: int, folder: Path) -> None:
    """An engine whose front is gone has nobody to work for: it ends, whatever it is doing, and tidies up behind the front."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the front").start()


if __name__ == "__main__":
    main()
