"""A front's driver in a Ray cluster, in a process of its own: has engines placed, holds them, and reports where they listen.

The only file that imports Ray. The front starts it as a child and talks to it in lines of JSON over its pipes: Ray's library ends
its process when a cluster's head is away for long, and that must not end the front. Tokens do not pass through here.

Each engine is a detached actor whose name has the model and a digest of all settings, so that several fronts can share it. Ray
restarts an actor whose process or machine is lost, elsewhere if need be; an actor that no front has held for a while ends itself.
"""

import dataclasses
import os
import queue
import secrets
import socket
import sys
import threading
import time
from typing import Any

import msgspec

from weft.config import GateConfig
from weft.serving.engine_keeper import EngineKeeper
from weft.serving.kept_gate import GateNews
from weft.serving.model_files import digest_of

COMMAND = (sys.executable, "-c", "from weft.serving.starters.ray_driver import main; main()")
NAMESPACE = "weft"
TICK_SECONDS = 1.0
REACH_SECONDS = 1.0  # for Ray's head to take a connection
NUM_THREADS = "OPENBLAS_NUM_THREADS"


class FleetOrder(msgspec.Struct, frozen=True):
    """What a front asks its driver for: engines with these names, of this model, with these resources each."""

    cluster: str  # "auto", or HOST:PORT of Ray's head
    gate: GateConfig | None  # None: only look at the cluster
    names: tuple[str, ...] = ()
    resources: dict[str, float] = {}
    front: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))


class PlaceEngines(msgspec.Struct, frozen=True, tag=True):
    """A front's wish to have engines with these names and no others from now on."""

    names: tuple[str, ...]


class RenewEngine(msgspec.Struct, frozen=True, tag=True):
    """A front's wish to have an engine replaced by a new process on its machine."""

    name: str


FleetWish = PlaceEngines | RenewEngine


class FleetNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a driver reports: each engine's address or failure, the resources of the cluster, and what is wrong with Ray."""

    engines: dict[str, GateNews] = {}
    node_resources: tuple[dict[str, float], ...] = ()
    problem: str | None = None


class RayKeeper(EngineKeeper):
    """An engine's keeper as an actor of Ray: listens at its machine's address, and ends the actor when nobody holds it."""

    def __init__(self, gate: GateConfig, num_threads: int) -> None:
        import ray

        self._own_handle = ray.get_runtime_context().current_actor
        host = ray.util.get_node_ip_address()
        environment = {NUM_THREADS: str(num_threads)} if num_threads else {}
        super().__init__(dataclasses.replace(gate, listen=f"{host}:0"), environment)
        threading.Thread(target=self._watch_holders, daemon=True).start()

    def _watch_holders(self) -> None:
        import ray

        while self.is_held:
            time.sleep(TICK_SECONDS)
        self.end()
        ray.kill(self._own_handle)  # with exit() Ray would restart it


