"""The memory budget: weights, running rows with what they will need, cached prefixes, and a reserve for forwards.

All bytes are computed from the layers' specs; nothing is measured. A row is admitted when its prompt and the answer it may be
expected to give fit.
"""

import bisect
from collections.abc import Callable, Iterable

from weft.config import RESERVE_SHARE
from weft.engine.sequence import Sequence

EXPECTED_TOKENS = 256  # output tokens reserved ahead for each row, and again whenever it has used them up
SLACK = 1.3  # slabs have free slots and rounded capacities; while a row is copied into its slot it exists twice


class MemoryBudget:
    """How many bytes rows need and how many there are; a budget of None is unlimited."""

    def __init__(self, row_bytes: Callable[[int], int], weights_bytes: int, budget_bytes: int | None = None) -> None:
        self.row_bytes = row_bytes
        self.weights_bytes = weights_bytes
        self.budget_bytes = budget_bytes
        self.reserve_bytes = int((budget_bytes or 0) * RESERVE_SHARE)
        # For rows and cached prefixes.
        self.room_bytes = None if budget_bytes is None else max(0, budget_bytes - weights_bytes - self.reserve_bytes)

    def bytes_of(self, tokens: int) -> int:
        return int(self.row_bytes(tokens) * SLACK)

    def needed(self, sequence: Sequence) -> int:
        """The bytes reserved for a sequence: its prompt, its answer so far, and the next tokens it may emit."""
        ahead = EXPECTED_TOKENS * (len(sequence.output) // EXPECTED_TOKENS + 1)
        return self.bytes_of(len(sequence.prompt) + min(ahead, sequence.max_tokens))

    def reserved(self, running: Iterable[Sequence]) -> int:
        """The bytes reserved for these sequences together; 0 without a budget."""
        return sum(map(self.needed, running)) if self.budget_bytes is not None else 0

    def fits(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether one more row can be admitted. A lone one always can: what never fits was refused before."""
        return self.room_bytes is None or not running or self.reserved([*running, sequence]) <= self.room_bytes

    def is_over(self, running: list[Sequence]) -> bool:
        return self.room_bytes is not None and self.reserved(running) > self.room_bytes

    def left_for_prefixes(self, running: Iterable[Sequence], wanted: int) -> int:
        """Of the bytes wanted for cached prefixes, those that running rows leave free."""
        return wanted if self.room_bytes is None else max(0, min(wanted, self.room_bytes - self.reserved(running)))

    def max_row_tokens(self, context_length: int) -> int:
        """The longest row, prompt and answer, that can ever fit."""
        if self.room_bytes is None:
            return context_length
        return max(0, bisect.bisect_right(range(context_length + 1), self.room_bytes, key=self.bytes_of) - 1)
