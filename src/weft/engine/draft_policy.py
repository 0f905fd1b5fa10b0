"""How many draft tokens each row verifies in the next step: as many as give the most tokens for the step's duration.

A step computes B rows of T tokens, T = 1 + the longest draft, and costs the same however short the other drafts are; where it is
*ragged*, as weft's own operations are, it costs as much as it has draft tokens. What it gives is estimated from the rates at
which each row's drafts were accepted. Estimates may be wrong, so all drafts are paid from one balance, counted in plain steps:
accepted tokens and a share of all tokens go in, the extra cost of drafts goes out. When it is overdrawn only forced tokens are
verified. So drafts can never cost more than that share, whatever they are. A source
that does not pay for a row pauses, longer each time, and is then tried again with one token.

Without the clock all this depends on counts alone, so that the same requests make the same steps.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from weft.engine.step_costs import USUAL_COSTS, CostTable, StepCosts

FORCED, HEAD = "forced", "mtp"  # sources: whose tokens are certain, and whose drafts take time to make
START_RATES = {"lookup": 0.6, "prediction": 0.8, HEAD: 0.8}
HEAD_FADING = 0.85  # of that, for each further place, until more is known: the head guesses on from its own guesses
ROW_WEIGHT, SHARED_WEIGHT = 0.05, 0.02  # of one token verified: for the row's rate, and for the rate new rows start with
TRIAL_WEIGHT = 0.3  # of a token verified on trial: what is known is old then
ALLOWANCE = 0.02  # share of the tokens emitted that drafts may cost in the long run
MAX_BALANCE = 8.0  # plain steps; drafts that were good for long may then lose so much
MIN_PAUSE, MAX_PAUSE = 16, 512  # tokens of the row
FEW_ROWS, CROWD_GAIN = 4, 1.05  # in larger batches drafts must promise so much: a turn's time there is not all that they cost
HEAD_GAIN_BY_CLOCK = 1.25  # the head's must there where steps are timed, on CPUs: all told they paid at no rate (docs/log.md)

Draft = tuple["RowDrafts", str, int]  # a row, the source of its draft, and the draft's length


@dataclass(slots=True)
class SourceRecord:
    """What one source's drafts were worth to one row."""

    rates: list[float]  # by place: how often a token is accepted when those before it are
    survival: list[float]  # by place: how often a token and those before it are accepted
    pause: int = 0  # tokens
    resume_at: int = 0  # after so many of the row's tokens


@dataclass(slots=True)
class RowDrafts:
    """What the policy remembers of one sequence."""

    num_emitted: int = 0
    records: dict[str, SourceRecord] = field(default_factory=dict)  # by source


