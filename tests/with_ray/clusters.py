"""A Ray cluster on this machine's loopback addresses: a head, and further machines that can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from waiting import HANG_SECONDS, until

RAY = Path(sys.executable).parent / "ray"
COMMON = ("--block", "--object-store-memory", "80000000", "--disable-usage-stats")


@dataclass
class Cluster:
    """Machines of a cluster, each a `ray start` in a session of its own; the head computes nothing.

    Their addresses begin at 127.0.0.2: Ray would replace 127.0.0.1 by one that others can reach.
    """

    folder: Path
    port: int = 0
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.2:{self.port}"

    def start_head(self) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.2", 0))
            self.port = one.getsockname()[1]
        workers = ("--min-worker-port", "0", "--max-worker-port", "0", "--include-dashboard", "false")
        self._start("--head", "--port", str(self.port), "--temp-dir", str(self.folder), "--num-cpus", "0", *workers)

    def add_node(self) -> None:
        self._start("--address", self.address, "--num-cpus", "2")

    def kill(self, number: int) -> None:
        """End a machine and all that runs on it, as a power cut would."""
        for pid in _session(self.nodes[number].pid):  # Ray's workers have process groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[number].wait(HANG_SECONDS)

    def engine_pids(self) -> set[int]:
        """The engine processes on all machines."""
        return {pid for node in self.nodes for pid in _session(node.pid) if "weft.engine.process" in _command(pid)}

    def _start(self, *arguments: str) -> None:
        number = len(self.nodes)
        log = self.folder.parent / f"node-{number}.log"
        command = [str(RAY), "start", *arguments, "--node-ip-address", f"127.0.0.{number + 2}", *COMMON]
        with log.open("wb") as output:
            self.nodes.append(subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True))
        until(lambda: "--block" in log.read_text(), log.read_text)


@contextlib.contextmanager
def cluster_of(folder: Path, num_nodes: int) -> Iterator[Cluster]:
    """A cluster of so many machines, ended afterwards with everything that it has started."""
    cluster = Cluster(folder / "r")
    try:
        cluster.start_head()
        for _ in range(num_nodes - 1):
            cluster.add_node()
        yield cluster
    finally:
        for number in range(len(cluster.nodes)):
            cluster.kill(number)


def _session(leader: int) -> list[int]:
    """The processes of a session, by its leader."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if int((path / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                    found.append(int(path.name))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""
