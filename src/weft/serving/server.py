"""The server put together: one supervisor per model, the service over them, the app over that, uvicorn under all.

`serve` runs until it is stopped. The front is this process; it never imports mlx.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import uvicorn
import uvloop
from starlette.types import ASGIApp

from weft import log
from weft.config import ServerConfig
from weft.errors import WeftError
from weft.metrics import Metrics
from weft.serving.engine_process import Supervisor
from weft.serving.service import LoadScreen, ServedModel, Service

DEFAULT_MODEL = "smollm2"
FALLBACK_MODEL = "tiny-hybrid"
GOODBYE_SECONDS = 2  # for the last bytes of answers, and the errors that end what did not finish in time
DRAIN_TICK_SECONDS = 0.05
MAX_FILES = 10_240  # every connection is one; the usual soft limit is 1,024, on macOS 256


class ServerScreen(LoadScreen, Protocol):
    """Who is told how the start goes."""

    def serving(self, url: str) -> None:
        """The server listens."""


MakeApp = Callable[[Service, ServerConfig], ASGIApp]


def serve(config: ServerConfig, screen: ServerScreen, make_app: MakeApp) -> int:
    """Bring everything up and serve until a signal ends it. Gives the exit status."""
    config.check()
    log.setup(config.log_format)
    _allow_files()
    listener = _listen(config)
    service = make_service(config)
    host, port = listener.getsockname()[:2]
    screen.serving(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(service, config, screen, listener, make_app(service, config)))
    return 1 if service.has_failed else 0


async def _run(service: Service, config: ServerConfig, screen: ServerScreen, listener: socket.socket, app: ASGIApp) -> None:
    server = Uvicorn(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=GOODBYE_SECONDS,
            timeout_keep_alive=75,
            server_header=False,
            ws="none",
        )
    )
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    async def drain() -> None:
        deadline = loop.time() + config.drain_seconds
        while not service.is_idle and loop.time() < deadline:  # who comes meanwhile is answered, with a refusal
            await asyncio.sleep(DRAIN_TICK_SECONDS)
        service.abandon_all()
        server.should_exit = True

    def end() -> None:
        """Take nothing new; what runs has its time, and a second signal takes that away."""
        if drains:
            service.abandon_all()
        else:
            service.take_nothing_new()
            drains.append(loop.create_task(drain()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    await service.start(screen, on_failure=end)
    try:
        await server.serve([listener])
    finally:
        await service.stop()


class Uvicorn(uvicorn.Server):
    """uvicorn with signals left to us: it would raise them again at the end, and an orderly end is status 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def make_service(config: ServerConfig) -> Service:
    """The models of a configuration, not yet started; those that are loaded later have no fallback."""
    names = config.models or (DEFAULT_MODEL,)
    fallback = config.fallback or (None if config.models else FALLBACK_MODEL)

    def make(name: str, fallback: str | None = None) -> ServedModel:
        return ServedModel(name, Supervisor(_command(name, fallback, config), config.hang_seconds), config.late_system)

    return Service([make(name, fallback) for name in names], Metrics(), config.max_queue, make)


def _command(name: str, fallback: str | None, config: ServerConfig) -> list[str]:
    options = ["--exact"] if config.exact else []
    options += ["--max-rows", str(config.max_rows)] if config.max_rows else []
    options += ["--memory-bytes", str(config.memory * 2**20)] if config.memory else []
    options += ["--cache-bytes", str(config.cache_megabytes * 2**20)]
    if config.cache_dir is not None:
        folder = Path(config.cache_dir).expanduser()
        options += ["--cache-dir", str(folder), "--cache-dir-bytes", str(config.cache_dir_megabytes * 2**20)]
    options += ["--cache-canary"] if config.cache_canary else []
    options += ["--fallback", fallback] if fallback else []
    return [sys.executable, "-m", "weft.engine", *options, "--", name]


def _allow_files() -> None:
    """Let this process have as many open files as a crowd of clients takes, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listen(config: ServerConfig) -> socket.socket:
    """The port, taken before anything is loaded: a port in use is known at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host.strip("[]"), config.port))
    except OSError as error:
        raise WeftError(
            f"port {config.port} of {config.host} can not be taken ({error.strerror}); choose another with --port"
        ) from error
    listener.listen(2048)
    return listener
