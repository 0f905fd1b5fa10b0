"""Keeps a gate with its engine for fronts that hold it; when nobody has held it for a while, it ends.

It runs where a cluster's scheduler has put it (`serving/starters/ray_driver.py`), in a process of its own beside the gate's: the
engine shares no interpreter with the scheduler's library, and tokens do not pass through here.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from weft.config import GateConfig
from weft.serving.kept_gate import GateNews

COMMAND = (sys.executable, "-m", "weft.serving.kept_gate")
HOLD_SECONDS = 120.0  # of silence, after which a front is taken to be gone; Ray's own calls may block for 60
END_SECONDS = 10.0  # beyond the drain time, for a gate to end by itself
SINGLE_THREAD = "OMP_NUM_THREADS"  # Ray sets it to 1 in its workers; the engine decides for itself


class EngineKeeper:
    """Starts a gate, starts it again when it was killed, and ends it when no front holds it any more."""

    def __init__(
        self,
        gate: GateConfig,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gate, self._command, self._clock = gate, command, clock
        inherited = {name: value for name, value in os.environ.items() if name != SINGLE_THREAD}
        self._environment = {**inherited, **(environment or {})}
        self._lock = threading.RLock()
        self._held_at: dict[str, float] = {"": clock()}  # by front; "": whoever has it made
        self._ended_at: float | None = None  # when the process was first found to have ended
        with self._lock:
            self._news = GateNews()
            self._process = self._start()

    def hold(self, front: str) -> GateNews:
        """Say that a front needs the engine; return its address, nothing while there is none, or why it can not be served."""
        with self._lock:
            self._held_at[front] = self._clock()
            self._held_at.pop("", None)
            if (status := self._process.poll()) is not None and self._news.failed is None:
                self.end()
                self._ended_at = self._clock() if self._ended_at is None else self._ended_at
                if status > 0 and self._listener.is_alive() and self._clock() - self._ended_at < END_SECONDS:
                    return GateNews()  # why it ended may still be unread; an engine it left behind may keep its output open
                if status > 0:
                    self._news = GateNews(failed=f"its process ended with status {status}; the log of that machine has its words")
                else:  # it was killed
                    self._news, self._process = GateNews(), self._start()
            return self._news

    def release(self, front: str) -> bool:
        """Say that a front needs the engine no longer; return whether nobody does."""
        with self._lock:
            self._held_at.pop(front, None)
        return not self.is_held

    def renew(self) -> None:
        """Replace the gate by a new process, with whatever version of weft is installed by now."""
        with self._lock:
            self.end()
            self._news, self._process = GateNews(), self._start()

    @property
    def is_held(self) -> bool:
        """Whether a front has said within HOLD_SECONDS that it needs the engine, or it is as new."""
        with self._lock:
            return any(self._clock() - at < HOLD_SECONDS for at in self._held_at.values())

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """Let the gate leave in good order, its answers moving to other engines, and return when it is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(self.gate.drain_seconds + END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has failed already, and says why
            process.stdin.write(msgspec.json.encode(self.gate) + b"\n")
            process.stdin.flush()
        self._ended_at = None
        self._listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        self._listener.start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                news = msgspec.json.decode(line, type=GateNews)
                with self._lock:
                    if self._process is process:
                        self._news = news
