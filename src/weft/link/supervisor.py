"""One engine process: started, watched, replaced when it dies. Says truthfully how it is.

Knows a command line and a channel, no model and no text. Live requests of a dead engine get an error through the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq

from weft.channel import FRONT_PID, FrontEnd
from weft.errors import EngineDied
from weft.link.client import Client
from weft.wire import EngineStatus, Events, Failed, Loading, Ready, Shutdown, ToFront

log = logging.getLogger("weft.link")

FIRST_PAUSE_SECONDS = 0.5  # before a dead engine is started again; doubled each time
LONGEST_PAUSE_SECONDS = 30.0
MAX_FAILURES = 5  # starts in a row that come to nothing, before it is given up
END_SECONDS = 3.0  # a told engine that is not gone by then is killed


@dataclass(frozen=True)
class Condition:
    """How an engine is. `ready` has its facts once it is up; `loading` says how far it is; `failed` why it never will be."""

    ready: Ready | None = None
    loading: Loading | None = None
    failed: str | None = None


class Supervisor:
    """Owns one engine's process, whichever incarnation it is in."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.client = Client()
        self.condition = Condition(loading=Loading("starting"))
        self.status = EngineStatus()
        self.restarts = 0
        self.pid: int | None = None
        self.changed = asyncio.Event()  # set at the next change of condition, and then another one
        self._task: asyncio.Task[None] | None = None

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
        failures = 0  # starts in a row that came to nothing
        while self.condition.failed is None:
            try:
                was_ready, why = await self._live(), "its process ended before it was ready; the log above has its words"
            except (OSError, zmq.ZMQError) as error:  # no file descriptor, no memory, no room for a socket's name …
                was_ready, why = False, f"its process could not be started ({error})"
                log.exception("an engine could not be started")
            failures = 0 if was_ready else failures + 1
            if self.condition.failed is not None:
                return
            if failures >= MAX_FAILURES:
                self._change(Condition(failed=f"{why}; tried {failures} times"))
                return
            pause = min(FIRST_PAUSE_SECONDS * 2**failures, LONGEST_PAUSE_SECONDS)
            self.restarts += 1
            log.warning("the engine is gone; starting another in %.1f s", pause)
            self._change(Condition(loading=Loading("starting again")))
            await asyncio.sleep(pause)

    async def _live(self) -> bool:
        """One engine's whole life; whether it was ever ready."""
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:  # mode 0700: nobody else may speak to the engine
            address = f"ipc://{Path(folder) / 'engine'}"
            channel = FrontEnd(address)
            try:
                environment = os.environ | {FRONT_PID: str(os.getpid())}
                process = await asyncio.create_subprocess_exec(*self.command, address, env=environment)
            except BaseException:
                channel.close()
                raise
            self.pid = process.pid
            hearing = asyncio.create_task(self._hear(channel))
            ended = asyncio.create_task(process.wait())
            try:
                await asyncio.wait({ended, hearing}, return_when=asyncio.FIRST_COMPLETED)
                if hearing.done():  # it can only have failed: what this engine says is not understood
                    log.error("engine %d is given up", process.pid, exc_info=hearing.exception())
                    return self.condition.ready is not None
                await _drain(hearing)
                log.warning("engine %d ended with status %s", process.pid, process.returncode)
                return self.condition.ready is not None
            finally:
                hearing.cancel()
                await _end(process, channel)
                ended.cancel()
                self.pid = None
                self.status = EngineStatus()
                self.client.fail_all(lambda: EngineDied("the engine's process ended while this request was in it"))
                channel.close()

    async def _hear(self, channel: FrontEnd) -> None:
        while True:
            self._take(await channel.receive(), channel)

    def _take(self, message: ToFront, channel: FrontEnd) -> None:
        match message:
            case Events():
                self.status = message.status or self.status
                self.client.hear(message)
            case Ready():
                self.client.sender = channel
                self._change(Condition(ready=message))
            case Loading():
                self._change(Condition(loading=message))
            case Failed():
                self._change(Condition(failed=message.message))

    def _change(self, condition: Condition) -> None:
        self.condition = condition
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


async def _drain(hearing: asyncio.Task[None]) -> None:
    """Let the last words of an ended engine come in; they may be on their way."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(hearing), 0.2)


async def _end(process: asyncio.subprocess.Process, channel: FrontEnd) -> None:
    if process.returncode is not None:
        return
    channel.send(Shutdown())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_SECONDS)
    if process.returncode is None:
        process.send_signal(signal.SIGKILL)
        await process.wait()
