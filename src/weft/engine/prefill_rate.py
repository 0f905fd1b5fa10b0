"""How long a prompt token takes, learned from the chunks that were computed. Imports no mlx.

Seconds and tokens are summed apart, so that a long chunk counts for more than a short one, whose time is mostly overhead, and the
first chunk counts in full: a replica that has just been started does not look faster than it is.
"""

WEIGHT = 0.2  # of the newest chunk, if all are equally long


class PrefillRate:
    """Seconds per prompt token, a mean over the last chunks; 0 until a chunk was computed."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def measure(self, num_tokens: int, seconds: float) -> None:
        self._seconds += seconds - WEIGHT * self._seconds
        self._tokens += num_tokens - WEIGHT * self._tokens

    @property
    def seconds_per_token(self) -> float:
        return self._seconds / self._tokens if self._tokens else 0.0
