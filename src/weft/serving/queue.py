"""The limit on each tenant's answers in a model's queue: 429 beyond it, with a Retry-After from how fast answers finish."""

import math
import time
from collections import Counter, deque
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
    """Limits how many answers of one model run, wait or have their prompts encoded at the same time, for each tenant."""

    def __init__(self) -> None:
        self.finish_rate = FinishRate()
        self._num_encoding: Counter[str] = Counter()  # answers whose prompts are being encoded, by tenant

    @contextmanager
    def place(self, model: str, tenant: str, count: int, num_submitted: int, num_places: int) -> Iterator[None]:
        """Reserve `count` of a tenant's places while prompts are encoded, until they are submitted.

        Raises QueueFull if too few of them are free. Every tenant has `num_places` of its own, so that none finds out by a
        refusal, or suffers from, how much others ask for.
        """
        taken, now = num_submitted + self._num_encoding[tenant], time.monotonic()
        if taken + count > num_places:
            message = f"{taken} answers of {model} are running or waiting, {count} more are too many; come again"
            raise QueueFull(message, retry_after=self.finish_rate.seconds_for(taken, now))
        if not taken:
            self.finish_rate.begin(now)
        self._num_encoding[tenant] += count
        try:
            yield
        finally:
            self._num_encoding[tenant] -= count
