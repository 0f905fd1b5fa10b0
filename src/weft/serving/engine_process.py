"""One model's engine process: started, watched, and replaced when it dies or hangs; its current condition is published.

There is a pause before each new engine, and restarts are limited: an engine was of no use if it was never ready, or if it
died soon after and no request ended or made progress in it. After `MAX_FAILURES` such engines in a row the model is given up
and every request gets an error.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import zmq

from weft.config import EngineSettings
from weft.errors import EngineDied
from weft.ipc.channel import FRONT_PID, FrontEnd
from weft.ipc.messages import Beat, DraftCounts, EngineEvents, EngineStatus, Failed, Loading, Prefixes, Ready, Shutdown, ToFront
from weft.serving.in_flight import EngineClient

log = logging.getLogger("weft.serving")

COMMAND = (sys.executable, "-m", "weft.engine.process")
FIRST_PAUSE_SECONDS = 0.5  # before a dead engine is started again; doubled each time
LONGEST_PAUSE_SECONDS = 30.0
MAX_FAILURES = 5  # engines in a row that are of no use, before the model is given up
SOON_SECONDS = 60.0  # an engine that lives longer was of use, even if it had no request
END_SECONDS = 3.0  # an engine that was told to end and is not gone by then is killed
STACK_SECONDS = 0.5  # for a hung engine to write its stack
DRAIN_SECONDS = 0.2  # of silence after an engine's end: then all its messages have come
TICK_SECONDS = 0.25
SICK_SECONDS = 1.5  # of silence, where a beat is due every quarter of a second
SILENCE_SECONDS = 10.0  # after so long an engine that was ready is taken for dead
LOADING_SECONDS = 120.0  # and one that was not: loading a model may hold the interpreter


@dataclass(frozen=True)
class EngineCondition:
    """State of a model's engine: `ready`, `loading` or permanently `failed`; `is_sick`: it was ready and has become silent."""

    ready: Ready | None = None
    loading: Loading | None = None
    failed: str | None = None
    is_sick: bool = False


@dataclass(frozen=True)
class DraftTotals:
    """Drafts verified for one model so far, by all of its engines: token counts, drafts, and tokens accepted by place."""

    counts: DraftCounts = field(default_factory=DraftCounts)
    num_drafts: int = 0
    accepted_at: tuple[int, ...] = ()

    def __add__(self, other: "DraftTotals") -> "DraftTotals":
        places = itertools.zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        return DraftTotals(self.counts + other.counts, self.num_drafts + other.num_drafts, tuple(map(sum, places)))

    def __sub__(self, other: "DraftTotals") -> "DraftTotals":
        places = itertools.zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        counts, num_drafts = self.counts - other.counts, self.num_drafts - other.num_drafts
        return DraftTotals(counts, num_drafts, tuple(one - before for one, before in places))


class Watchdog:
    """Decides whether an engine must be killed, by how long it has been silent and how long its loop has been in one turn.

    Time is counted in ticks of the front's event loop, so that a pause of the front is not taken for silence of the engine.
    """

    def __init__(self, hang_seconds: float) -> None:
        self.hang_seconds = hang_seconds
        self.num_received = 0
        self._silence_seconds = 0.0
        self._beat = Beat(0, 0.0)

    def receive(self, message: ToFront) -> None:
        """Reset the silence timer, as any message is a sign of life, and remember the last heartbeat."""
        self.num_received += 1
        self._silence_seconds = 0.0
        if isinstance(message, Beat):
            self._beat = message

    def tick(self) -> None:
        self._silence_seconds += TICK_SECONDS

    @property
    def is_sick(self) -> bool:
        return self._silence_seconds >= SICK_SECONDS

    def reason_to_kill(self, *, is_ready: bool) -> str | None:
        patience = min(SILENCE_SECONDS, self.hang_seconds) if is_ready else LOADING_SECONDS
        if self._silence_seconds >= patience:
            return f"gave no sign of life for {self._silence_seconds:g} s"
        if self._beat.turn_seconds >= self.hang_seconds:
            return f"is in turn {self._beat.turns} since {self._beat.turn_seconds:.0f} s"
        return None


