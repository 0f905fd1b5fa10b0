"""The engine's memory budget: bytes for weights, running rows with their expected output, cached prefixes, and a reserve.

Bytes come from the layers' specs, or from two measured rows where layers are unreadable. A row is admitted when its prompt
and the answer it may be expected to give fit.
"""

import bisect
from collections.abc import Callable, Iterable

from weft.config import RESERVE_SHARE
from weft.engine.sequence import Sequence

EXPECTED_TOKENS = 256  # output tokens reserved ahead for each row, and again whenever it has used them up
SLACK = 1.3  # slabs have free slots and rounded capacities; while a row is copied into its slot it exists twice


class MemoryBudget:
    """Computes how many bytes rows need and whether they fit the memory budget; a budget of None is unlimited."""

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
        """Return the bytes to reserve for a sequence: its prompt, its output so far, and up to 256 expected tokens."""
        ahead = EXPECTED_TOKENS * (len(sequence.output) // EXPECTED_TOKENS + 1)
        return self.bytes_of(len(sequence.prompt) + min(ahead, sequence.max_tokens))

    def reserved(self, running: Iterable[Sequence]) -> int:
        return sum(map(self.needed, running)) if self.budget_bytes is not None else 0

    def fits(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether a sequence fits the memory budget beside the running rows; always True without a budget or running rows."""
        return self.room_bytes is None or not running or self.reserved([*running, sequence]) <= self.room_bytes

    def is_over(self, running: list[Sequence]) -> bool:
        return self.room_bytes is not None and self.reserved(running) > self.room_bytes

    def left_for_prefixes(self, running: Iterable[Sequence], wanted: int) -> int:
        """Return how many of the `wanted` bytes for cached prefixes running rows leave free; all of them without a budget."""
        return wanted if self.room_bytes is None else max(0, min(wanted, self.room_bytes - self.reserved(running)))

    def max_row_tokens(self, context_length: int) -> int:
        """Return the most tokens (prompt and output) that one row can ever hold within the budget and the context length."""
        if self.room_bytes is None:
            return context_length
        return max(0, bisect.bisect_right(range(context_length + 1), self.room_bytes, key=self.bytes_of) - 1)
