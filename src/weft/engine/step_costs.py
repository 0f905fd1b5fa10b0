"""What it costs to verify drafts: the duration of a step with k draft tokens per row over that of a plain step.

Costs differ with the number of rows, which is counted in size classes (1, 2, 3 – 4, 5 – 8 …), and are higher when the MTP
head made the drafts. They start as a fixed table; where steps are measured, they follow the clock. Where rows need not have
equally many tokens, k is their mean and may be a fraction. `draft_policy` uses them.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil

MAX_SURPRISE = 3.0  # times the expected cost; a step that takes longer was disturbed
MAX_CHARGE = 1.5  # times the cost by now: single steps take several times as long on a busy machine, with drafts or without
WEIGHT = 0.1  # of a new measurement
MAX_CHANGE = 0.25  # a measurement counts as at most so much above or below what was expected
SPREAD = 0.05  # how far a measurement moves the costs of other numbers of draft tokens along
FORGET = 0.002  # how far each plain step moves all costs back to the table: they are measured again some day
NUM_PLAIN = 4  # plain steps measured before drafts are verified, and again after PLAIN_EVERY steps with drafts
PLAIN_EVERY = 256


@dataclass(frozen=True)
class CostTable:
    """What drafts are expected to cost before any was measured, in plain steps of as many rows."""

    start: float  # of a step with drafts, however many: nothing overlaps with it
    base: float  # of a draft token, whatever the number of rows
    row: float  # of a draft token for each row; with `base` 1 at most
    head: float  # of a forward of the MTP head: one for each draft token

    def of(self, num_rows: int, max_tokens: int, *, with_head: bool) -> list[float]:
        """Return the costs of steps with 0, 1, … tokens in the longest draft."""
        line, head = min(1.0, self.base + self.row * num_rows), self.head if with_head else 0.0
        return [1 + self.start * (drafted > 0) + line * drafted + head * max(1, drafted) for drafted in range(max_tokens + 1)]


USUAL_COSTS = CostTable(start=0.0, base=0.075, row=0.025, head=0.2)
# With weft's own operations a plain step has little but products left, which cost the same for a draft token as for a row.
CPU_COSTS = CostTable(start=0.12, base=0.0, row=0.15, head=0.11)


class StepCosts:
    """Costs of steps with drafts by size class, in plain steps of as many rows; a plain step costs 1."""

    def __init__(self, max_tokens: int, table: CostTable = USUAL_COSTS) -> None:
        self.max_tokens = max_tokens
        self.table = table
        self._classes: dict[int, _SizeClass] = {}

    def _class_of(self, num_rows: int) -> "_SizeClass":
        number = (num_rows - 1).bit_length()
        if number not in self._classes:
            tables = (self.table.of(1 << number, self.max_tokens, with_head=with_head) for with_head in (False, True))
            self._classes[number] = _SizeClass([_Curve(table) for table in tables])
        return self._classes[number]

    def of(self, num_rows: int, with_head: bool) -> list[float]:
        """Return the costs of steps with 0, 1, … tokens in the longest draft; they begin with 1 and never fall."""
        return self._class_of(num_rows).curves[with_head].rising

    def at(self, num_rows: int, with_head: bool, drafted: float) -> float:
        """Return the cost of a step with so many draft tokens per row; between whole numbers it is interpolated."""
        costs = self.of(num_rows, with_head)
        below = min(int(drafted), len(costs) - 2)
        return costs[below] + (drafted - below) * (costs[below + 1] - costs[below])

    def of_unused_head(self, num_rows: int) -> float:
        """Return the cost of a step that verifies nothing although the head has drafted."""
        return max(1.0, self._class_of(num_rows).curves[True].costs[0])

    def needs_plain_step(self, num_rows: int) -> bool:
        """Whether a plain step must be measured first, for steps with drafts to be compared with."""
        return len(self._class_of(num_rows).samples) < NUM_PLAIN

    def measure(self, num_rows: int, drafted: float, seconds: float, with_head: bool) -> float:
        """Take the duration of a step with so many draft tokens per row into account; returns its charge, at least 1."""
        size = self._class_of(num_rows)
        if drafted or with_head:
            return size.measure(size.curves[with_head], min(drafted, self.max_tokens), seconds)
        size.measure_plain(seconds)
        return 1.0


@dataclass
class _SizeClass:
    curves: "list[_Curve]"  # of drafts without and with the head
    plain_seconds: float = 0.0
    samples: list[float] = field(default_factory=list)  # the first plain steps since plain steps were asked for
    num_drafted: int = 0  # steps with drafts since then

    def measure_plain(self, seconds: float) -> None:
        if len(self.samples) < NUM_PLAIN:
            self.samples.append(seconds)
            self.plain_seconds = min(self.samples)  # the first ones find cold caches
        else:
            self.plain_seconds = _moved(self.plain_seconds, seconds)
        for curve in self.curves:
            curve.pull(1.0, FORGET)

    def measure(self, curve: "_Curve", drafted: float, seconds: float) -> float:
        place = ceil(drafted)  # what a step between two numbers of tokens added counts for the larger one, in proportion
        share = drafted / place if place else 1.0
        expected = 1 + share * (curve.costs[place] - 1)
        if not self.plain_seconds:
            return expected
        cost = max(1.0, min(seconds / self.plain_seconds, MAX_SURPRISE * expected))
        curve.costs[place] = _moved(curve.costs[place], 1 + (cost - 1) / share)
        curve.pull(curve.costs[place] / curve.table[place], SPREAD)
        self.num_drafted += 1
        if self.num_drafted == PLAIN_EVERY:
            self.num_drafted = 0
            self.samples.clear()
        return max(1.0, min(cost, MAX_CHARGE * (1 + share * (curve.costs[place] - 1))))


class _Curve:
    """Costs by number of draft tokens: as the table has them, as they were measured, and those made to rise from 1."""

    def __init__(self, table: list[float]) -> None:
        self.table = table
        self.costs = list(table)
        self.pull(1.0, 0.0)

    def pull(self, factor: float, weight: float) -> None:
        """Move all costs towards `factor` times the table's."""
        pairs = zip(self.costs, self.table, strict=True)
        self.costs = [cost + weight * (factor * default - cost) for cost, default in pairs]
        self.rising = list(accumulate(self.costs[1:], max, initial=1.0))


def _moved(mean: float, sample: float) -> float:
    return mean + WEIGHT * max(-MAX_CHANGE * mean, min(sample - mean, MAX_CHANGE * mean))
