"""One engine process: started, watched, replaced when it dies or hangs. Says truthfully how it is.

Knows a command line and a channel, no model and no text. The requests of a dead engine go on in the next one; the client
sees to that, and to the one among them that kills engines. Before each new engine there is a pause, and there is an end to
trying: a life came to nothing when the engine was never ready, or died soon after and no request ended or got on in it.
After `MAX_FAILURES` such lives in a row it is given up, and every request is told. A request that kills engines is found
in its third; to have found it is worth a life, so such a request takes no others with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import zmq

from weft.config import ServerConfig
from weft.errors import EngineDied
from weft.ipc.channel import FRONT_PID, FrontEnd
from weft.ipc.messages import EngineEvents, EngineStatus, Failed, Loading, Prefixes, Ready, Shutdown, ToFront
from weft.serving.engine_client import EngineClient
from weft.serving.watchdog import TICK_SECONDS, Watchdog

log = logging.getLogger("weft.serving")

FIRST_PAUSE_SECONDS = 0.5  # before a dead engine is started again; doubled each time
LONGEST_PAUSE_SECONDS = 30.0
MAX_FAILURES = 5  # lives in a row that come to nothing, before it is given up
SOON_SECONDS = 60.0  # an engine that lives longer is of use, even if nobody asked it anything
END_SECONDS = 3.0  # a told engine that is not gone by then is killed
STACK_SECONDS = 0.5  # a hung one has so long to say where it hangs


@dataclass(frozen=True)
class EngineCondition:
    """How an engine is. `ready` has its facts once it is up; `loading` says how far it is; `failed` why it never will be.

    `is_sick`: it was up, and should have been heard since.
    """

    ready: Ready | None = None
    loading: Loading | None = None
    failed: str | None = None
    is_sick: bool = False


class Supervisor:
    """Owns one engine's process, whichever incarnation it is in."""

    def __init__(self, command: list[str], hang_seconds: float = ServerConfig.hang_seconds) -> None:
        self.command = command
        self.hang_seconds = hang_seconds
        self.client = EngineClient()
        self.condition = EngineCondition(loading=Loading("starting"))
        self.status = EngineStatus()
        self.restarts = 0
        self.pid: int | None = None
        self.changed = asyncio.Event()  # set at the next change of condition, and then another one
        self._task: asyncio.Task[None] | None = None
        self._ready_at: float | None = None  # in the event loop's time
        self._folder: str | None = None  # of the model that was served last

    def start(self) -> None:
        """Begin; returns at once."""
        self._task = asyncio.create_task(self._keep_alive())

    async def stop(self) -> None:
        """End the engine and wait for it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_alive(self) -> None:
        failures = 0  # lives in a row that came to nothing
        try:
            while True:
                why = await self._life()
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
        finally:  # nobody waits for an engine that will not come
            why = self.condition.failed or "the server is being stopped"
            self.client.fail_all(lambda: EngineDied(f"the engine ended and no other goes on with this request: {why}"))

    async def _life(self) -> str | None:
        """One engine from start to end; if it was of no use, why."""
        self._ready_at = None
        try:
            await self._live()
        except (OSError, zmq.ZMQError) as error:  # no file descriptor, no memory, no room for a socket's name …
            log.exception("an engine could not be started")
            return f"its process could not be started ({error})"
        if self._ready_at is None:
            return "its process ended before it was ready; the log above has its words"
        is_short = asyncio.get_running_loop().time() - self._ready_at < SOON_SECONDS
        return "its process ended soon after it was ready; the log above has its words" if is_short else None

    async def _live(self) -> None:
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:  # mode 0700: nobody else may speak to the engine
            address = f"ipc://{Path(folder) / 'engine'}"
            channel, watchdog = FrontEnd(address), Watchdog(self.hang_seconds)
            try:
                environment = os.environ | {FRONT_PID: str(os.getpid())}
                process = await asyncio.create_subprocess_exec(*self.command, address, env=environment)
            except BaseException:
                channel.close()
                raise
            self.pid = process.pid
            hearing = asyncio.create_task(self._hear(channel, watchdog))
            watching = asyncio.create_task(self._watch(watchdog))
            ended = asyncio.create_task(process.wait())
            try:
                await asyncio.wait({ended, hearing, watching}, return_when=asyncio.FIRST_COMPLETED)
                self.client.sender = None  # who comes now waits for the next engine
                if hearing.done():  # it can only have failed: what this engine says is not understood
                    log.error("engine %d is given up", process.pid, exc_info=hearing.exception())
                    return
                if watching.done():
                    log.error("engine %d %s: it is killed", process.pid, watching.result())
                    await _kill(process)
                await _drain(hearing)
                log.warning("engine %d ended with status %s", process.pid, process.returncode)
            finally:
                hearing.cancel()
                watching.cancel()
                await _end(process, channel)
                ended.cancel()
                self.pid = None
                self.status = EngineStatus()
                channel.close()

    async def _hear(self, channel: FrontEnd, watchdog: Watchdog) -> None:
        while True:
            message = await channel.receive()
            watchdog.hear(message)
            self._take(message, channel)

    async def _watch(self, watchdog: Watchdog) -> str:
        """Tell whether the engine is sick; the reason to end it, when there is one."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            watchdog.tick()
            is_ready = self.condition.ready is not None
            if (why := watchdog.verdict(is_ready=is_ready)) is not None:
                return why
            if is_ready and watchdog.is_sick != self.condition.is_sick:
                log.warning("engine %d %s", self.pid, "is silent" if watchdog.is_sick else "is heard again")
                self._change(replace(self.condition, is_sick=watchdog.is_sick))

    def _take(self, message: ToFront, channel: FrontEnd) -> None:
        match message:
            case EngineEvents():
                self.status = message.status or self.status
                self.client.hear(message)
            case Prefixes():
                self.client.hear_prefixes(message)
            case Ready():
                self._attach(message, channel)
            case Loading():
                self._change(EngineCondition(loading=message))
            case Failed():
                self._change(EngineCondition(failed=message.message))

    def _attach(self, ready: Ready, channel: FrontEnd) -> None:
        if self._folder not in (None, ready.folder):  # the one asked for could not be had this time
            self.client.fail_all(lambda: EngineDied(f"the engine ended, and {ready.model} is served now: ask again"))
        self._folder, self._ready_at = ready.folder, asyncio.get_running_loop().time()
        self.client.attach(channel, ready.max_rows)
        self._change(EngineCondition(ready=ready))

    def _change(self, condition: EngineCondition) -> None:
        self.condition = condition
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


async def _drain(hearing: asyncio.Task[None]) -> None:
    """Let the last words of an ended engine come in; they may be on their way."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(hearing), 0.2)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End an engine that does not hear; if it can, it writes first where it is."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.send_signal(signal.SIGUSR1)
        await asyncio.wait_for(process.wait(), STACK_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _end(process: asyncio.subprocess.Process, channel: FrontEnd) -> None:
    if process.returncode is not None:
        return
    channel.send(Shutdown())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_SECONDS)
    if process.returncode is None:
        process.send_signal(signal.SIGKILL)
        await process.wait()
