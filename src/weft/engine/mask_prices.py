"""Makes rows whose token masks are slow wait for their turn, so that their neighbours' steps are not slowed by them.

The masks of a step are filled while its forward runs, and all its rows wait for the slowest. So what slow masks took is paid back
by the rows that need them: they sit out until the others have had many times as long to themselves. No answer changes by it.
"""

from collections.abc import Callable, Iterable

from weft.engine.sequence import Sequence

SLOW_SECONDS = 0.002  # of one row's masks in a step
SHARE = 0.1  # of the time beside other rows that slow masks may take


class MaskPrices:
    """Keeps which rows have slow masks, and until when these must sit out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slow: set[int] = set()  # numbers of sequences
        self._paid_at = 0.0  # when the others have had their time

    def charge(self, sequence: Sequence, seconds: float) -> None:
        """Note what a row's masks took in a step."""
        if seconds < SLOW_SECONDS:
            self._slow.discard(sequence.id)
            return
        self._slow.add(sequence.id)
        self._paid_at = max(self._paid_at, self._clock()) + seconds / SHARE

    def forget(self, sequence: Sequence) -> None:
        self._slow.discard(sequence.id)

    def choose(self, rows: Iterable[Sequence]) -> tuple[Sequence, ...]:
        """Return the rows that step now: all of them, or those without slow masks while the others have to wait."""
        rows = tuple(rows)
        if not self._slow or self._clock() >= self._paid_at:
            return rows
        return tuple(one for one in rows if one.id not in self._slow) or rows  # nobody is kept from anything where all are slow
