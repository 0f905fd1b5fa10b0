"""What one more row adds to a decode step, learned from the steps that were timed. Imports no mlx.

Seconds are taken to grow evenly with rows. Until steps of different widths were timed, what a row adds is what was assumed.
"""

WEIGHT = 0.02  # of a new step
MAX_SURPRISE = 2.0  # times what was expected; a step that took longer was disturbed
DOUBT = 0.5  # rows²: where widths scatter less than this, what was assumed counts for more than what was seen
MAX_COST = 1.0  # of one more row: then rows gain nothing by stepping together


class RowCosts:
    """The cost of a decode step by its number of rows, in steps of one row."""

    def __init__(self, assumed: float) -> None:
        self.assumed = assumed  # of one more row; 0: rows cost nothing, and that is not put in doubt
        self.added = assumed
        self._rows = self._seconds = 0.0  # means
        self._spread = self._together = 0.0  # the variance of rows, and their covariance with seconds

    def of(self, num_rows: float) -> float:
        return 1 + self.added * (num_rows - 1)

    def measure(self, num_rows: int, seconds: float) -> None:
        """Learn from a step of one token per row."""
        if not self.assumed:
            return
        if not self._seconds:
            self._rows, self._seconds = num_rows, seconds
        expected = self._seconds * self.of(num_rows) / self.of(self._rows)
        rows, late = num_rows - self._rows, min(seconds, MAX_SURPRISE * expected) - self._seconds
        self._rows += WEIGHT * rows
        self._seconds += WEIGHT * late
        self._spread += WEIGHT * ((1 - WEIGHT) * rows * rows - self._spread)
        self._together += WEIGHT * ((1 - WEIGHT) * rows * late - self._together)
        self._fit()

    def _fit(self) -> None:
        lone = self._seconds / (1 + self.assumed * (self._rows - 1))  # a step of one row, if what was assumed holds
        slope = (self._together + DOUBT * self.assumed * lone) / (self._spread + DOUBT)
        lone = self._seconds - slope * (self._rows - 1)
        self.added = min(MAX_COST, max(0.0, slope / lone)) if lone > 0 else MAX_COST