class Driver:
    """Keeps the actors of a front's engines and says what it knows of them."""

    def __init__(self, order: FleetOrder) -> None:
        self._order = order
        self._handles: dict[str, Any] = {}  # by engine
        self._asked: dict[str, Any] = {}  # by engine, a call whose answer is due
        self._met: set[str] = set()  # engines whose keepers have answered

    def connect(self) -> FleetNews:
        """Join the cluster; return what its machines have. Raises ConnectionError or another error of Ray's."""
        import ray

        quiet = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
        ray.init(address=self._order.cluster, namespace=NAMESPACE, **quiet)
        nodes = tuple(node["Resources"] for node in ray.nodes() if node["Alive"])
        return FleetNews(node_resources=nodes)

    def place(self) -> None:
        """Have an actor for every engine that is ordered."""
        for name in self._order.names:
            if name not in self._handles:
                self._handles[name] = self._place(name)

    def follow(self, wish: FleetWish) -> None:
        match wish:
            case RenewEngine(name=name) if name in self._handles:
                self._handles[name].renew.remote()
            case PlaceEngines(names=names):
                self._order = msgspec.structs.replace(self._order, names=names)
                for name in self._handles.keys() - {*names}:
                    self._let_go(name)

    def _let_go(self, name: str) -> None:
        """Hold an engine no longer. One that was never met may wait for a machine: it is cancelled."""
        import ray

        handle = self._handles.pop(name)
        self._asked.pop(name, None)
        if name in self._met:
            handle.release.remote(self._order.front)
        else:
            ray.kill(handle)
        self._met.discard(name)

    def hold(self) -> FleetNews:
        """Hold all engines; return the addresses of those that answer in time."""
        import ray

        for name in self._handles.keys() - self._asked.keys():  # one call each: an actor that is not placed yet answers none
            self._asked[name] = self._handles[name].hold.remote(self._order.front)
        due = list(self._asked.values())
        ready = set(ray.wait(due, num_returns=len(due), timeout=TICK_SECONDS)[0]) if due else set()
        answered = {name: self._asked.pop(name) for name, call in list(self._asked.items()) if call in ready}
        engines = {name: news for name, call in answered.items() if (news := self._answer(name, call)) is not None}
        return FleetNews(engines=engines, problem=self._problem())

    def _answer(self, name: str, call: Any) -> GateNews | None:
        """Return what an engine's keeper has answered; None if it has not, since its process or machine is lost."""
        import ray

        try:
            news: GateNews = ray.get(call)
        except ray.exceptions.ActorUnavailableError:
            return None
        except ray.exceptions.RayActorError:
            del self._handles[name]  # it is gone for good: another is placed
            return None
        self._met.add(name)
        return news

    def release(self) -> None:
        """Hold the engines no longer; those that no other front holds end themselves then."""
        for handle in self._handles.values():
            handle.release.remote(self._order.front)

    def _place(self, name: str) -> Any:
        import ray

        gate, resources = self._order.gate, dict(self._order.resources)
        assert gate is not None
        num_cpus, num_gpus = resources.pop("CPU", 0), resources.pop("GPU", 0)
        actor = ray.remote(RayKeeper).options(
            name=f"{gate.model}#{digest_of(msgspec.json.encode((gate, self._order.resources)))[:12]}#{name}",
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            scheduling_strategy="SPREAD",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            resources=resources,
        )
        return actor.remote(gate, int(num_cpus))

    def _problem(self) -> str | None:
        import ray

        address = ray.get_runtime_context().gcs_address
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), REACH_SECONDS).close()
        except OSError as error:
            return f"Ray's head at {address} can not be reached ({error.strerror or error}): no engine is placed until it is back"
        return None


class _Wishes(threading.Thread):
    """Reads the front's wishes from stdin, one a line, until the front is gone."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._wishes: queue.SimpleQueue[FleetWish] = queue.SimpleQueue()
        self.is_over = threading.Event()

    def run(self) -> None:
        for line in sys.stdin.buffer:
            self._wishes.put(msgspec.json.decode(line, type=FleetWish))
        self.is_over.set()

    def take(self) -> list[FleetWish]:
        return [self._wishes.get() for _ in range(self._wishes.qsize())]


def main() -> None:
    """Serve one front until its pipe ends; then let go of its engines."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(news: FleetNews) -> None:
        output.write(msgspec.json.encode(news) + b"\n")

    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=FleetOrder)
    driver = Driver(order)
    try:
        tell(driver.connect())
    except Exception as error:  # a border: Ray raises many kinds
        tell(FleetNews(problem=f"Ray at {order.cluster!r} can not be used: {_first_line(error)}"))
        sys.exit(1)
    wishes = _Wishes()
    wishes.start()
    is_over = False
    while not is_over:
        for wish in wishes.take():
            driver.follow(wish)
        driver.place()
        tell(driver.hold())
        is_over = wishes.is_over.wait(TICK_SECONDS)
    driver.release()
    time.sleep(TICK_SECONDS)  # for the last calls to be sent


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
