"""Sequences for tests that need no engine."""

from __future__ import annotations

from typing import Any

from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit


def sequence_of(prompt: list[int], max_tokens: int = 1000, number: int = 0, client: str = "", **sampling: Any) -> Sequence:
    """A greedy sequence that nothing has been computed of yet."""
    request = Submit((number,), prompt, (Sampling(**{"temperature": 0.0, **sampling}),), client=client)
    return Sequence(request, 0, max_tokens, frozenset(), now=0.0)
