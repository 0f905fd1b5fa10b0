"""The server put together: one supervisor per model, the service over them, the app over that, uvicorn under all.

`serve` runs until it is stopped. The front is this process; it never imports mlx.
"""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from weft import log
from weft.api.app import make_app
from weft.config import ServerConfig
from weft.errors import WeftError
from weft.link.supervisor import Supervisor
from weft.metrics import Metrics
from weft.service import Screen, Served, Service

DEFAULT_MODEL = "smollm2"
FALLBACK_MODEL = "tiny-hybrid"


class ServerScreen(Screen, Protocol):
    """Who is told how the start goes."""

    def serving(self, url: str) -> None:
        """The server listens."""


def serve(config: ServerConfig, screen: ServerScreen) -> int:
    """Bring everything up and serve until a signal ends it. Gives the exit status."""
    config.check()
    log.setup(config.log_format)
    listener = _listen(config)
    service = make_service(config)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:  # noqa: ARG001 - Starlette's protocol
        await service.start(screen, on_failure=lambda: setattr(server, "should_exit", True))
        try:
            yield
        finally:
            await service.stop()

    server = uvicorn.Server(
        uvicorn.Config(
            make_app(service, config, lifespan),
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=math.ceil(config.drain_seconds),
            timeout_keep_alive=75,
            server_header=False,
            ws="none",
        )
    )
    host, port = listener.getsockname()[:2]
    screen.serving(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    server.run(sockets=[listener])
    return 1 if all(served.failed for served in service.models) else 0


def make_service(config: ServerConfig) -> Service:
    """The models of a configuration, not yet started."""
    names = config.models or (DEFAULT_MODEL,)
    fallback = config.fallback or (None if config.models else FALLBACK_MODEL)
    models = [Served(name, Supervisor(_command(name, fallback, config)), config.late_system) for name in names]
    return Service(models, Metrics(), config.max_queue)


def _command(name: str, fallback: str | None, config: ServerConfig) -> list[str]:
    options = ["--exact"] if config.exact else []
    options += ["--max-rows", str(config.max_rows)] if config.max_rows else []
    options += ["--fallback", fallback] if fallback else []
    return [sys.executable, "-m", "weft.engine", *options, "--", name]


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
