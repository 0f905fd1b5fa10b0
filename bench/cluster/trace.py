"""Traces of requests: read from Mooncake's format, copied to more load, or made up like it for tests.

The public traces are `FAST25-release/traces` of github.com/kvcache-ai/Mooncake (Apache-2.0): a JSON object a line, with
`timestamp` in milliseconds, `input_length`, `output_length`, and `hash_ids`, one for each 512 tokens of the prompt; equal
leading ids are a shared prefix. They are not part of this repository.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK_TOKENS = 512  # of one hash id


@dataclass(frozen=True)
class TracedRequest:
    """One request: when it comes, the lengths of prompt and answer in tokens, and its prompt's blocks."""

    at: float  # seconds
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...]
    client: str = ""
    block_tokens: int = BLOCK_TOKENS

    def prompt(self, grain: int) -> list[int]:
        """The prompt as token ids, each of which stands for `grain` tokens; equal blocks are equal tokens."""
        size = self.block_tokens // grain
        ids = [block * size + place for block in self.blocks for place in range(size)]
        return [one % 2**31 for one in ids[: max(2, self.num_prompt // grain)]]


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace, compressed or not, in the order of its times."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    found = [
        TracedRequest(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"])) for row in rows
    ]
    return sorted(found, key=lambda one: one.at)


def multiplied(trace: list[TracedRequest], copies: int) -> list[TracedRequest]:
    """Return a trace with so many times the load: copies shifted in time, with blocks of their own but the first."""
    most = max((max(one.blocks) for one in trace), default=0) + 1
    span = trace[-1].at - trace[0].at + 1.0
    found = list(trace)
    for copy in range(1, copies):
        shift = span * copy / copies
        for one in trace:
            blocks = tuple(block if place == 0 else block + copy * most for place, block in enumerate(one.blocks))
            found.append(replace(one, at=(one.at - trace[0].at + shift) % span, blocks=blocks))
    return sorted(found, key=lambda one: one.at)


def made_up(num_requests: int, seconds: float, seed: int = 1) -> list[TracedRequest]:
    """Return conversations like those of the public traces: a common first block, turns that repeat what was said before."""
    dice, blocks = random.Random(seed), iter(range(1, 10**9))
    conversations: list[list[int]] = []
    return [_turn(dice, conversations, blocks, seconds * place / num_requests) for place in range(num_requests)]


def _turn(dice: random.Random, conversations: list[list[int]], blocks: Iterator[int], at: float) -> TracedRequest:
    if not conversations or dice.random() < 0.4:
        conversations.append([0])
    told = dice.choice(conversations[-30:])
    told += [next(blocks) for _ in range(dice.randint(1, 12))]
    return TracedRequest(at, BLOCK_TOKENS * len(told) - dice.randrange(BLOCK_TOKENS), dice.randint(50, 600), tuple(told))
