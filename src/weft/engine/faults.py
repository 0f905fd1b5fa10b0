"""Points at which a test can break the engine. In production no rule is set and every call does nothing.

A rule names a token and strikes where a sequence with that token in its prompt takes part. Rules come from the environment.
"""

import os
import signal
import time
from collections.abc import Iterable
from typing import Literal, Self

import msgspec

from weft.engine.sequence import Sequence
from weft.errors import WeftError

VARIABLE = "WEFT_TEST_FAULTS"

Point = Literal["prefill", "decode", "mask", "accept", "sampler", "logprobs", "snapshot", "restore", "logits", "turn"]


class InjectedFault(WeftError):
    """Raised at a point where a rule strikes."""


class Rule(msgspec.Struct):
    """Strikes at a point when a marked sequence is there and has emitted so many tokens; at most `times` times."""

    point: Point
    token: int
    do: Literal["raise", "kill", "hang", "slow"] = "raise"
    after: int = 0
    times: int = -1  # without end

    def applies_to(self, sequence: Sequence) -> bool:
        return self.times != 0 and self.token in sequence.prompt and len(sequence.output) >= self.after

    def strike(self, message: str) -> None:
        self.times -= self.times > 0
        match self.do:
            case "raise":
                raise InjectedFault(message)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "slow":
                time.sleep(0.25)


class Faults:
    """The rules in force; none in production."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = list(rules)

    @classmethod
    def of_environment(cls) -> Self:
        return cls(msgspec.json.decode(os.environ.get(VARIABLE, "[]"), type=list[Rule]))

    def at(self, point: Point, *sequences: Sequence) -> None:
        """Let each rule for this point strike the first of these sequences it applies to."""
        for rule in self.rules:
            struck = next((one for one in sequences if rule.point == point and rule.applies_to(one)), None)
            if struck is not None:
                rule.strike(f"a test broke {point} of sequence {struck.id}")

    def struck(self, point: Point, sequences: Iterable[Sequence]) -> list[int]:
        """The indices of the sequences that a rule applies to, for faults that are no exceptions."""
        rules = [rule for rule in self.rules if rule.point == point]
        return [index for index, one in enumerate(sequences) if any(rule.applies_to(one) for rule in rules)]
