"""How much a decode step may do for some tenants while another waits for its tokens in the same step. Imports no mlx.

A step with more rows takes longer, and every row waits for all of it. So where rows have a price (on a CPU), the rows of a tenant
that has many step by turns while others have few, if that leaves everybody's tokens less slowed than the worst off were before.
A tenant that floods, with more requests waiting than running, waits for its own requests anyway: its rows step by turns until no
other tenant is slowed more than it may be. Prompt slices and drafts beside the step have what is left.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Rows

from weft.engine.row_costs import RowCosts
from weft.engine.sequence import Sequence

MAX_SHARE = 0.9  # of the time that equal tenants would have to wait for each other; the rest is for what can not be foreseen
MAX_SHARE_OF_FLOODS = 0.75  # of the same, where one of them floods


class StepShares:
    """Chooses the rows of a decode step, and how long it may take with all that runs beside it: no tenant slows others much."""

    def __init__(self, row_cost: float) -> None:
        self.costs = RowCosts(row_cost)
        self._num_steps = 0
        self._last_steps: dict[Sequence, int] = {}  # the step in which a row was last chosen

    def choose(self, ready: Rows[Sequence], running: Rows[Sequence], flooding: Set[str] = frozenset()) -> tuple[Sequence, ...]:
        """Return those of the ready rows that step; all, unless several tenants run and one's rows would slow another's."""
        rows = _count(ready)
        places = self._places(rows, self._limit(running, flooding), flooding)
        if places == rows:
            return tuple(ready)
        self._num_steps += 1
        self._last_steps = {one: self._last_steps[one] for one in ready if one in self._last_steps}
        chosen: set[Sequence] = set()
        for one in sorted(ready, key=lambda one: self._last_steps.get(one, 0)):  # whose turn is longest ago
            if places[one.tenant]:
                places[one.tenant] -= 1
                self._last_steps[one] = self._num_steps
                chosen.add(one)
        return tuple(one for one in ready if one in chosen)

    def room(
        self, steps: Rows[Sequence], running: Rows[Sequence], besides: str | None = None, flooding: Set[str] = frozenset()
    ) -> float | None:
        """Return how many times its own time a step may take with what runs beside it; None: any.

        `besides` is the tenant for whom that runs: what its own rows wait for is its own affair.
        """
        limit, rows = self._limit(running, flooding), _count(one for one in running if one.is_prefilled)
        stepping = _count(steps)
        others = [tenant for tenant in stepping if tenant != besides]
        if limit is None or not others:
            return None
        return max(1.0, limit / self._worst(_spared(others, flooding), rows, stepping))

    def is_shared(self, sequence: Sequence, stepping: Iterable[Sequence]) -> bool:
        """Whether what is computed for a sequence beside rows that step slows other tenants."""
        return bool(self.costs.assumed) and any(one.tenant != sequence.tenant for one in stepping)

    def _limit(self, running: Iterable[Sequence], flooding: Set[str]) -> float | None:
        """Return by how much a tenant's tokens may be slowed by the others'; None if there are none, or rows cost nothing.

        Rows of a flood come and go, which costs more than what they add to a step: they are left less of the time.
        """
        tenants = {one.tenant for one in running}
        share = MAX_SHARE_OF_FLOODS if tenants & flooding and tenants - flooding else MAX_SHARE
        return share * len(tenants) if len(tenants) > 1 and self.costs.assumed else None

    def _places(self, rows: Counter[str], limit: float | None, flooding: Set[str]) -> dict[str, int]:
        """Divide each tenant's rows into as few groups, which step by turns, as keep everybody's slowdown within the limit.

        Where none do, the worst slowdown is as small as it gets. The result is how many rows of each tenant step together.
        One that floods is divided first, and what slows it does not count: the limit leaves it its share of the time.
        """
        places = dict(rows)
        if limit is None or not rows:
            return places
        spared = _spared(rows, flooding)
        while (worst := self._worst(spared, rows, places)) > limit:
            smaller = {one: _smaller_group(rows[one], size) for one, size in places.items() if size > 1}
            tenant = min(
                [one for one in smaller if one not in spared] or smaller,
                key=lambda one: self._slowdown(one, rows, places | {one: smaller[one]}),
                default=None,
            )
            if tenant is None:
                break
            fewer = places | {tenant: smaller[tenant]}
            if self._worst(spared, rows, fewer) >= worst:
                break
            places = fewer
        return places

    def _worst(self, tenants: Iterable[str], rows: Mapping[str, int], places: Mapping[str, int]) -> float:
        return max(self._slowdown(tenant, rows, places) for tenant in tenants)

    def _slowdown(self, tenant: str, rows: Mapping[str, int], places: Mapping[str, int]) -> float:
        """Return how many times as long a tenant's rows wait for a token as they would alone."""
        turns = math.ceil(max(1, rows[tenant]) / places[tenant])
        return turns * self.costs.of(sum(places.values())) / self.costs.of(max(1, rows[tenant]))


def _count(sequences: Iterable[Sequence]) -> Counter[str]:
    return Counter(one.tenant for one in sequences)


def _spared(tenants: Iterable[str], flooding: Set[str]) -> list[str]:
    """Return the tenants that are not to be slowed: all that do not flood, or all if all do."""
    tenants = list(tenants)
    return [one for one in tenants if one not in flooding] or tenants


def _smaller_group(num_rows: int, size: int) -> int:
    """Return the next size below `size` of groups into which rows are divided evenly."""
    num_groups = math.ceil(num_rows / (size - 1))
    return math.ceil(num_rows / num_groups)
