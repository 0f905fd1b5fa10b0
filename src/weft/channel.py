"""The seam between front and engine: msgspec structs over a pair of zmq sockets, and the only (de)serialisation.

The front binds in a private folder, the engine connects. `EngineEnd` belongs to the engine's thread, `FrontEnd` to an
event loop. Neither knows what the messages mean.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from weft.wire import ToEngine, ToFront

FRONT_PID = "WEFT_FRONT_PID"  # in the engine's environment: whom it works for
LINGER_MILLISECONDS = 1000  # the last words of a dying engine are still told


class EngineEnd:
    """The engine's side: sends from any thread, receives in one."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _open(self._socket)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # downloads report their progress from threads of their own

    def send(self, message: ToFront) -> None:
        """Send and return at once: the front may be slow, the engine may not."""
        with self._lock:
            self._socket.send(self._encoder.encode(message))

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        """Everything that has come; waits for the first one at most so long."""
        if not self._socket.poll(int(wait_seconds * 1000)):
            return []
        messages: list[ToEngine] = []
        try:
            while True:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages

    def close(self) -> None:
        """Say the last words and go."""
        self._socket.close()
        self._context.term()


class FrontEnd:
    """The front's side of one engine's seam."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _open(self._socket)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(ToFront)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToEngine) -> None:
        """Send and return at once: there is no limit to what is under way, so the future is done already.

        Not through a plain socket beside this one: a send may take the news that something can be received, and only
        this one looks for it afterwards.
        """
        self._socket.send(self._encoder.encode(message))

    async def receive(self) -> ToFront:
        """The next message."""
        message: ToFront = self._decoder.decode(await self._socket.recv())
        return message

    def close(self) -> None:
        """Drop what was not sent and go."""
        self._socket.close(linger=0)
        self._context.term()


def _open(socket: zmq.Socket[Any]) -> None:
    socket.set_hwm(0)  # nobody is ever blocked in a send; what is under way is bounded by the requests admitted
    socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
