"""How much a decode step may do for some tenants while another waits for its tokens in the same step. Imports no mlx.

A step with more rows takes longer, and every row waits for all of it. So where rows have a price (on a CPU), a tenant with many
rows lets some of them sit out in turn while others have few: what it adds to their steps is bounded by what they cost themselves.
"""

from collections import Counter
from collections.abc import Sequence as Rows

from weft.engine.sequence import Sequence

SHARE = 0.6  # of what would double the step of two tenants, the rest is for what can not be foreseen
STEPS_IN_ROW = 8  # of the same rows before others have their turn: states of some models are copied when the rows change


class StepShares:
    """Chooses the rows of a decode step, and the time of a prompt slice beside it, so that no tenant slows others much."""

    def __init__(self, row_cost: float) -> None:
        self.row_cost = row_cost  # of one more row, in steps of one row; 0: rows cost nothing
        self._turn = 0
        self._last_turn: dict[Sequence, int] = {}  # in which a row was last chosen
        self._num_steps = 0

    def cost(self, num_rows: int) -> float:
        return 1 + self.row_cost * (num_rows - 1)

    def choose(self, ready: Rows[Sequence], running: Rows[Sequence], chunk: Sequence | None) -> tuple[Sequence, ...]:
        """Return those of the ready rows that step; all, unless several tenants run and one's rows would slow another's."""
        added = self.added_cost(running)
        if added is None:
            return tuple(ready)
        rows = Counter(one.tenant for one in ready)
        if chunk is not None and len({*rows, chunk.tenant}) > 1:
            added /= 2  # the other half is for the slice
        places = max(1 + int(added / self.row_cost + 1e-9), len(rows) * min(rows.values(), default=0))
        return tuple(ready) if len(ready) <= places else self._take_turns(ready, _divide(rows, places))

    def added_cost(self, running: Rows[Sequence]) -> float | None:
        """Return what may be added to the smallest tenant's step, in steps of one row; None: whatever there is."""
        rows = Counter(one.tenant for one in running)
        if len(rows) < 2 or not self.row_cost:
            return None
        smallest = self.cost(min(rows.values()))
        return smallest - 1 + SHARE * smallest * (len(rows) - 1)

    def _take_turns(self, ready: Rows[Sequence], places: dict[str, int]) -> tuple[Sequence, ...]:
        self._num_steps += 1
        if self._num_steps % STEPS_IN_ROW == 1:
            self._turn += 1
            self._last_turn = {one: self._last_turn[one] for one in ready if one in self._last_turn}
        # Those of this turn stay; then come those whose turn is longest ago.
        waiting = sorted(ready, key=lambda one: (last := self._last_turn.get(one, 0)) - self._turn * (last == self._turn))
        chosen: set[Sequence] = set()
        for one in waiting:
            if places[one.tenant]:
                places[one.tenant] -= 1
                self._last_turn[one] = self._turn
                chosen.add(one)
        return tuple(one for one in ready if one in chosen)


def _divide(rows: Counter[str], places: int) -> dict[str, int]:
    """Divide places among tenants equally; what one does not need goes to the others. Each has at least one."""
    given: dict[str, int] = {}
    for left, (tenant, count) in zip(range(len(rows), 0, -1), sorted(rows.items(), key=lambda item: item[1]), strict=True):
        given[tenant] = min(count, max(1, places // left))
        places = max(0, places - given[tenant])
    return given
