"""The processes of a sharded engine: rank 0 starts the others, is heard by them, and ends when one of them is gone or silent.

All on one machine. The ranks' sums go over MLX's ring on loopback; what rank 0 decides goes over zmq in its private folder.
"""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from weft.config import EngineSettings
from weft.engine.lockstep import FollowingRank, LeadingRank, Lockstep
from weft.errors import UnsupportedModel

if TYPE_CHECKING:
    from weft.model.sharding import Group

log = logging.getLogger("weft.engine")

COMMAND = (sys.executable, "-m", "weft.engine.follower")
BEAT_SECONDS = 0.25
SILENT_SECONDS = 3.0  # a rank that was ready and is not heard for so long is stopped or lost
RANK, HOSTS = "MLX_RANK", "MLX_HOSTFILE"  # where MLX's ring looks for its place


@dataclass(frozen=True)
class Rank:
    """This process's place in a sharded engine: what keeps it in step, and MLX's group."""

    lockstep: Lockstep
    group: "Group"


def join_ring() -> "Group":
    """Wait until all ranks have come; the environment says which this one is."""
    import mlx.core as mx

    return mx.distributed.init(strict=True, backend="ring")


@contextlib.contextmanager
def leading(settings: EngineSettings, folder: Path) -> Iterator[Rank]:
    """Start the other ranks and lead them; the process ends if one of them does before the context."""
    import mlx.core as mx

    if mx.default_device() != mx.cpu and not mx.metal.is_available():
        raise UnsupportedModel("shard needs a process for each GPU, which is built for CPUs and Metal only: use --replicas here")
    hosts = folder / "ring.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(settings.shards)]))
    os.environ |= {RANK: "0", HOSTS: str(hosts)}
    with zmq.Context() as context, contextlib.ExitStack() as sockets:
        context.setsockopt(zmq.LINGER, 0)
        beats = sockets.enter_context(context.socket(zmq.PULL))
        beats.bind(_beats_address(folder))
        pushes, followers = [], []
        for rank in range(1, settings.shards):
            push = sockets.enter_context(context.socket(zmq.PUSH))
            push.set_hwm(0)
            push.connect(_address(folder, rank))  # which queues until the rank is there
            push.send(msgspec.msgpack.encode(settings))
            pushes.append(push)
            followers.append(subprocess.Popen([*COMMAND, str(folder)], env={**os.environ, RANK: str(rank)}))
        watch = RankWatch(followers)
        thread = threading.Thread(target=watch.run, args=(beats,), daemon=True, name="watch the ranks")
        thread.start()

        def send(data: bytes) -> None:
            for push in pushes:
                push.send(data)

        try:
            yield Rank(LeadingRank(send), join_ring())
        finally:
            watch.is_over = True
            thread.join()
            for follower in followers:
                follower.kill()
                follower.wait()


@contextlib.contextmanager
def following(folder: Path) -> Iterator[tuple[EngineSettings, Rank]]:
    """Take part as the rank that the environment names; gives rank 0's settings too."""
    rank = int(os.environ[RANK])
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.set_hwm(0)
        pull.bind(_address(folder, rank))
        settings = msgspec.msgpack.decode(pull.recv(), type=EngineSettings)
        threading.Thread(target=_beat, args=(folder, rank), daemon=True, name="beat").start()
        yield settings, Rank(FollowingRank(pull.recv), join_ring())


class RankWatch:
    """Ends the process when another rank has ended or is silent: its engine can compute nothing any more.

    Time is counted in polls that bring nothing, so that a pause of this process is not taken for silence of the others.
    """

    def __init__(self, followers: list["subprocess.Popen[bytes]"]) -> None:
        self.is_over = False
        self._followers = followers
        self._silence: dict[int, float] = {}  # by rank that was heard

    def run(self, beats: "zmq.Socket[bytes]") -> None:
        while not self.is_over:
            heard = {beats.recv()[0] for _ in range(100) if beats.poll(0)} if beats.poll(int(BEAT_SECONDS * 1000)) else set()
            if not self.is_over and (why := self.reason_to_end(heard)) is not None:
                log.error("%s: the engine ends, and is started again with all ranks", why)
                for follower in self._followers:  # one that is stopped would not notice, and keep its part of the model
                    follower.kill()
                os._exit(1)

    def reason_to_end(self, heard: set[int]) -> str | None:
        """Note which ranks were heard in a quarter of a second; return why the engine must end, or None."""
        for number, follower in enumerate(self._followers, start=1):
            if follower.poll():  # one that ends with status 0 was told to
                return f"rank {number} ended with status {follower.returncode}"
        for rank in heard | self._silence.keys():
            self._silence[rank] = 0.0 if rank in heard else self._silence[rank] + BEAT_SECONDS
        silent = [rank for rank, seconds in self._silence.items() if seconds >= SILENT_SECONDS]
        return f"rank {silent[0]} is silent for {SILENT_SECONDS:g} s" if silent else None


def _beat(folder: Path, rank: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(_beats_address(folder))
        while True:
            push.send(bytes([rank]))
            time.sleep(BEAT_SECONDS)


def _address(folder: Path, rank: int) -> str:
    return f"ipc://{folder}/rank-{rank}"


def _beats_address(folder: Path) -> str:
    return f"ipc://{folder}/beats"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
