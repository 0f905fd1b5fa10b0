"""How an engine comes to be: started as a child process, given at an address, or placed by Ray. A lifeline knows no more."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from weft.config import EngineSettings
from weft.ipc.messages import ToEngine, ToFront


class EngineChannel(Protocol):
    """The front's end of the channel to one engine."""

    def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> ToFront: ...


@dataclass(frozen=True)
class EngineExit:
    """How an engine ended: words for the log, and whether it may have been the doing of a request in it.

    It may when the process crashed or hung. A process that was killed by others, or a connection that broke, says little about
    the requests there.
    """

    words: str
    is_crash: bool = True


class StartedEngine(Protocol):
    """One engine that was started or reached: its channel, its process if that is on this machine, and its end."""

    @property
    def channel(self) -> EngineChannel: ...

    @property
    def pid(self) -> int | None: ...

    async def wait(self) -> EngineExit:
        """Return how the engine ended, as soon as it has."""
        ...

    async def kill(self) -> None:
        """End an engine that hangs, and return when it is gone."""
        ...

    def retire(self) -> None:
        """Have an engine replaced that is about to be left; the end of the context is enough for one that ends with it."""
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


class EnginePlacement(Protocol):
    """Has a model's engines placed on machines; starters ask it where they are."""

    @property
    def problem(self) -> str | None:
        """Why no engine can be placed now; None if engines can be. Engines that are connected go on either way."""
        ...

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    def place(self, names: Sequence[str]) -> None:
        """Have engines with these names and no others from now on."""
        ...
