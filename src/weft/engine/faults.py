"""Points at which a test can break the engine. In production no rule is set and every call does nothing.

A rule names a token and strikes where a sequence with that token in its prompt takes part. Rules come as JSON in the
environment of the engine's process; only tests set it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Literal

import msgspec

from weft.engine.sequence import Sequence
from weft.errors import WeftError

VARIABLE = "WEFT_TEST_FAULTS"

Point = Literal["prefill", "decode", "mask", "accept", "sampler", "logprobs", "snapshot", "restore", "logits", "turn"]
Deed = Literal["raise", "kill", "hang", "slow"]


class InjectedFault(WeftError):
    """Raised at a point where a rule strikes."""


class Rule(msgspec.Struct):
    """Strike at a point when a marked sequence is there and has emitted so many tokens; at most `times` times."""

    point: Point
    token: int
    do: Deed = "raise"
    after: int = 0
    times: int = -1  # without end

    def strikes(self, sequence: Sequence) -> bool:
        """Whether the rule applies to this sequence now."""
        return self.times != 0 and self.token in sequence.prompt and len(sequence.output) >= self.after


class Faults:
    """The rules in force; none in production."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = list(rules)

    @classmethod
    def of_environment(cls) -> Faults:
        """The rules of this process's environment."""
        return cls(msgspec.json.decode(os.environ.get(VARIABLE, "[]"), type=list[Rule]))

    def at(self, point: Point, *sequences: Sequence) -> None:
        """Do what a rule says for the first sequence it applies to: raise InjectedFault, hang, slow down or kill."""
        for rule in self.rules:
            struck = next((one for one in sequences if rule.point == point and rule.strikes(one)), None)
            if struck is not None:
                rule.times -= rule.times > 0
                _do(rule.do, f"a test broke {point} of sequence {struck.id}")

    def struck(self, point: Point, sequences: Iterable[Sequence]) -> list[int]:
        """The indices of the sequences a rule applies to, for faults that are no exceptions."""
        rules = [rule for rule in self.rules if rule.point == point]
        return [place for place, one in enumerate(sequences) if any(rule.strikes(one) for rule in rules)] if rules else []


def _do(deed: Deed, message: str) -> None:
    match deed:
        case "raise":
            raise InjectedFault(message)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(3600)
        case "slow":
            time.sleep(0.5)
