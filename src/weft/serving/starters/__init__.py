"""How an engine comes to be: started here as a child process, or given at an address. A lifeline knows no more than this."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from weft.config import EngineSettings
from weft.ipc.messages import ToEngine, ToFront


class EngineChannel(Protocol):
    """The front's end of the channel to one engine."""

    def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> ToFront: ...


class StartedEngine(Protocol):
    """One engine that was started or reached: its channel, its process if that is on this machine, and its end."""

    @property
    def channel(self) -> EngineChannel: ...

    @property
    def pid(self) -> int | None: ...

    async def wait(self) -> str:
        """Return when the engine has ended by itself, with words about it for the log."""
        ...

    async def kill(self) -> None:
        """End an engine that hangs, and return when it is gone."""
        ...


class Starter(Protocol):
    """Makes one engine after the other for one replica."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> EngineSettings: ...

    @property
    def may_be_away(self) -> bool:
        """Whether the engine is others' to start, so that it is waited for without end."""
        ...

    def start(self) -> AbstractAsyncContextManager[StartedEngine]:
        """Start or reach an engine; the context's end ends it, or leaves it. Raises OSError, zmq.ZMQError or EngineRefused."""
        ...