class Supervisor:
    """Keeps one model's engine process running: starts, watches and restarts it, and holds its condition and status."""

    def __init__(self, settings: EngineSettings, hang_seconds: float, command: Sequence[str] = COMMAND) -> None:
        self.settings = settings
        self.hang_seconds = hang_seconds
        self.command = command
        self.client = EngineClient()
        self.condition = EngineCondition(loading=Loading("starting"))
        self.status = EngineStatus()
        self.restarts = 0
        self.pid: int | None = None
        self.changed = asyncio.Event()  # set at the next change of condition, and then replaced
        self._task: asyncio.Task[None] | None = None
        self._ready_at: float | None = None  # in the event loop's time
        self._folder: str | None = None  # of the model that was served last
        self._earlier_drafts = DraftTotals()  # of the engines before this one

    @property
    def drafts(self) -> DraftTotals:
        status = self.status
        return self._earlier_drafts + DraftTotals(status.drafts, status.num_drafts, status.accepted_at)

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_alive())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_alive(self) -> None:
        failures = 0  # engines in a row that were of no use
        try:
            while True:
                why = await self._run_once()
                was_of_use = self.client.detach()
                failures = failures + 1 if why and not was_of_use else 0
                if failures >= MAX_FAILURES:
                    self._change(EngineCondition(failed=f"{why}; tried {failures} times"))
                if self.condition.failed is not None:
                    return
                pause = min(FIRST_PAUSE_SECONDS * 2**failures, LONGEST_PAUSE_SECONDS)
                self.restarts += 1
                log.warning("the engine is gone; starting another in %.1f s", pause)
                self._change(EngineCondition(loading=Loading("starting again")))
                await asyncio.sleep(pause)
        finally:  # nobody may wait for an engine that will not come
            why = self.condition.failed or "the server is being stopped"
            self.client.fail_all(lambda: EngineDied(f"the engine ended and no other goes on with this request: {why}"))

    async def _run_once(self) -> str | None:
        """Run one engine process to its end; return why it was of no use if it died before or soon after `ready`, else None."""
        self._ready_at = None
        try:
            await self._run_process()
        except (OSError, zmq.ZMQError) as error:  # no file descriptor, no memory, no room for a socket's name …
            log.exception("an engine could not be started")
            return f"its process could not be started ({error})"
        if self._ready_at is None:
            return "its process ended before it was ready; the log above has its words"
        is_short = asyncio.get_running_loop().time() - self._ready_at < SOON_SECONDS
        return "its process ended soon after it was ready; the log above has its words" if is_short else None

    async def _run_process(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="weft-")  # mode 0700: nobody else may talk to the engine
        address, environment = f"ipc://{folder.name}/engine", os.environ | {FRONT_PID: str(os.getpid())}
        with folder, contextlib.closing(FrontEnd(address)) as channel:
            process = await asyncio.create_subprocess_exec(*self.command, address, env=environment)
            channel.send(self.settings)
            self.pid, watchdog = process.pid, Watchdog(self.hang_seconds)
            receiving = asyncio.create_task(self._receive(channel, watchdog))
            watching = asyncio.create_task(self._watch(watchdog))
            ended = asyncio.create_task(process.wait())
            try:
                await asyncio.wait({ended, receiving, watching}, return_when=asyncio.FIRST_COMPLETED)
                self.client.send = None  # new requests wait for the next engine
                if receiving.done():  # it can only have failed: a message of this engine could not be decoded
                    log.error("engine %d is given up", process.pid, exc_info=receiving.exception())
                    return
                if watching.done():
                    log.error("engine %d %s: it is killed", process.pid, watching.result())
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGUSR1)  # if it can, it writes its stack
                    await _end(process, STACK_SECONDS)
                await _drain(receiving, watchdog)
                log.warning("engine %d ended with status %s", process.pid, process.returncode)
            finally:
                for task in (receiving, watching, ended):
                    task.cancel()
                if process.returncode is None:
                    channel.send(Shutdown())
                    await _end(process, END_SECONDS)
                self._earlier_drafts = self.drafts
                self.pid, self.status = None, EngineStatus()

    async def _receive(self, channel: FrontEnd, watchdog: Watchdog) -> None:
        while True:
            message = await channel.receive()
            watchdog.receive(message)
            match message:
                case EngineEvents():
                    self.status = message.status or self.status
                    self.client.receive(message)
                case Prefixes():
                    self.client.receive_prefixes(message)
                case Ready():
                    self._attach(message, channel)
                case Loading():
                    self._change(EngineCondition(loading=message))
                case Failed():
                    self._change(EngineCondition(failed=message.message))

    async def _watch(self, watchdog: Watchdog) -> str:
        """Wait until the engine must be killed and return the reason; meanwhile update whether it is sick (silent)."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            watchdog.tick()
            is_ready = self.condition.ready is not None
            if (why := watchdog.reason_to_kill(is_ready=is_ready)) is not None:
                return why
            if is_ready and watchdog.is_sick != self.condition.is_sick:
                log.warning("engine %d %s", self.pid, "is silent" if watchdog.is_sick else "is heard again")
                self._change(replace(self.condition, is_sick=watchdog.is_sick))

    def _attach(self, ready: Ready, channel: FrontEnd) -> None:
        if self._folder not in (None, ready.folder):  # this time the fallback is served, or no longer
            self.client.fail_all(lambda: EngineDied(f"the engine ended, and {ready.model} is served now: ask again"))
        self._folder, self._ready_at = ready.folder, asyncio.get_running_loop().time()
        self.client.attach(channel.send, ready.max_rows)
        self._change(EngineCondition(ready=ready))

    def _change(self, condition: EngineCondition) -> None:
        self.condition = condition
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


async def _drain(receiving: asyncio.Task[None], watchdog: Watchdog) -> None:
    """Receive the last messages of an engine that has ended, until none has come for DRAIN_SECONDS."""
    num_received = -1
    while num_received != watchdog.num_received and not receiving.done():
        num_received = watchdog.num_received
        await asyncio.wait({receiving}, timeout=DRAIN_SECONDS)


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Wait up to `seconds` for an engine process to exit by itself, then kill it; return when it is gone."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        process.kill()
    await process.wait()
