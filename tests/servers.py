"""A real server on loopback, `weft serve` in processes of its own, as tests start it and ask it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from asking import Asked
from waiting import HANG_SECONDS, until

# With this word in its prompt an answer takes minutes: a row that is free soon was freed, it did not end by itself.
ENDLESS_WORD, ENDLESS_TOKEN = " crocodile", 2999
ENDLESS_RULES = json.dumps([{"point": "turn", "token": ENDLESS_TOKEN, "do": "slow"}])


@dataclass
class Server(Asked):
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

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("/v1/status").json()
        return status

    def wait_idle(self) -> None:
        """Return when nothing runs or waits."""
        until(lambda: not any(self.status()[name] for name in ("rows_running", "rows_waiting", "requests")), self.status)

    def wait_ready(self) -> None:
        """Return when requests are answered."""
        until(lambda: self.is_up() and self.get("/health").status_code == 200, self.log.read_text)

    def wait_dead(self) -> None:
        """Return when the front knows that its engine is gone, or silent."""
        until(lambda: self.get("/health").status_code != 200)

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return True


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
                process.wait(HANG_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _listening_at(process: subprocess.Popen[bytes], log: Path) -> str:
    def look() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r"listens at (http://\S+)", log.read_text())
        return found and found[1]

    return until(look, log.read_text) or ""
