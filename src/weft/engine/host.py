"""An engine at the end of a channel: hears what the front asks, turns, tells what happened.

The only place of the engine that knows there is a front. One thread; waits only when there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from weft.channel import EngineEnd
from weft.engine.engine import Engine
from weft.engine.sequence import Sequence
from weft.errors import RequestError
from weft.wire import Cancel, EngineStatus, Events, Shutdown, Submit, TokenEvent

IDLE_SECONDS = 0.5  # an idle engine shows itself this often
STATUS_SECONDS = 0.1


class Host:
    """Runs an engine for the front."""

    def __init__(self, engine: Engine, channel: EngineEnd, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.channel = channel
        self.clock = clock
        self.live: dict[int, Sequence] = {}
        self.running = True
        self._told: tuple[int, int] | None = None
        self._told_at = 0.0

    def run(self) -> None:
        """Until the front says Shutdown."""
        while self.running:
            self.hear()
            if not self.engine.idle:
                self.engine.turn()
            self.tell()

    def hear(self) -> None:
        """Take what the front sent; waits only when there is nothing else to do."""
        for message in self.channel.receive(IDLE_SECONDS if self.engine.idle else 0.0):
            match message:
                case Submit():
                    self._submit(message)
                case Cancel():
                    for number in message.numbers:
                        if (sequence := self.live.get(number)) is not None:
                            self.engine.cancel(sequence)
                case Shutdown():
                    self.running = False

    def tell(self) -> None:
        """Send what happened, and how many rows there are when that changed."""
        tokens, prompts = self.engine.take_events(), self.engine.take_prompt_events()
        for event in tokens:
            if event.finish is not None:
                self.live.pop(event.sequence, None)
        status = self._status()
        if tokens or prompts or status:
            self.channel.send(Events(prompts, tokens, status))

    def _submit(self, message: Submit) -> None:
        try:
            sequences = self.engine.submit_forks(message.prompt, message.samplings, message.numbers)
        except RequestError as error:  # the front checks the same; should it ever differ, this request alone is told
            self.engine.events.extend(TokenEvent(number, None, finish="error", error=str(error)) for number in message.numbers)
            return
        self.live.update(zip(message.numbers, sequences, strict=True))

    def _status(self) -> EngineStatus | None:
        """The counts, when they changed and some time has passed, or when all work is done, or now and then."""
        counts, now = self.engine.counts, self.clock()
        waited = now - self._told_at
        is_news = counts != self._told and (waited >= STATUS_SECONDS or counts == (0, 0))
        if not is_news and waited < IDLE_SECONDS:
            return None
        self._told, self._told_at = counts, now
        return EngineStatus(*counts, memory_in_use(self.engine))


def memory_in_use(engine: Engine) -> dict[str, int]:
    """Bytes by kind, as the device's allocator and our slabs count them."""
    return {
        "weights": engine.adapter.weights_bytes,
        "rows": engine.runner.pool.bytes_held,
        "active": mx.get_active_memory(),
        "reusable": mx.get_cache_memory(),
        "peak": mx.get_peak_memory(),
    }
