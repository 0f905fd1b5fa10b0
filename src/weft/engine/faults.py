"""Places where a test may break the engine. In production nothing is armed and every call is empty.

A fault is armed by a token: it strikes where a sequence with that token in its prompt takes part. The rules come as JSON in
the environment of the engine's process, and only tests set that.
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
    """Raised where a test asked for it."""


class Rule(msgspec.Struct):
    """Strike at a point when a marked sequence is there and has given so many tokens; at most `times` times."""

    point: Point
    token: int
    do: Deed = "raise"
    after: int = 0
    times: int = -1  # without end

    def strikes(self, sequence: Sequence) -> bool:
        """Whether this one is meant, now."""
        return self.times != 0 and self.token in sequence.prompt and len(sequence.output) >= self.after


class Faults:
    """The rules that are armed; none in production."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = list(rules)

    @classmethod
    def of_environment(cls) -> Faults:
        """What the environment asks for."""
        return cls(msgspec.json.decode(os.environ.get(VARIABLE, "[]"), type=list[Rule]))

    def at(self, point: Point, *sequences: Sequence) -> None:
        """Raises InjectedFault, or does worse, where a rule says so."""
        for rule in self.rules:
            struck = next((one for one in sequences if rule.point == point and rule.strikes(one)), None)
            if struck is not None:
                rule.times -= rule.times > 0
                _do(rule.do, f"a test broke {point} of sequence {struck.id}")

    def struck(self, point: Point, sequences: Iterable[Sequence]) -> list[int]:
        """The places of those that a rule means, for faults that are no exceptions."""
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
