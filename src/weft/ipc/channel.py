"""The seam between front and engine: msgspec structs over zmq sockets, one for each way, and the only (de)serialisation.

The front binds in a private folder, the engine connects. `EngineEnd` belongs to the engine's process, `FrontEnd` to an
event loop. Neither knows what the messages mean.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from weft.ipc.messages import ToEngine, ToFront

FRONT_PID = "WEFT_FRONT_PID"  # in the engine's environment: whom it works for
LINGER_MILLISECONDS = 1000  # the last words of a dying engine are still told
TO_ENGINE, TO_FRONT = "-to-engine", "-to-front"  # after the address: two threads may not share a socket, not even one each way


class EngineEnd:
    """The engine's side: sends from any thread, receives in one."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        _open(self._out, self._in)
        self._out.connect(address + TO_FRONT)
        self._in.connect(address + TO_ENGINE)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # the heartbeat and downloads have threads of their own
        self.listened = (0, 0.0)  # how often somebody did, and when last; one object, as two threads read it

    def send(self, message: ToFront) -> None:
        """Send and return at once: the front may be slow, the engine may not."""
        with self._lock:
            self._out.send(self._encoder.encode(message))

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        """Everything that has come; waits for the first one at most so long."""
        has_come = self._in.poll(int(wait_seconds * 1000))
        self.listened = (self.listened[0] + 1, time.monotonic())
        if not has_come:
            return []
        messages: list[ToEngine] = []
        try:
            while True:
                messages.append(self._decoder.decode(self._in.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages

    def close(self) -> None:
        """Say the last words and go."""
        self._out.close()
        self._in.close()
        self._context.term()


class FrontEnd:
    """The front's side of one engine's seam."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._out, self._in = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        _open(self._out, self._in)
        self._out.bind(address + TO_ENGINE)
        self._in.bind(address + TO_FRONT)
        self._decoder = msgspec.msgpack.Decoder(ToFront)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToEngine) -> None:
        """Send and return at once: there is no limit to what is under way, so the future is done already."""
        self._out.send(self._encoder.encode(message))

    async def receive(self) -> ToFront:
        """The next message."""
        message: ToFront = self._decoder.decode(await self._in.recv())
        return message

    def close(self) -> None:
        """Drop what was not sent and go."""
        self._out.close(linger=0)
        self._in.close(linger=0)
        self._context.term()


def _open(*sockets: zmq.Socket[Any]) -> None:
    for socket in sockets:
        socket.set_hwm(0)  # nobody is ever blocked in a send; what is under way is bounded by the requests admitted
        socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
