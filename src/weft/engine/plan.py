"""The scheduler's decision for one step, frozen: who runs, from where, how many tokens. The runner only obeys."""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.sequence import Sequence


@dataclass(frozen=True)
class Row:
    """One sequence's part of a step: its tokens `start` to `start + count`."""

    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True)
class Plan:
    """`steps` each give one token; `chunk` is prompt work that gives none, at most `slice_seconds` of it now."""

    steps: tuple[Row, ...]
    chunk: Row | None
    slice_seconds: float | None  # None: nobody waits, do all of it
    upcoming: tuple[int, ...] = ()  # prompt lengths of the sequences that will join the steps next

    @property
    def begins_with_chunk(self) -> bool:
        """Whether the chunk is so short that the steps wait for it: its row may be in them then."""
        return bool(self.steps) and self.chunk is not None and self.slice_seconds is None

    def __bool__(self) -> bool:
        return bool(self.steps) or self.chunk is not None
