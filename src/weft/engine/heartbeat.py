"""Signs of life from a thread of their own, so that neither a long forward nor a long compile keeps them back.

Whatever takes long in there leaves the interpreter free (measured: evaluating, reading arrays, compiling grammars). Knows
a channel, on which the engine's loop listens once a turn, and nothing of what a turn does.
"""

from __future__ import annotations

import threading
import time

from weft.ipc.channel import EngineEnd
from weft.ipc.messages import Beat

BEAT_SECONDS = 0.25


class Heartbeat:
    """Tells the front that the process lives, and for how long its loop has not listened."""

    def __init__(self, channel: EngineEnd) -> None:
        self._channel = channel
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()  # then the channel can be closed

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            turns, since = self._channel.listened
            self._channel.send(Beat(turns, time.monotonic() - since if turns else 0.0))
