"""A source of drafts that knows the right answers, and spoils them where a script says so."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np

from driver import Run
from weft.engine.draft_policy import DraftPolicy, RowDrafts
from weft.engine.runner import Step
from weft.engine.scheduler import Plan
from weft.engine.sequence import Sequence
from weft.engine.speculation import Draft

# What of the right tokens is proposed next: the tokens, how many drafts there were before, the most that may be given.
Script = Callable[[tuple[int, ...], int, int], tuple[int, ...]]


def always_right(right: tuple[int, ...], _: int, count: int) -> tuple[int, ...]:
    return right[:count]


def always_wrong(right: tuple[int, ...], _: int, count: int) -> tuple[int, ...]:
    return tuple(other(token) for token in right[:count])


def right_then_wrong(right: tuple[int, ...], number: int, count: int) -> tuple[int, ...]:
    """Drafts of every length in turn, of which a growing part is right."""
    size = 1 + number % count
    return tuple(token if place < number % (size + 1) else other(token) for place, token in enumerate(right[:size]))


def now_and_then(right: tuple[int, ...], number: int, count: int) -> tuple[int, ...]:
    """Nothing, one token, all of them: a step with drafts is followed by one without."""
    return right[: (0, 1, 0, 0, count)[number % 5]]


def too_much(right: tuple[int, ...], number: int, _: int) -> tuple[int, ...]:
    """More than is allowed, and ids that no token has."""
    return (*right[: number % 3], (-1, 10**6)[number % 2], *right) if number % 4 else right * 3


def at_random(seed: int) -> Script:
    chance = np.random.default_rng(seed)

    def script(right: tuple[int, ...], _: int, count: int) -> tuple[int, ...]:
        size = int(chance.integers(0, count + 1))
        return tuple(token if chance.random() < 0.7 else other(token) for token in right[:size])

    return script


def other(token: int) -> int:
    return token + 1 if token % 2 == 0 else token - 1


@dataclass
class ScriptedSource:
    """Proposes what each sequence will answer, by the number of its request, as its script says; no others have drafts."""

    answers: dict[int, list[int]]
    scripts: dict[int, Script]
    name: str = "lookup"
    num_drafts: dict[int, int] = field(default_factory=dict)  # by sequence

    def draft(self, sequence: Sequence, count: int) -> Draft | None:
        if sequence.id not in self.scripts:
            return None
        number = self.num_drafts.get(sequence.id, 0)
        self.num_drafts[sequence.id] = number + 1
        right = tuple(self.answers[sequence.id][sequence.num_output :])
        return Draft(self.name, self.scripts[sequence.id](right, number, count))


class EveryDraft(DraftPolicy):
    """A policy that verifies every draft as it is."""

    def __init__(self) -> None:
        super().__init__(by_clock=False)

    def depth(self, row: RowDrafts, source: str, num_rows: int) -> int:  # noqa: ARG002
        return self.max_tokens

    def pays(self, drafts: Rows[tuple[RowDrafts, str, int] | None], num_rows: int) -> bool:  # noqa: ARG002
        return bool(drafts)

    def choose(self, drafts: Rows[tuple[RowDrafts, str, int] | None], num_rows: int) -> list[int]:  # noqa: ARG002
        return [0 if draft is None else draft[2] for draft in drafts]


def add_drafts(run: Run, answers: Rows[list[int]], scripts: Rows[Script]) -> ScriptedSource:
    """Let the request number i have drafts by scripts[i], made of answers[i]; every draft is verified as it is."""
    source = ScriptedSource(dict(enumerate(answers)), dict(enumerate(scripts)))
    run.engine.speculation.sources = [source]
    run.engine.speculation.policy = EveryDraft()
    ask_four_rows(run)
    return source


def ask_four_rows(run: Run) -> None:
    """Let a crowd begin with five rows on every device, so that drafts of several rows are seen on a CPU too."""
    run.engine.speculation.few_rows = run.engine.runner.guesses.max_rows = 4


def note_plans(run: Run) -> list[Plan]:
    """Return a list to which the plan of every decode step from now on is added."""
    plans: list[Plan] = []
    forward = run.engine.runner.forward

    def noting(plan: Plan, last: Step | None) -> Step | None:
        if plan.steps:
            plans.append(plan)
        return forward(plan, last)

    run.engine.runner.forward = noting  # type: ignore[method-assign]
    return plans
