"""Engines that Ray places on the machines of a cluster; they are reached over TCP as given ones are."""

import asyncio
import contextlib
import importlib.util
import logging
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from weft.config import EngineSettings
from weft.errors import EngineRefused, WeftError
from weft.serving.engine_key import EngineKey
from weft.serving.kept_gate import GateNews
from weft.serving.starters.given import REACH_SECONDS, Given, GivenEngine, parse_address
from weft.serving.starters.ray_driver import COMMAND, FleetNews, FleetOrder, FleetWish, PlaceEngines, RenewEngine

log = logging.getLogger("weft.serving")

RAY_PORT = 6379
CONNECT_SECONDS = 60.0  # for Ray's library to be read and the cluster to be joined
PAUSE_SECONDS = 2.0  # before a driver that has ended is started again
END_SECONDS = 5.0  # for a driver to let go of its engines


def parse_resources(text: str) -> dict[str, float]:
    """Return the resources that a setting such as GPU=1 or CPU=4,fast=1 names; raise WeftError if it names none."""
    found = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            found[name.strip()] = 0.0
    if not all(name and amount > 0 for name, amount in found.items()):
        raise WeftError(f"ray_resources {text!r} must be NAME=AMOUNT, as GPU=1 or CPU=4, with commas between several")
    return found


def look_at_cluster(cluster: str, command: Sequence[str] = COMMAND) -> tuple[dict[str, float], ...]:
    """Join a Ray cluster for a moment and return the resources of its machines; raise WeftError if it can not be joined."""
    if command is COMMAND and importlib.util.find_spec("ray") is None:
        raise WeftError("ray needs a package that is not installed here: pip install 'weft[ray]'")
    if cluster != "auto":
        _probe(cluster)
    order = FleetOrder(cluster, None)
    try:
        done = subprocess.run(command, input=msgspec.json.encode(order), stdout=-1, timeout=CONNECT_SECONDS, check=False)
        news = msgspec.json.decode(done.stdout.splitlines()[0], type=FleetNews)
    except subprocess.TimeoutExpired as error:
        raise WeftError(f"Ray at {cluster!r} gives no answer within {CONNECT_SECONDS:g} s: is its head running?") from error
    except (IndexError, msgspec.MsgspecError) as error:
        raise WeftError("Ray's library could not be used; its words are above") from error
    if news.problem is not None:
        raise WeftError(f"{news.problem}; start it with `ray start --head`, or name its head as HOST:6379")
    return news.node_resources


def _probe(cluster: str) -> None:
    """Raise WeftError if nobody listens at this address; Ray itself would try for a minute."""
    host, port = parse_address(cluster, RAY_PORT)
    try:
        socket.create_connection((host.strip("[]"), port), REACH_SECONDS).close()
    except OSError as error:
        raise WeftError(f"ray {cluster}: nobody listens there ({error.strerror or error}); name the head as HOST:6379") from error


def default_resources(nodes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return what an engine takes of a machine: a GPU where there are some, or else all cores of the largest machine."""
    if any(node.get("GPU") for node in nodes):
        return {"GPU": 1.0}
    return {"CPU": max((node.get("CPU", 1.0) for node in nodes), default=1.0)}


class RayFleet:
    """A front's engines in a Ray cluster: runs the driver that holds them, and knows where each of them listens."""

    def __init__(self, order: FleetOrder, command: Sequence[str] = COMMAND) -> None:
        self.order = order
        self.problem: str | None = None  # with Ray; engines that are connected go on
        self._command = command
        self._news: dict[str, GateNews] = {}
        self._task: asyncio.Task[None] | None = None
        self._stdin: asyncio.StreamWriter | None = None  # of the driver

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_driver())

    async def stop(self) -> None:
        """Let go of the engines: those that no other front holds end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def address(self, name: str) -> str:
        """Return where an engine listens. Raises OSError if it does not yet, EngineRefused if it never will."""
        news = self._news.get(name, GateNews())
        if news.failed is not None:
            raise EngineRefused(news.failed)
        if news.address is None:
            needs = ", ".join(f"{kind} {amount:g}" for kind, amount in self.order.resources.items())
            raise OSError(self.problem or f"Ray has not placed it yet; it needs {needs} of one machine")
        return news.address

    def place(self, names: Sequence[str]) -> None:
        """Have engines with these names and no others from now on; the others are let go of."""
        self.order = msgspec.structs.replace(self.order, names=tuple(names))
        self._news = {name: news for name, news in self._news.items() if name in names}
        self._tell(PlaceEngines(self.order.names))

    def renew(self, name: str) -> None:
        """Have an engine replaced by a new process on its machine; its answers for other fronts move or end."""
        self._news.pop(name, None)
        self._tell(RenewEngine(name))

    def _tell(self, wish: FleetWish) -> None:
        if self._stdin is not None:
            self._stdin.write(msgspec.json.encode(wish) + b"\n")

    async def _keep_driver(self) -> None:
        while True:
            await self._run_driver()
            self.problem = self.problem or "the connection to Ray is lost: no engine is placed until it is back"
            log.warning("%s", self.problem)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _run_driver(self) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(self.order) + b"\n")
            self._stdin = process.stdin
            async for line in process.stdout:
                self._take(msgspec.json.decode(line, type=FleetNews))
        finally:
            self._stdin = None
            process.stdin.close()
            try:
                async with asyncio.timeout(END_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def _take(self, news: FleetNews) -> None:
        if news.problem != self.problem:
            log.warning("%s", news.problem or "Ray's head is reached again")
        self.problem = news.problem
        self._news |= {name: one for name, one in news.engines.items() if name in self.order.names}


@dataclass
class OnRay:
    """Reaches the engine that Ray has placed under a name, wherever it listens by now."""

    settings: EngineSettings
    name: str
    fleet: RayFleet
    key: EngineKey | None = None
    may_be_away: bool = True
    front: str = ""

    def __post_init__(self) -> None:
        self.front = self.front or secrets.token_hex(8)

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncIterator[GivenEngine]:
        """Begin a session with the engine. Raises OSError if it is not there (yet), EngineRefused if it is no use."""
        given = Given(self.settings, self.fleet.address(self.name), self.key, front=self.front)
        async with given.start() as engine:
            engine.retire = partial(self.fleet.renew, self.name)
            yield engine
