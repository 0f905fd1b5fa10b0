"""How long each phase of loading a model takes, for the log: an operator who waits sees for what."""

import time
from collections.abc import Callable
from typing import Literal

Phase = Literal[
    "imports", "files", "building", "weights", "kernels", "products", "MTP head", "trying rows", "vision", "prefixes on disk",
    "warm-up", "vocabulary",
]  # fmt: skip


class LoadPhases:
    """Times the phases of a load, which follow each other; one that comes again is added to."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seconds: dict[Phase, float] = {}
        self._current: Phase | None = None
        self._began = clock()

    def begin(self, phase: Phase) -> None:
        """End the phase under way, and begin this one."""
        self.end()
        self._current = phase

    def end(self) -> None:
        """End the phase under way; time until the next one begins is nobody's."""
        now = self.clock()
        if self._current is not None:
            self.seconds[self._current] = self.seconds.get(self._current, 0.0) + now - self._began
        self._current, self._began = None, now

    def __str__(self) -> str:
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"
