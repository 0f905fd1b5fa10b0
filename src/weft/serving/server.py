"""The server process: binds the port, handles signals, runs the models and the HTTP application until it is stopped."""

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
import uvloop
from starlette.types import ASGIApp

from weft import log
from weft.config import ServerConfig, find_engine_key
from weft.errors import UnknownModel, WeftError
from weft.metrics import Metrics
from weft.serving.engine_key import EngineKey
from weft.serving.model import ServedModel, ServerScreen
from weft.serving.pool import EnginePool
from weft.serving.replicas import Devices, check_replicas, starters_here
from weft.serving.service import Service
from weft.serving.starters.given import Given

DEFAULT_MODEL = "smollm2"
FALLBACK_MODEL = "tiny-hybrid"
GOODBYE_SECONDS = 2  # for the last bytes of answers, and the errors that end what did not finish in time
KEEP_ALIVE_SECONDS = 75
DRAIN_TICK_SECONDS = 0.05
MAX_FILES = 10_240  # every connection is one; the usual soft limit is 1,024, on macOS 256


def serve(config: ServerConfig, screen: ServerScreen, make_app: Callable[[Service, ServerConfig], ASGIApp]) -> int:
    """Start models and HTTP server, block until a signal or the failure of all models ends them, and return the exit status."""
    config.check()
    log.setup(config.log_format)
    _raise_file_limit()
    service = make_service(config)
    listener = _listen(config)
    host, port = listener.getsockname()[:2]
    screen.serving(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(service, config, screen, listener, make_app(service, config)))
    return 1 if service.has_failed else 0


async def _run(service: Service, config: ServerConfig, screen: ServerScreen, listener: socket.socket, app: ASGIApp) -> None:
    server = Uvicorn(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False))
    server.config.timeout_graceful_shutdown, server.config.timeout_keep_alive = GOODBYE_SECONDS, KEEP_ALIVE_SECONDS
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []

    async def drain() -> None:
        deadline = loop.time() + config.drain_seconds
        while service.active and loop.time() < deadline:  # new requests are refused meanwhile
            await asyncio.sleep(DRAIN_TICK_SECONDS)
        service.abandon_all()
        server.should_exit = True

    def end() -> None:
        """Refuse new requests and let running ones finish within `drain_seconds`; a second signal ends those at once."""
        if drains:
            service.abandon_all()
        else:
            service.take_nothing_new()
            drains.append(loop.create_task(drain()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    if config.keys_file is not None:  # else the end of its terminal ends the server
        loop.add_signal_handler(signal.SIGHUP, lambda: reload_keys(service))
    await service.start(screen, on_failure=end)
    try:
        await server.serve([listener])
    finally:
        await service.stop()


def reload_keys(service: Service) -> None:
    """Read the keys file again; if that fails, say why in the audit log and go on with the keys that were read before."""
    fields = {"action": "reload keys", "subject": "-", "tenant": "-", "client": "SIGHUP", "id": "-", "outcome": "done"}
    try:
        service.on_hangup()
    except WeftError as error:
        log.log_action(fields | {"outcome": f"failed, the keys stay as they were: {error}"}, logging.ERROR)
    else:
        log.log_action(fields)


class Uvicorn(uvicorn.Server):
    """uvicorn.Server without signal handlers: they would re-raise signals at exit, and an orderly shutdown has status 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_service(config: ServerConfig) -> Service:
    """Create the service with its configured models, not yet started; only they have a fallback model if loading fails."""
    names = config.models or (DEFAULT_MODEL,)
    fallback = config.fallback or (None if config.models else FALLBACK_MODEL)

    devices = Devices.here()
    check_replicas(config.replicas, devices, force=config.force)
    if config.engines:
        return _service_of_engines(config)

    def make(name: str, fallback: str | None = None) -> ServedModel:
        starters = starters_here(config.engine_settings(name, fallback), config.replicas, devices)
        return _served(name, EnginePool(starters, config.hang_seconds), config)

    return Service([make(name, fallback) for name in names], Metrics(), config.max_queue, make)


def _service_of_engines(config: ServerConfig) -> Service:
    """Create the service of one model whose engines are given by address; more models can not be loaded there."""
    path = find_engine_key(config.engine_key)
    key = EngineKey.read(path) if path is not None else None
    addresses = config.engine_addresses
    name = (config.models or addresses)[0]
    starters = [Given(config.engine_settings(name), address, key) for address in addresses]

    def refuse(name: str) -> ServedModel:
        raise UnknownModel(f"{name} can not be loaded: this server uses the engines that it was given", "model")

    model = _served(name, EnginePool(starters, config.hang_seconds), config)
    return Service([model], Metrics(), config.max_queue, refuse)


def _served(name: str, pool: EnginePool, config: ServerConfig) -> ServedModel:
    return ServedModel(name, pool, config.late_system, parse_special=config.parse_special)


def _raise_file_limit() -> None:
    """Raise this process's soft limit on open files to MAX_FILES, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listen(config: ServerConfig) -> socket.socket:
    """Bind the port and listen, before models are loaded so that a port in use is known at once; raise WeftError if it is."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host.strip("[]"), config.port))
    except OSError as error:
        message = f"port {config.port} of {config.host} can not be taken ({error.strerror}); choose another with --port"
        raise WeftError(message) from error
    listener.listen(2048)
    return listener
