"""The channel between front and engine: msgspec messages over two zmq sockets, one for each direction.

The front binds the sockets in a private folder, the engine connects to them.
"""

import threading
import time
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from weft.config import EngineSettings
from weft.errors import InternalError
from weft.ipc.messages import ToEngine, ToFront

FRONT_PID = "WEFT_FRONT_PID"  # in the engine's environment: the process it works for
LINGER_MILLISECONDS = 1000  # the last messages of a dying engine are still delivered
TO_ENGINE, TO_FRONT = "-to-engine", "-to-front"  # address suffixes: two threads may not share a socket, not even one each way


class EngineEnd:
    """The engine's end of the channel: any thread may send, a single thread receives."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        _configure(self._out, self._in)
        self._out.connect(address + TO_FRONT)
        self._in.connect(address + TO_ENGINE)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # heartbeat and downloads have threads of their own
        self.listened = (0, 0.0)  # number of receives and time of the last; one object, because two threads read it

    def send(self, message: ToFront) -> None:
        """Queue a message for the front and return without blocking, even if the front is slow."""
        with self._lock:
            self._out.send(self._encoder.encode(message))

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        """Return all messages that have arrived, waiting up to `wait_seconds` for the first; empty if none came."""
        messages: list[ToEngine] = []
        has_come = self._in.poll(int(wait_seconds * 1000))
        self.listened = (self.listened[0] + 1, time.monotonic())
        while has_come:
            messages.append(self._decoder.decode(self._in.recv()))
            has_come = self._in.poll(0)
        return messages

    def receive_settings(self, wait_seconds: float) -> EngineSettings:
        """Wait for the front's first message and return it; raise InternalError if it is late or holds no settings."""
        if not self._in.poll(int(wait_seconds * 1000)):
            raise InternalError(f"the front sent no settings within {wait_seconds:g} seconds")
        message = self._decoder.decode(self._in.recv())
        if not isinstance(message, EngineSettings):
            raise InternalError(f"the front's first message is a {type(message).__name__}, not its settings")
        return message

    def close(self) -> None:
        """Close the sockets after waiting at most LINGER_MILLISECONDS for unsent messages to be delivered."""
        self._out.close()
        self._in.close()
        self._context.term()


class FrontEnd:
    """The front's end of the channel to one engine process."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        _configure(self._out, self._in)
        self._out.bind(address + TO_ENGINE)
        self._in.bind(address + TO_FRONT)
        self._decoder = msgspec.msgpack.Decoder(ToFront)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine without blocking; one sent before the engine connects is delivered once it has."""
        self._out.send(self._encoder.encode(message))

    async def receive(self) -> ToFront:
        message: ToFront = self._decoder.decode(await self._in.recv())
        return message

    def close(self) -> None:
        """Close the sockets and discard messages that are not sent yet."""
        self._out.close(linger=0)
        self._in.close(linger=0)
        self._context.term()


def _configure(*sockets: zmq.Socket[Any]) -> None:
    for socket in sockets:
        socket.set_hwm(0)  # no send ever blocks; what is under way is bounded by the requests admitted
        socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
