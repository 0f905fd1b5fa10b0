"""Finds the row that makes a batched decode step fail: the step's rows are retried in halves until one row fails alone.

Only the first group steps; it is cleared when each of its rows has one token more than before, or has ended. The engine
preempts rows before it runs them again.
"""

from weft.engine.sequence import Sequence


class Bisection:
    """Holds the groups of suspect rows to retry after a failed step; no other row decodes until these are cleared."""

    def __init__(self) -> None:
        self.groups: list[list[Sequence]] = []
        self._num_emitted: dict[int, int] = {}  # by suspect: tokens it had when its group failed

    def is_suspect(self, sequence: Sequence) -> bool:
        """Whether this sequence was in a decode step that failed and has not been cleared since."""
        return sequence.id in self._num_emitted

    def may_step(self, sequence: Sequence) -> bool:
        return not self.groups or any(one is sequence for one in self.groups[0])

    def split(self, rows: list[Sequence]) -> Sequence | None:
        """Queue the rows of a failed step as two halves to retry; returns a row instead if it failed alone and was a suspect."""
        if self.groups:
            self.groups.pop(0)
        if len(rows) == 1 and self.is_suspect(rows[0]):
            del self._num_emitted[rows[0].id]
            return rows[0]
        self._num_emitted |= {one.id: len(one.output) for one in rows}
        half = len(rows) // 2
        self.groups = [group for group in (rows[:half], rows[half:]) if group] + self.groups
        return None

    def clear_proven(self) -> None:
        """Clear the leading groups of suspects in which every row has finished or emitted a token since its group failed."""
        while self.groups and all(one.is_finished or len(one.output) > self._num_emitted[one.id] for one in self.groups[0]):
            for one in self.groups.pop(0):
                del self._num_emitted[one.id]
