"""One book of bytes: weights, the rows that run with what they will need, what is kept of prompts, and a reserve.

All of it is reckoned from the layers' specs, nothing is measured: a row is let in when its prompt and the answer it may be
expected to give fit. Imports no mlx; the engine asks before it admits and after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weft.config import RESERVE_SHARE
from weft.engine.sequence import Sequence

EXPECTED_TOKENS = 256  # of an answer are reserved ahead, and again whenever a row has used them up
SLACK = 1.3  # slabs have free slots and rounded capacities; a row that is seated stands twice for a moment


class MemoryBudget:
    """Owns the numbers; a budget of None is without end."""

    def __init__(self, row_bytes: Callable[[int], int], weights_bytes: int, budget_bytes: int | None = None) -> None:
        self.row_bytes = row_bytes
        self.weights_bytes = weights_bytes
        self.budget_bytes = budget_bytes

    @property
    def reserve_bytes(self) -> int:
        """Kept free for forwards."""
        return int((self.budget_bytes or 0) * RESERVE_SHARE)

    @property
    def room_bytes(self) -> int | None:
        """For rows and kept prompts; None: without end."""
        if self.budget_bytes is None:
            return None
        return max(0, self.budget_bytes - self.weights_bytes - self.reserve_bytes)

    def bytes_of(self, tokens: int) -> int:
        """What a row of so many tokens is reckoned with."""
        return int(self.row_bytes(tokens) * SLACK)

    def needed(self, sequence: Sequence) -> int:
        """What a row is reckoned with: what it has, and what it will need before it is looked at again."""
        ahead = EXPECTED_TOKENS * (len(sequence.output) // EXPECTED_TOKENS + 1)
        return self.bytes_of(len(sequence.prompt) + min(ahead, sequence.max_tokens))

    def reserved(self, running: Iterable[Sequence]) -> int:
        """What these rows are reckoned with."""
        return sum(map(self.needed, running)) if self.budget_bytes is not None else 0

    def fits(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether one more row can be let in. One alone always can: what never fits is refused before."""
        return self.room_bytes is None or not running or self.reserved([*running, sequence]) <= self.room_bytes

    def is_over(self, running: list[Sequence]) -> bool:
        """Whether the rows that run need more than there is."""
        return self.room_bytes is not None and self.reserved(running) > self.room_bytes

    def left_for_prefixes(self, running: Iterable[Sequence], wanted: int) -> int:
        """Of the bytes that kept prompts may have, what rows leave them."""
        return wanted if self.room_bytes is None else max(0, min(wanted, self.room_bytes - self.reserved(running)))

    def most_tokens(self, context_length: int) -> int:
        """The longest row that can ever fit, prompt and answer."""
        room = self.room_bytes
        if room is None or self.bytes_of(context_length) <= room:
            return context_length
        fitting, failing = 0, context_length
        while failing - fitting > 1:
            middle = (fitting + failing) // 2
            fitting, failing = (middle, failing) if self.bytes_of(middle) <= room else (fitting, middle)
        return fitting
