"""How a server's health is while something happens to it: asked every 20 ms, from a process of its own.

Beside the seconds until each answer it notes how long the front itself was at work meanwhile, where the system tells: a
machine that is busy with other things makes every answer late, and says nothing about the server.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PAUSE_SECONDS = 0.02


@dataclass
class Answer:
    """What /health said, after how many seconds, and the seconds of them that the front worked; 0 where nobody knows."""

    status: int
    seconds: float
    work_seconds: float


@contextmanager
def pulse(port: int, front_pid: int) -> Iterator[list[Answer]]:
    """The answers given while the block runs; they are there when it is over."""
    command = [sys.executable, __file__, str(port), str(front_pid)]
    answers: list[Answer] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        try:
            yield answers
        finally:
            process.stdin.close()
            answers += [Answer(*told) for told in json.load(process.stdout)]


def within(answers: list[Answer], share: float) -> float:
    """The seconds within which this share of the answers came."""
    return sorted(answer.seconds for answer in answers)[min(int(len(answers) * share), len(answers) - 1)]


def main(port: int, front_pid: int) -> None:
    """Ask until our input is closed, then tell."""
    told = []
    print("asking", flush=True)
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        start, worked = time.monotonic(), work_seconds(front_pid)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        told.append((status, time.monotonic() - start, work_seconds(front_pid) - worked))
        connection.close()
    print(json.dumps(told))


def work_seconds(pid: int) -> float:
    """How long the first thread of a process has been on a processor: that of the event loop."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:  # not Linux, or the process is gone
        return 0.0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
