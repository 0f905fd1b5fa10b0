"""Fault injection for tests: points in the engine where a rule can raise, kill, hang or slow; no-ops in production.

A rule applies to sequences with a certain token in the prompt. Rules come from the environment variable WEFT_TEST_FAULTS.
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

Point = Literal[
    "prefill",
    "decode",
    "mask",
    "accept",
    "sampler",
    "logprobs",
    "snapshot",
    "restore",
    "logits",
    "turn",
    "draft",
    "guess",
    "encode",
]


class InjectedFault(WeftError):
    """The exception that a fault-injection rule raises where it applies."""


class Rule(msgspec.Struct):
    """A fault injected at a point for sequences with `token` in the prompt, after `after` output tokens, up to `times` times."""

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
    """The fault-injection rules in force; empty in production."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = list(rules)

    @classmethod
    def of_environment(cls) -> Self:
        return cls(msgspec.json.decode(os.environ.get(VARIABLE, "[]"), type=list[Rule]))

    def at(self, point: Point, *sequences: Sequence) -> None:
        """Trigger each rule for this point that applies to one of these sequences: raise, kill the process, hang or sleep."""
        for rule in self.rules:
            struck = next((one for one in sequences if rule.point == point and rule.applies_to(one)), None)
            if struck is not None:
                rule.strike(f"a test broke {point} of sequence {struck.id}")

    def struck(self, point: Point, sequences: Iterable[Sequence]) -> list[int]:
        """Return the indices of sequences that a rule for this point applies to; nothing is raised, the caller injects."""
        rules = [rule for rule in self.rules if rule.point == point]
        return [index for index, one in enumerate(sequences) if any(rule.applies_to(one) for rule in rules)]
