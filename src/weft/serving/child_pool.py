"""Child processes for work that is not trusted: limited in memory and time, watched, and replaced when they die.

A child gets one job at a time as bytes on its standard input and answers with a kind, a length and a body. Its answer is trusted
as little as the job: only a body of a length that was expected is read. Used for images and for chat templates and schemas.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from weft.errors import EngineError, ServerStopping
from weft.serving.image_worker import REPLY

log = logging.getLogger("weft.serving")

READ_BYTES = 1 << 20
READY = b"."  # the kind of the answer with which a child begins
# All that a child is told of the environment: it reads hostile input and needs no keys.
KEPT_VARIABLES = (
    "HOME",
    "LANG",
    "PATH",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONUSERBASE",
    "TZ",
)

IsExpected = Callable[[bytes, int], bool]  # takes the kind and the length of an answer


@dataclass(frozen=True)
class ChildLimits:
    """What one job may cost: seconds by the clock, whole seconds of computing, and a child's address space."""

    seconds: float = 60.0
    cpu_seconds: int = 10
    memory_bytes: int = 1536 << 20

    def __str__(self) -> str:
        return f"{self.cpu_seconds} s of computing, {self.seconds:g} s in all and {self.memory_bytes >> 20} MiB of memory"


class ChildLost(Exception):
    """A child did not answer a job: it died, was killed for taking too long, or answered nonsense."""


class ChildPool:
    """A few children of one kind; each is started when it is needed, and replaced when it is lost."""

    def __init__(
        self,
        command: Sequence[str],
        limits: ChildLimits,
        num_children: int,
        what: str,
        arguments: Sequence[int] = (),
        *,
        start_seconds: float | None = None,
    ) -> None:
        self.command = command
        self.start_seconds = start_seconds  # how long a child may take to say that it is ready; None: it does not say so
        self.arguments = arguments  # of the command, behind the limits on memory and computing
        self.limits = limits
        self.what = what  # what the children do, for errors: "decode images"
        self._places = threading.BoundedSemaphore(num_children)
        self._lock = threading.Lock()  # of what follows
        self._children: set[Child] = set()
        self._idle: list[Child] = []
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children there are."""
        with self._lock:
            return [child.process.pid for child in self._children]

    @property
    def is_busy(self) -> bool:
        """Whether a child has been given a job and has not answered yet."""
        with self._lock:
            return len(self._children) > len(self._idle)

    def ask(self, job: bytes, is_expected: IsExpected) -> tuple[bytes, bytes]:
        """Let a child do a job, blocking the calling thread; raise ChildLost if it gives no answer within its limits."""
        with self._places, self._lend() as child:
            if self.start_seconds is not None:
                child.await_ready(self.start_seconds)
            return child.ask(job, self.limits.seconds, is_expected)

    def close(self) -> None:
        """End the children; jobs in work or waiting get ServerStopping."""
        with self._lock:
            self._is_closed = True
            children = list(self._children)
        for child in children:
            child.process.kill()
        with self._lock:
            for child in self._idle:
                child.end()

    def check_open(self) -> None:
        if self._is_closed:
            raise ServerStopping(f"nothing is left to {self.what}: the server or the model is being stopped")

    @contextlib.contextmanager
    def _lend(self) -> Iterator["Child"]:
        """Lend an idle child, or a new one; one that was killed or died is ended and forgotten."""
        child = self._take()
        try:
            yield child
        except ChildLost as lost:
            self.check_open()
            log.warning("child %d (%s) %s: it is replaced", child.process.pid, self.what, lost)
            raise
        finally:
            self._give_back(child)

    def _take(self) -> "Child":
        with self._lock:
            self.check_open()
            while self._idle:
                child = self._idle.pop()
                if child.process.poll() is None:
                    return child
                self._forget(child)
            child = Child((*self.command, *self._arguments()), self.what)
            self._children.add(child)
            return child

    def _arguments(self) -> Iterator[str]:
        return map(str, (self.limits.memory_bytes, self.limits.cpu_seconds, *self.arguments))

    def _give_back(self, child: "Child") -> None:
        with self._lock:
            if child.is_lost or self._is_closed:
                self._forget(child)
            else:
                self._idle.append(child)

    def _forget(self, child: "Child") -> None:
        child.end()
        self._children.discard(child)


class Child:
    """One child process; it answers jobs one after another until it is lost."""

    def __init__(self, command: Sequence[str], what: str) -> None:
        self.is_lost = False
        self.is_ready = False  # it has said so
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        try:  # in a session of its own, so that a terminal's Ctrl-C does not reach it
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment, start_new_session=True
            )
        except OSError as error:  # no memory, no file descriptor …
            raise EngineError(f"no process could be started to {what} ({error}); look at the machine's limits") from error
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._input, False)

    def await_ready(self, seconds: float) -> None:
        """Wait until the process has said that it is ready; it is killed if that takes longer than `seconds`.

        On a busy machine a process may take longer to start than a job may take.
        """
        if not self.is_ready:
            kind, _ = REPLY.unpack(self._read(REPLY.size, time.monotonic() + seconds))
            if kind != READY:
                raise self._lost("did not start")
            self.is_ready = True

    def ask(self, job: bytes, seconds: float, is_expected: IsExpected) -> tuple[bytes, bytes]:
        """Send a job and return the kind and body of its answer; the process is killed if that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            self._write(job, deadline)
            kind, length = REPLY.unpack(self._read(REPLY.size, deadline))
            if not is_expected(kind, length):
                raise self._lost("answered nonsense")
            return kind, self._read(length, deadline)
        except OSError:  # it closed its end
            raise self._lost("closed its input") from None

    def _write(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            self._wait(self._input, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._input, rest) :]

    def _read(self, length: int, deadline: float) -> bytes:
        parts, left = [], length
        while left:
            self._wait(self._output, select.POLLIN, deadline)
            part = os.read(self._output, min(left, READ_BYTES))
            if not part:
                raise self._lost("ended")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _wait(self, file: int, for_what: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(file, for_what)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            raise self._lost("took too long")

    def _lost(self, what: str) -> ChildLost:
        """Give this child up and return the error to raise."""
        self.is_lost = True
        if what != "ended":
            self.process.kill()
        status = self._status()
        return ChildLost(f"{'computed too long' if status == -signal.SIGXCPU else what}, status {status}")

    def _status(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that closed its output is about to end
            return self.process.wait(1.0)
        self.process.kill()
        return self.process.wait()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):  # what was not written is lost
                if pipe is not None:
                    pipe.close()
