"""Servers for the benchmarks of replicas: fronts and gates over fake engines, or as users start them over real ones."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.front import FAKE, ROOT, SERVE_FAKE

GATE_OF_FAKE = """
import asyncio, signal, sys
from weft.config import EngineSettings
from weft.serving.gate import Gate
from weft.serving.starters.here import Here
async def run():
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    gate = Gate(Here(EngineSettings(model="fake"), {command!r}), 60.0)
    async with gate.listen("tcp://127.0.0.1:{port}", None) as bound:
        print("listens at", bound, file=sys.stderr, flush=True)
        await ended.wait()
asyncio.run(run())
"""
STEP_SECONDS = 0.02  # of a fake engine, whatever its rows: 50 tokens a second and stream
TICK_SECONDS = 0.01
START_SECONDS = 120.0


@dataclass(frozen=True)
class Served:
    """A server that is ready, and its process."""

    url: str
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.load(reply)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, {"content-type": "application/json"})) as reply:
            return json.load(reply)

    @property
    def model(self) -> dict[str, Any]:
        """The status of its only model."""
        (model,) = self.get("/v1/status")["models"]
        return dict(model)

    @property
    def replicas(self) -> list[dict[str, Any]]:
        return list(self.model["replicas"])

    @property
    def busiest(self) -> dict[str, Any]:
        return max(self.replicas, key=lambda one: one["requests"])

    def replica(self, name: str) -> dict[str, Any]:
        return next(one for one in self.replicas if one["name"] == name)

    def wait_replicas(self, count: int) -> None:
        until(lambda: sum(one["status"] == "ready" for one in self.replicas) == count)


def until(is_so: Callable[[], object], seconds: float = START_SECONDS) -> float:
    """Wait until something is so; return how many seconds that took."""
    begun = time.perf_counter()
    while not is_so():
        assert time.perf_counter() - begun < seconds, "it did not happen"
        time.sleep(TICK_SECONDS)
    return time.perf_counter() - begun


def fake_command(*words: str) -> list[str]:
    """Return the command of a fake engine, but for the model and the address."""
    return [sys.executable, str(FAKE), "--token-seconds", str(STEP_SECONDS), *words]


@contextmanager
def fake_server(settings: dict[str, Any], *words: str) -> Iterator[Served]:
    """A front with these settings; its engines, if it starts any, are fakes with these words on their command lines."""
    with process_of(
        [sys.executable, "-c", SERVE_FAKE.format(command=fake_command(*words), settings=settings)], "context"
    ) as found:
        process, said = found
        yield Served(address_in(said, "http://"), process)


@contextmanager
def fake_gate(port: int | str = "*") -> Iterator[str]:
    """A gate with a fake engine in a process of its own; its address."""
    program = GATE_OF_FAKE.format(command=[*fake_command(), "fake"], port=port)
    with process_of([sys.executable, "-c", program], "listens at") as (_, said):
        yield address_in(said, "tcp://").removeprefix("tcp://")


@contextmanager
def real_server(*arguments: str) -> Iterator[Served]:
    """`weft serve` with these arguments, at a free port."""
    with process_of([sys.executable, "-m", "weft", "serve", *arguments, "--port", "0"], "context") as (process, said):
        yield Served(address_in(said, "http://"), process)


@contextmanager
def real_gate(*arguments: str) -> Iterator[str]:
    """`weft engine` with these arguments, at a free port; its address."""
    command = [sys.executable, "-m", "weft", "engine", *arguments, "--listen", "127.0.0.1:0"]
    with process_of(command, "listens at") as (_, said):
        yield address_in(said, "tcp://").removeprefix("tcp://")


@contextmanager
def process_of(command: Sequence[str], ready: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that is ready when it has said this word; gives it with what it has said, and ends it."""
    with tempfile.NamedTemporaryFile() as log, subprocess.Popen(command, stderr=log, cwd=ROOT) as process:

        def is_ready() -> bool:
            assert process.poll() is None, Path(log.name).read_text()
            return ready in Path(log.name).read_text()

        try:
            until(is_ready)
            yield process, Path(log.name).read_text()
        finally:
            process.terminate()


def address_in(said: str, scheme: str) -> str:
    """Return where a process says that it listens."""
    found = re.search(rf"listens at ({scheme}\S+)", said)
    assert found, said
    return found[1]


def free_port() -> int:
    """Return a port that nobody listens at just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def send(replica: dict[str, Any], number: signal.Signals) -> None:
    """Send a signal to a replica's engine, which one of our own servers has started."""
    os.kill(replica["engine_pid"], number)
