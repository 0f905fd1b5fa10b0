"""Engines as child processes on this machine, each with a channel in a private folder."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.config import EngineSettings
from weft.ipc.channel import FRONT_PID, FrontEnd
from weft.ipc.messages import Shutdown
from weft.serving.starters import EngineExit

COMMAND = (sys.executable, "-m", "weft.engine.process")
END_SECONDS = 3.0  # an engine that was told to end and is not gone by then is killed
STACK_SECONDS = 0.5  # for a hung engine to write its stack
KILLED_BY_OTHERS = (-signal.SIGKILL, -signal.SIGTERM)  # statuses of a process that did not end by itself


@dataclass(frozen=True)
class ChildEngine:
    """An engine process that this process has started."""

    process: asyncio.subprocess.Process
    channel: FrontEnd

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> EngineExit:
        status = await self.process.wait()
        return EngineExit(f"ended with status {status}", is_crash=status not in KILLED_BY_OTHERS)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)  # if it can, it writes its stack
        await self.end(STACK_SECONDS)

    def retire(self) -> None:
        pass

    async def end(self, seconds: float) -> None:
        """Wait up to `seconds` for the process to exit by itself, then kill it; return when it is gone."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), seconds)
        finally:  # also if the server is stopped meanwhile
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self.process.kill()
            await self.process.wait()


@dataclass
class Here:
    """Starts engine processes with these settings; `environment` is added to the server's own."""

    settings: EngineSettings
    command: Sequence[str] = COMMAND
    name: str = "0"
    environment: Mapping[str, str] = field(default_factory=dict)
    may_be_away: bool = False

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncIterator[ChildEngine]:
        """Start one engine process and send it its settings; at the end of the context it is told to end, or killed."""
        folder = tempfile.TemporaryDirectory(prefix="weft-")  # mode 0700: nobody else may talk to the engine
        address = f"ipc://{folder.name}/engine"
        environment = {**os.environ, **self.environment, FRONT_PID: str(os.getpid())}
        if self.settings.shards > 1:
            environment |= {"PYTHONHASHSEED": "0"}  # all ranks must walk through their sets in the same order
        with folder, contextlib.closing(FrontEnd(address)) as channel:
            process = await asyncio.create_subprocess_exec(*self.command, address, env=environment)
            engine = ChildEngine(process, channel)
            channel.send(self.settings)
            try:
                yield engine
            finally:
                if process.returncode is None:
                    channel.send(Shutdown())
                    await engine.end(END_SECONDS)