class DraftPolicy:
    """Decides how many draft tokens to make and verify, from the rates of acceptance and the costs of steps."""

    def __init__(self, *, by_clock: bool, max_tokens: int = 7, table: CostTable = USUAL_COSTS, is_ragged: bool = False) -> None:
        self.max_tokens = max_tokens
        self.by_clock = by_clock
        self.is_ragged = is_ragged
        self._costs = StepCosts(max_tokens, table)
        self._rates: dict[str, list[float]] = {}  # of all rows, by source
        self._balance = MAX_BALANCE / 2
        self._num_rows = 1  # of the last decision

    def depth(self, row: RowDrafts, source: str, num_rows: int) -> int:
        """Return how many tokens a source should draft for a row if drafts of all rows are like it; 0: none, it does not pay."""
        self._num_rows = num_rows
        if self._needs_plain_step(num_rows):
            return 0
        costs = self._costs.of(num_rows, source == HEAD)
        return _best_count(self._survival(row, source, self.max_tokens, costs), costs)

    def depths(self, rows: Sequence[RowDrafts | None], source: str, num_rows: int) -> list[int]:
        """Return how many tokens a source should draft for each row when making drafts takes time; None: it can not draft."""
        drafts = [None if row is None else (row, source, self.max_tokens) for row in rows]
        return self._lengths(drafts, num_rows, with_head=source == HEAD)

    def pays(self, drafts: Sequence[Draft | None], num_rows: int) -> bool:
        """Whether a step with such drafts, none of the MTP head's, gives more for its time than a plain one."""
        return any(self._lengths(drafts, num_rows, with_head=False))

    def choose(self, drafts: Sequence[Draft | None], num_rows: int) -> list[int]:
        """Return how many tokens of each row's draft the next step verifies; all 0: a plain step gives more for its time."""
        with_head = any(draft is not None and draft[1] == HEAD for draft in drafts)
        unused = self._costs.of_unused_head(num_rows) if with_head else 1.0
        lengths = self._lengths(drafts, num_rows, with_head=with_head, plain=unused)
        if not self.by_clock:
            self._balance -= (self._costs.at(num_rows, with_head, self._drafted(lengths)) if any(lengths) else unused) - 1
        return lengths

    def note(self, row: RowDrafts, source: str, drafted: int, accepted: int) -> None:
        """Learn how many of a row's verified draft tokens were accepted."""
        if not drafted:
            return
        self._receive(accepted)
        if source != FORCED:
            record, costs = self._record(row, source), self._costs.of(self._num_rows, source == HEAD)
            weight = ROW_WEIGHT if _pays(record.survival, costs) else TRIAL_WEIGHT
            _learn(record.rates, weight, drafted, accepted)
            _learn(self._rates[source], SHARED_WEIGHT, drafted, accepted)
            record.survival = list(accumulate(record.rates, mul))
            self._set_pause(record, row.num_emitted, costs, accepted)

    def advance(self, row: RowDrafts, tokens: int) -> None:
        """Count tokens that a row emitted, in steps with drafts and plain ones."""
        row.num_emitted += tokens
        self._receive(tokens * ALLOWANCE)

    def measure(self, num_rows: int, drafted: float, seconds: float, with_head: bool = False) -> None:
        """Learn how long a step with so many draft tokens per row took, drafting with the head included."""
        if self.by_clock and seconds > 0:
            self._balance -= self._costs.measure(num_rows, drafted, seconds, with_head) - 1

    def cost(self, num_rows: int, tokens: int, with_head: bool = False) -> float:
        """Return the estimated duration of a step of `tokens` per row, in plain steps; at least 1."""
        return self._costs.of(num_rows, with_head)[tokens - 1]

    def _needs_plain_step(self, num_rows: int) -> bool:
        return self.by_clock and self._costs.needs_plain_step(num_rows)

    def _receive(self, tokens: float) -> None:
        self._balance = min(MAX_BALANCE, self._balance + tokens / self._num_rows)

    def _record(self, row: RowDrafts, source: str) -> SourceRecord:
        shared = self._rates.setdefault(source, _start_rates(source, self.max_tokens))
        if source not in row.records:
            row.records[source] = SourceRecord(list(shared), list(accumulate(shared, mul)))
        return row.records[source]

    def _drafted(self, lengths: Sequence[int]) -> float:
        """Return what counts of drafts of these lengths, by row: all their tokens, or the longest draft for every row."""
        return sum(lengths) / self._num_rows if self.is_ragged else max(lengths)

    def _lengths(self, drafts: Sequence[Draft | None], num_rows: int, *, with_head: bool, plain: float = 1.0) -> list[int]:
        """Return the length of each draft that gives the most tokens for its cost; `plain`: the cost of a step without any."""
        self._num_rows = num_rows
        if self._needs_plain_step(num_rows):
            return [0] * len(drafts)
        survivals = [
            self._survival(*draft, self._costs.of(num_rows, draft[1] == HEAD)) if draft is not None else [] for draft in drafts
        ]
        best, most = 0, self._wanted(num_rows, with_head) * num_rows / plain
        tokens, drafted = float(num_rows), 0
        for size in range(1, 1 + max(map(len, survivals), default=0)):
            gains = [survival[size - 1] for survival in survivals if len(survival) >= size]
            tokens, drafted = tokens + sum(gains), drafted + len(gains)
            cost = self._costs.at(num_rows, with_head, drafted / num_rows if self.is_ragged else size)
            if tokens > most * cost:
                best, most = size, tokens / cost
            elif best:
                break  # further tokens are less likely, and cost no less
        return [min(best, len(survival)) for survival in survivals]

    def _wanted(self, num_rows: int, with_head: bool) -> float:
        """Return how many times a plain step's tokens for its time a step with drafts must promise."""
        if num_rows <= FEW_ROWS:
            return 1.0
        return HEAD_GAIN_BY_CLOCK if with_head and self.by_clock else CROWD_GAIN

    def _survival(self, row: RowDrafts, source: str, length: int, costs: list[float]) -> list[float]:
        """Return the probability that each token of a draft will be emitted; of the tokens that may be verified only."""
        if source == FORCED:
            return [1.0] * min(length, self.max_tokens)
        if self._balance < 0:
            return []
        record = self._record(row, source)
        if _pays(record.survival, costs):
            return record.survival[: min(length, self._affordable(costs))]
        return [1.0][:length] if row.num_emitted >= record.resume_at else []  # on trial: given the benefit of the doubt

    def _affordable(self, costs: list[float]) -> int:
        """Return how many draft tokens the balance is enough for; for one at least."""
        return max(1, bisect_right(costs, 1 + self._balance) - 1)

    def _set_pause(self, record: SourceRecord, num_emitted: int, costs: list[float], accepted: int) -> None:
        if _pays(record.survival, costs):
            record.pause = 0
        elif accepted:
            record.pause //= 2
        else:
            record.pause = min(MAX_PAUSE, max(MIN_PAUSE, 2 * record.pause))
            record.resume_at = num_emitted + record.pause


def _start_rates(source: str, max_tokens: int) -> list[float]:
    """Return how often a source's tokens are expected to be accepted before any was verified, by place."""
    first, fading = START_RATES.get(source, START_RATES["lookup"]), HEAD_FADING if source == HEAD else 1.0
    return [first * fading**place for place in range(max_tokens)]


def _pays(survival: list[float], costs: Sequence[float]) -> bool:
    """Whether any number of draft tokens gives a row more than a plain step does."""
    tokens = 1.0
    for place, gain in enumerate(survival, 1):
        tokens += gain
        if tokens > costs[place]:
            return True
    return False


def _best_count(gains: Iterable[float], costs: Sequence[float]) -> int:
    """Return the number of draft tokens that gives a row the most tokens per cost; 0 if none gives more than a plain step."""
    tokens, best, most = 1.0, 0, 1.0 / costs[0]
    for count, gain in enumerate(gains, 1):
        tokens += gain
        if tokens > most * costs[count]:
            best, most = count, tokens / costs[count]
    return best


def _learn(rates: list[float], weight: float, drafted: int, accepted: int) -> None:
    for place in range(min(accepted + 1, drafted)):
        rates[place] += weight * ((place < accepted) - rates[place])
    if drafted == accepted < len(rates):  # a place that is not tried is expected to become as good as the one before
        rates[drafted] += weight * max(0.0, rates[drafted - 1] - rates[drafted])
