"""Whether an engine's process lives: how long it has been silent, and how long its loop has been in one turn.

Counts ticks, not hours: while the front itself stands still nothing ticks, so its own pauses are no silence of the
engine's. Knows messages, no process; the supervisor ticks it and does what follows.
"""

from __future__ import annotations

from weft.ipc.messages import Beat, ToFront

TICK_SECONDS = 0.25
SICK_SECONDS = 1.5  # of silence, where a beat is due every quarter of a second: told within two seconds
SILENCE_SECONDS = 10.0  # then an engine that was ready is taken for dead
LOADING_SECONDS = 120.0  # and one that was not: what loads a model may hold the interpreter


class Watchdog:
    """Watches one engine."""

    def __init__(self, hang_seconds: float) -> None:
        self.hang_seconds = hang_seconds
        self._silence_seconds = 0.0
        self._beat = Beat(0, 0.0)

    def hear(self, message: ToFront) -> None:
        """A word is a sign of life, whatever it says."""
        self._silence_seconds = 0.0
        if isinstance(message, Beat):
            self._beat = message

    def tick(self) -> None:
        """So much time went by in which the engine could have been heard."""
        self._silence_seconds += TICK_SECONDS

    @property
    def is_sick(self) -> bool:
        """Whether it should have been heard by now."""
        return self._silence_seconds >= SICK_SECONDS

    def verdict(self, *, is_ready: bool) -> str | None:
        """Why it should be ended, if it should."""
        patience = min(SILENCE_SECONDS, self.hang_seconds) if is_ready else LOADING_SECONDS
        if self._silence_seconds >= patience:
            return f"gave no sign of life for {self._silence_seconds:g} s"
        if self._beat.turn_seconds >= self.hang_seconds:
            return f"is in turn {self._beat.turns} since {self._beat.turn_seconds:.0f} s"
        return None
