"""A real front, HTTP and all, in a thread of the test, over engines the test chooses."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asking import Asked
from waiting import until
from weft.api.app import make_app
from weft.config import EngineSettings, ServerConfig
from weft.metrics import Metrics
from weft.serving.connections import make_http_server
from weft.serving.model import ServedModel
from weft.serving.pool import EnginePool
from weft.serving.service import Service
from weft.serving.starters.here import Here

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
FAILING_ENGINE = Path(__file__).parent / "failing_engine.py"


@dataclass
class Quiet:
    """A screen that keeps what it is told."""

    told: list[tuple[Any, ...]] = field(default_factory=list)

    def loading(self, *what: Any) -> None:
        self.told.append(("loading", *what))

    def ready(self, *what: Any) -> None:
        self.told.append(("ready", *what))

    def failed(self, *what: Any) -> None:
        self.told.append(("failed", *what))


def fake_pool(name: str, *words: str, hang_seconds: float = ServerConfig.hang_seconds, num_replicas: int = 1) -> EnginePool:
    """A pool of fake engines, each of which is told these words."""
    command = (sys.executable, str(FAKE_ENGINE), *words, name)
    return EnginePool([Here(EngineSettings(model=name), command, str(number)) for number in range(num_replicas)], hang_seconds)


def failing_pool(name: str, *words: str) -> EnginePool:
    """A pool of one real engine with a model that fails as failing_engine.py is told by these words."""
    return EnginePool([Here(EngineSettings(model=name), (sys.executable, str(FAILING_ENGINE), *words))], 4.0)


@dataclass
class Front(Asked):
    """A front that serves."""

    url: str
    port: int
    service: Service
    screen: Quiet


@contextmanager
def front(
    engines: dict[str, list[str]],
    *,
    wait: bool = True,
    spare: dict[str, list[str]] | None = None,
    make_pool: Callable[..., EnginePool] = fake_pool,
    **settings: Any,
) -> Iterator[Front]:
    """Models by name, each with its engine's words; ready when `wait`. Those to `spare` may be loaded later."""
    config = ServerConfig(**settings)

    def make(name: str) -> ServedModel:
        words = (engines | (spare or {})).get(name, ())
        return ServedModel(name, make_pool(name, *words))

    service, screen = Service([make(name) for name in engines], Metrics(), config.max_queue, make), Quiet()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = make_http_server(make_app(service, config), config)

    async def run() -> None:
        await service.start(screen, on_failure=lambda: None)
        try:
            await server.serve([listener])
        finally:
            await service.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        made = Front(f"http://127.0.0.1:{port}", port, service, screen)
        if wait:
            until(lambda: made.get("/health").status_code == 200)
        yield made
    finally:
        server.should_exit = True
        thread.join()
