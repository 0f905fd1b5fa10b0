"""One of a model's engines as its pool and dispatcher see it, and what is counted of those that have left."""

from dataclasses import dataclass, field

from weft.serving.lifeline import DraftTotals, Lifeline
from weft.serving.starters import Starter


class Replica(Lifeline):
    """One of a model's engines, as the dispatcher sees it."""

    def __init__(self, starter: Starter, hang_seconds: float) -> None:
        super().__init__(starter, hang_seconds)
        self.answer_seconds = 0.0
        self.num_prompt_tokens = 0  # of answers that have ended here
        self.num_cached_tokens = 0
        self.is_leaving = False  # takes nothing new
        self.is_retired = False  # the same, and there will be no other engine
        self.has_left = False  # what has not ended by now goes on elsewhere

    @property
    def max_rows(self) -> int:
        return self.condition.ready.max_rows if self.condition.ready is not None else 0

    @property
    def kind(self) -> str:
        ready = self.condition.ready
        return "" if ready is None else f"{ready.device} {ready.versions}"

    @property
    def is_open(self) -> bool:
        return self.client.send is not None and not self.condition.is_sick and not (self.is_leaving or self.is_retired)

    @property
    def is_gone(self) -> bool:
        return self.client.send is None or self.condition.is_lost

    @property
    def is_given_up(self) -> bool:
        return self.condition.failed is not None or self.has_left or self.is_away

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached


@dataclass(frozen=True)
class LeftTotals:
    """Counts of replicas that have left for good."""

    restarts: int = 0
    drafts: DraftTotals = field(default_factory=DraftTotals)

    def __add__(self, replica: Replica) -> "LeftTotals":
        return LeftTotals(self.restarts + replica.restarts, self.drafts + replica.drafts)
