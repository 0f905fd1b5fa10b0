"""How long a client has been sent nothing: a stream is kept alive by what was sent, not by what was computed."""

import time
from collections.abc import Callable


class Silence:
    """The seconds since bytes were last sent to a client, and the most there may be: infinite where a reply is not streamed."""

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest = longest
        self._clock = clock
        self._begun = clock()

    def end(self) -> None:
        """Note that bytes were sent now."""
        self._begun = self._clock()

    @property
    def seconds_left(self) -> float:
        """Seconds until a heartbeat must be sent."""
        return max(0.0, self._begun + self._longest - self._clock())

    @property
    def is_over(self) -> bool:
        """Whether a heartbeat must be sent now."""
        return self.seconds_left == 0.0
