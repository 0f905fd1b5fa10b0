"""Finds the row that breaks a step: the rows of a failed step are run again in halves, until the guilty one fails alone.

Only the first group steps; it is cleared when each of its rows has one token more than before, or has ended. The engine
preempts rows before it runs them again.
"""

from weft.engine.sequence import Sequence


class Bisection:
    """Owns the groups of suspects that are still to be run; nobody else steps before they are cleared."""

    def __init__(self) -> None:
        self.groups: list[list[Sequence]] = []
        self._num_emitted: dict[int, int] = {}  # by suspect: tokens it had when its group failed

    def is_suspect(self, sequence: Sequence) -> bool:
        """Whether a step that this sequence was in has failed, and it is not cleared."""
        return sequence.id in self._num_emitted

    def may_step(self, sequence: Sequence) -> bool:
        return not self.groups or any(one is sequence for one in self.groups[0])

    def split(self, rows: list[Sequence]) -> Sequence | None:
        """Split the rows of a failed step into halves; the guilty row when it failed alone and not for the first time."""
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
        """Clear the first group once all of its rows have gone on."""
        while self.groups and all(one.is_finished or len(one.output) > self._num_emitted[one.id] for one in self.groups[0]):
            for one in self.groups.pop(0):
                del self._num_emitted[one.id]
