"""The limit on a model's queue: requests beyond it get HTTP 429, with a Retry-After estimated from how fast answers finish."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import QueueFull

KNOWN_FINISHES = 8  # finished answers from which a rate can be told
UNKNOWN_SECONDS = 5  # the Retry-After until then


class FinishRate:
    """Estimates how long a model takes to finish a number of answers, from the gaps between its last 32 finishes."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=32)  # seconds between two finishes
        self._last = 0.0

    def begin(self, now: float) -> None:
        """Start the clock for the next gap, because the model was idle until now."""
        self._last = now

    def finish(self, now: float) -> None:
        self._gaps.append(now - self._last)
        self._last = now

    def seconds_for(self, count: int, now: float) -> int:
        if len(self._gaps) < KNOWN_FINISHES:
            return UNKNOWN_SECONDS
        return math.ceil(count * (sum(self._gaps) + now - self._last) / len(self._gaps))


class RequestQueue:
    """Limits how many answers of one model run, wait or have their prompts encoded at the same time."""

    def __init__(self) -> None:
        self.finish_rate = FinishRate()
        self._num_encoding = 0  # answers whose prompts are being encoded

    @contextmanager
    def place(self, model: str, count: int, num_submitted: int, num_places: int) -> Iterator[None]:
        """Reserve `count` places while prompts are encoded, until they are submitted. Raises QueueFull if too few are free."""
        taken, now = num_submitted + self._num_encoding, time.monotonic()
        if taken + count > num_places:
            message = f"{taken} answers of {model} are running or waiting, {count} more are too many; come again"
            raise QueueFull(message, retry_after=self.finish_rate.seconds_for(taken, now))
        if not taken:
            self.finish_rate.begin(now)
        self._num_encoding += count
        try:
            yield
        finally:
            self._num_encoding -= count
