"""Finds the row that breaks a step: the rows of a failed step are tried in halves until the guilty one fails alone.

Only the group on trial steps; it is acquitted when each of its rows has a token more than it had, or its end. Knows
sequences, nothing of what failed. Used by the engine, which takes rows back before it tries them again.
"""

from __future__ import annotations

from weft.engine.sequence import Sequence


class Bisection:
    """Owns the groups that are still to be tried; the first is on trial."""

    def __init__(self) -> None:
        self.groups: list[list[Sequence]] = []
        self._had: dict[int, int] = {}  # tokens each had when its group failed

    def may_step(self, sequence: Sequence) -> bool:
        """Whether a row may take part in the next step."""
        return not self.groups or any(one is sequence for one in self.groups[0])

    def failed(self, rows: list[Sequence]) -> Sequence | None:
        """A step of these rows failed. Gives the guilty one when it is known: alone, and not for the first time."""
        if self.groups:
            self.groups.pop(0)
        if len(rows) == 1 and rows[0].is_suspect:
            return rows[0]
        for one in rows:
            self._had[one.id], one.is_suspect = len(one.output), True
        half = len(rows) // 2
        self.groups = [group for group in (rows[:half], rows[half:]) if group] + self.groups
        return None

    def settle(self) -> None:
        """Acquit the group on trial when all of it has gone on."""
        while self.groups and all(one.is_finished or len(one.output) > self._had[one.id] for one in self.groups[0]):
            for one in self.groups.pop(0):
                one.is_suspect = False
        if not self.groups:
            self._had.clear()
