"""The server process: binds the port, handles signals, runs the models and the HTTP application until it is stopped."""

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence

import uvloop
from starlette.types import ASGIApp

from weft import log
from weft.config import ServerConfig, find_engine_key
from weft.errors import UnknownModel, WeftError
from weft.memory.heap import HeapKeeper, bound_heap, collect_and_trim
from weft.metrics import Metrics
from weft.serving.autoscaler import Autoscaler
from weft.serving.connections import make_http_server
from weft.serving.engine_key import EngineKey
from weft.serving.loop_watch import watch_event_loop
from weft.serving.model import ServedModel, ServerScreen
from weft.serving.pool import EnginePool
from weft.serving.replicas import Devices, check_replicas, starters_here
from weft.serving.service import Service
from weft.serving.starters import EnginePlacement, Starter
from weft.serving.starters.given import Given
from weft.serving.starters.on_ray import OnRay, RayFleet, default_resources, look_at_cluster, parse_resources
from weft.serving.starters.ray_driver import FleetOrder

logger = logging.getLogger("weft.serving")

DEFAULT_MODEL = "smollm2"
FALLBACK_MODEL = "tiny-hybrid"
DRAIN_TICK_SECONDS = 0.05
HEAP_LOOK_SECONDS = 5.0
LAST_SECONDS = 4.9  # after `drain_seconds`, for the last bytes, and for engines and threads to end
FORCED_STATUS = 1
SWITCH_SECONDS = 0.0005  # how long an encoding thread may keep the interpreter from the event loop; a tenth of Python's own
MAX_FILES = 10_240  # every connection is one; the usual soft limit is 1,024, on macOS 256
RESERVED_FILES = 128  # never taken by connections: an engine that is replaced needs pipes and sockets, a model its files
MIN_FILES = RESERVED_FILES + 64


def serve(config: ServerConfig, screen: ServerScreen, make_app: Callable[[Service, ServerConfig], ASGIApp]) -> int:
    """Start models and HTTP server, block until a signal or the failure of all models ends them, and return the exit status."""
    config.check()
    log.setup(config.log_format)
    _raise_file_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    bound_heap()
    service = make_service(config)
    listener = _listen(config)
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.tls_cert is None else "https"
    screen.serving(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(service, config, screen, listener, make_app(service, config)))
    return 1 if service.has_failed else 0


async def _run(service: Service, config: ServerConfig, screen: ServerScreen, listener: socket.socket, app: ASGIApp) -> None:
    server = make_http_server(app, config, allowed_files() - RESERVED_FILES)
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
            end_process_after(config.drain_seconds + LAST_SECONDS)
            service.take_nothing_new()
            drains.append(loop.create_task(drain()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    if config.keys_file is not None:  # else the end of its terminal ends the server
        loop.add_signal_handler(signal.SIGHUP, lambda: reload_keys(service))
    await service.start(screen, on_failure=end)
    aside = [loop.create_task(watch_event_loop(service.metrics.loop_stall)), loop.create_task(keep_heap_small())]
    try:
        await server.serve([listener])
    finally:
        for task in aside:
            task.cancel()
        await service.stop()


async def keep_heap_small() -> None:
    """Look now and then whether this process has grown, and give back what it does not use; until cancelled."""
    keeper = HeapKeeper(trim=collect_and_trim)
    while True:
        await asyncio.sleep(HEAP_LOOK_SECONDS)
        await asyncio.to_thread(keeper.look)


def reload_keys(service: Service) -> None:
    """Read the keys file again; if that fails, say why in the audit log and go on with the keys that were read before."""
    fields = {"action": "reload keys", "subject": "-", "tenant": "-", "client": "SIGHUP", "id": "-", "outcome": "done"}
    try:
        service.on_hangup()
    except WeftError as error:
        log.log_action(fields | {"outcome": f"failed, the keys stay as they were: {error}"}, logging.ERROR)
    else:
        log.log_action(fields)


def end_process_after(seconds: float) -> threading.Timer:
    """End this process when so many seconds have passed, whatever it still does; threads at work can not be ended otherwise.

    Engines and other children see that it is gone and end by themselves.
    """

    def end() -> None:
        logger.error("the server did not end within %g s of being told to: its process is ended", seconds)
        logging.shutdown()
        os._exit(FORCED_STATUS)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def make_service(config: ServerConfig) -> Service:
    """Create the service with its configured models, not yet started; only they have a fallback model if loading fails."""
    names = config.models or (DEFAULT_MODEL,)
    fallback = config.fallback or (None if config.models else FALLBACK_MODEL)

    if config.ray is not None:
        return _service_on_ray(config, names)
    devices = Devices.here()
    replicas = config.replica_range
    check_replicas(replicas.most, devices, force=config.force)
    if config.engines:
        return _service_of_engines(config)

    def make(name: str, fallback: str | None = None) -> ServedModel:
        starters = starters_here(config.engine_settings(name, fallback), replicas.most, devices)
        return _served(name, _pool(starters, config), config)

    return Service([make(name, fallback) for name in names], Metrics(), config.max_queue, make)


def _service_of_engines(config: ServerConfig) -> Service:
    """Create the service of one model whose engines are given by address; more models can not be loaded there."""
    key = _engine_key(config)
    addresses = config.engine_addresses
    name = (config.models or addresses)[0]
    starters = [Given(config.engine_settings(name), address, key) for address in addresses]

    def refuse(name: str) -> ServedModel:
        raise UnknownModel(f"{name} can not be loaded: this server uses the engines that it was given", "model")

    model = _served(name, _pool(starters, config), config)
    return Service([model], Metrics(), config.max_queue, refuse)


def _service_on_ray(config: ServerConfig, names: Sequence[str]) -> Service:
    """Create the service of models whose replicas Ray places; raise WeftError if Ray can not be used."""
    key, nodes = _engine_key(config), look_at_cluster(config.ray or "")
    resources = default_resources(nodes) if config.ray_resources is None else parse_resources(config.ray_resources)

    def make(name: str) -> ServedModel:
        settings, replicas = config.engine_settings(name), config.replica_range
        names = tuple(map(str, range(replicas.most)))
        fleet = RayFleet(FleetOrder(config.ray or "", config.gate_config(name), names[: replicas.least], resources))
        return _served(name, _pool([OnRay(settings, one, fleet, key) for one in names], config, fleet), config)

    return Service([make(name) for name in names], Metrics(), config.max_queue, make)


def _pool(starters: Sequence[Starter], config: ServerConfig, placement: EnginePlacement | None = None) -> EnginePool:
    """Return the pool of a model's engines; if their number is a range, its load decides how many of the starters are used."""
    least, most = config.replica_range.least, config.replica_range.most
    autoscaler = Autoscaler(least, most) if least < most else None
    return EnginePool(starters, config.hang_seconds, placement, autoscaler, config.drain_seconds)


def _engine_key(config: ServerConfig) -> EngineKey | None:
    path = find_engine_key(config.engine_key)
    return EngineKey.read(path) if path is not None else None


def _served(name: str, pool: EnginePool, config: ServerConfig) -> ServedModel:
    describes_tools = config.tools_without_template == "describe"
    return ServedModel(name, pool, config.late_system, parse_special=config.parse_special, describes_tools=describes_tools)


def _raise_file_limit() -> None:
    """Raise this process's soft limit on open files to MAX_FILES, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if (allowed := allowed_files()) < MIN_FILES:
        raise WeftError(f"the limit on open files is {allowed}, and weft needs {MIN_FILES}: raise it (ulimit -Hn, LimitNOFILE)")


def allowed_files() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


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
