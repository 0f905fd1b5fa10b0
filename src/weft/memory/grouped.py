"""Caches that mlx-lm models see in a forward of several prompts' chunks: every row's own cache, behind the interface of one.

Matrix products take the lines of all rows together. Attention reads each row's own keys under that row's own mask, as it does
alone, and recurrent layers take the rows' states side by side. So where a product's lines are independent of each other, a
prompt has the numbers it has alone. All rows have as many new tokens, except those of `RaggedRows` and of `PromptLines`.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from weft.errors import InternalError


@dataclass(frozen=True)
class RowArrays:
    """Stand-in for the keys or values of several rows: each row's own, (1, heads, tokens, dim); only the seam reads them."""

    arrays: list[mx.array]


@dataclass(frozen=True)
class RowMasks:
    """Each row's own attention mask, as its cache makes it."""

    masks: list[Any]


class RaggedRows(ABC):
    """One layer's caches of rows that have any numbers of new tokens: their lines (1, lines, H) lie one behind the other.

    A layer that is handed them lets them compute it (`kernels/cuda_prompts.py`).
    """

    @abstractmethod
    def forward(self, layer: Any, x: mx.array) -> mx.array:
        """Compute a decoder layer over all rows' lines, and keep each row's states in its own cache."""


class PromptLines:
    """The lines of a forward on a CPU: the tokens of several rows' chunks, of any lengths, one chunk behind the other."""

    def __init__(self, chunks: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        self.counts = tuple(map(len, chunks))
        self.bounds = [0, *itertools.accumulate(self.counts)]  # chunk i has the lines from bounds[i] to bounds[i + 1]
        self.tokens = mx.array([[token for chunk in chunks for token in chunk]], mx.int32)  # (1, lines)
        spans = zip(starts, self.counts, strict=True)
        self.positions = mx.array([start + place for start, count in spans for place in range(count)], mx.int32)


class LineCaches:
    """The caches of one layer of rows whose lines lie one behind the other."""

    def __init__(self, lines: PromptLines, rows: Sequence[Any]) -> None:
        self.lines = lines
        self.rows = rows


class LineKeyValues(LineCaches):
    """The KV caches of one attention layer (`kernels/blocks.py`)."""

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> None:  # noqa: ARG002
        """Return None: attention knows which tokens each line may read, all those before it in its row."""
        if window_size is not None:
            raise InternalError("this layer reads a window of its tokens, and lines of several prompts read all of them")


class LineStates(LineCaches):
    """The caches of one gated delta layer (`kernels/delta_blocks.py`)."""

    def make_mask(self, _: int) -> None:
        """Return None: no row is padded."""


class GroupedKeyValues:
    """The KV caches of one attention layer of several rows; implements mlx-lm's cache API."""

    def __init__(self, rows: Sequence[Any], offset: int | mx.array) -> None:
        self.rows = rows
        self.offset = offset  # where each row's new tokens begin, (B,), or one number if all begin there

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowArrays, RowArrays]:
        """Append each row's new keys and values to its cache; returns handles of what each row may read."""
        found = [row.update_and_fetch(keys[at : at + 1], values[at : at + 1]) for at, row in enumerate(self.rows)]
        return RowArrays([own for own, _ in found]), RowArrays([own for _, own in found])

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> RowMasks:
        """Return the rows' masks for n new tokens."""
        if return_array:
            raise InternalError("this model wants its mask as an array, and rows have one each")
        return RowMasks([row.make_mask(n, return_array=False, window_size=window_size) for row in self.rows])


class GroupedStates:
    """The caches of one recurrent layer of several rows: `view[i]` is a batched state (B, …), read and replaced whole."""

    lengths = None
    left_padding = None

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> mx.array | None:
        states = [row[index] for row in self.rows]
        if all(state is None for state in states):
            return None
        if any(state is None for state in states):
            raise InternalError("rows with and without states can not be computed together")
        return mx.concatenate(states)

    def __setitem__(self, index: int, value: mx.array) -> None:
        for at, row in enumerate(self.rows):
            row[index] = value[at : at + 1]

    def advance(self, n: int) -> None:
        """Tell each row's cache that n tokens were computed."""
        for row in self.rows:
            row.advance(n)

    def make_mask(self, n: int) -> None:
        """Return None: no row is padded."""


def attend_each(
    attend: Callable[..., mx.array],
    queries: mx.array,
    keys: RowArrays,
    values: RowArrays,
    mask: RowMasks | None,
    rows: Sequence[Any],
) -> mx.array:
    """Compute attention row by row with `attend(queries, keys, values, cache, mask)`: (B, heads, T, dim) → (B, heads, T, dim)."""
    if not (mask is None or isinstance(mask, RowMasks)):
        raise InternalError("this model makes its own mask, which rows of different lengths can not share")
    masks = [None] * len(rows) if mask is None else mask.masks
    lines = zip(keys.arrays, values.arrays, rows, masks, strict=True)
    return mx.concatenate([attend(queries[at : at + 1], *line) for at, line in enumerate(lines)])
