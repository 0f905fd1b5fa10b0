"""A real server on loopback, `weft serve` in processes of its own, as tests start it and ask it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai

START_SECONDS = 60.0


@dataclass
class Server:
    """A running `weft serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's own client, pointed here."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=10)

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=60, **options)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("/v1/status").json()
        return status

    def wait_idle(self, seconds: float) -> None:
        """Fail unless nothing runs or waits within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.status()
            left = {name: status[name] for name in ("rows_running", "rows_waiting", "requests")}
            if not any(left.values()):
                return
            assert time.monotonic() < deadline, f"still there after {seconds} s: {left}"
            time.sleep(0.02)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.get("/health").status_code != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


@contextmanager
def running(log: Path, *arguments: str, ready: bool = True, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """`weft serve` with these arguments on a free port, ended afterwards."""
    command = [sys.executable, "-m", "weft", "serve", *arguments, "--port", "0"]
    settings = {**os.environ, **(environment or {})}
    with log.open("wb") as errors, subprocess.Popen(command, stderr=errors, env=settings) as process:
        try:
            server = Server(process, _listening_at(process, log), log)
            if ready:
                server.wait_ready()
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def _listening_at(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while True:
        if found := re.search(r"listens at (http://\S+)", log.read_text()):
            return found[1]
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
