"""Cache objects that a fused step and other layers see in a decode step over pages and slots (`memory/pages.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from weft.errors import InternalError
from weft.memory import views
from weft.memory.pages import PagedPool
from weft.memory.slabs import Pool, RowState
from weft.memory.spec import KeyValues, difference
from weft.memory.views import Batch, StepSpan


class PagedBatch(Batch):
    """The rows of one decode forward over pages and slots, in the order in which they were given."""

    def __init__(self, pool: PagedPool, rows: list[RowState | None], span: StepSpan) -> None:
        self.paged_pool = pool
        self.specs = pool.specs
        self.parts = []
        self.rows = rows
        self.seam = True
        self.step_table = pool.place(rows, span)
        self._kept: dict[int, mx.array] = {}  # by layer: states after each line
        self._begin(span.tokens, pool.state_table())

    @cached_property
    def offsets(self) -> mx.array:
        """The positions (B,) of first new tokens."""
        return self.step_table.rows[:, 2]

    def keep_by_token(self, layer: int, states: mx.array) -> None:
        """Note the states after each line of a layer in slots, whose slots have those after the last."""
        self._kept[layer] = states

    def keep(self, counts: list[int]) -> None:
        """Let the first `counts` tokens of each row count, and give up the others."""
        super().keep(counts)
        if self._kept and any(count < self.tokens for count in counts):
            self.paged_pool.keep_states(self._kept, self.step_table, counts)
        self._kept = {}


class PagedView:
    """The KV cache of one attention layer in one decode step, in pages; implements mlx-lm's cache API for layers of their own."""

    def __init__(self, batch: PagedBatch, layer: int) -> None:
        self.batch = batch
        self.layer = layer

    @property
    def offset(self) -> mx.array:
        """The positions (B,) of first new tokens; the same before and after the update."""
        return self.batch.offsets

    @property
    def held(self) -> KeyValues:
        return self.batch.paged_pool.pages[self.layer]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Put the new tokens' keys and values into their pages; returns handles for weft's attention."""
        pool, batch = self.batch.paged_pool, self.batch
        spec = pool.paged[self.layer]
        for side, array, plane in (("keys", keys, spec.keys), ("values", values, spec.values)):
            if array.shape != (shape := plane.shape_of(batch.tokens, len(batch.rows))):
                raise InternalError(f"layer {self.layer}: {side} of a step are {difference(array, shape, array.dtype)}")
        given = keys.astype(spec.keys.dtype), values.astype(spec.values.dtype)
        done = pool.written[self.layer] = pool.kernels.place_tokens(*given, self.held, batch.step_table)
        return PagedHandle(self, done), PagedHandle(self, done)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Return None: attention over pages needs no mask. Raises InternalError for a layer that wants another one."""
        if n != self.batch.tokens or return_array or window_size is not None:
            raise InternalError("this layer wants a mask, which attention over pages does not take")


@dataclass(frozen=True)
class PagedHandle:
    """Stand-in for keys or values that stay in their pages; `done` is there when the newest are."""

    view: PagedView
    done: mx.array


class SlottedView:
    """The cache of one recurrent layer in one decode step, in slots, which only the fused layers of a step can read."""

    def __init__(self, batch: PagedBatch, layer: int) -> None:
        self.batch = batch
        self.layer = layer

    @property
    def held(self) -> tuple[mx.array, mx.array]:
        return self.batch.paged_pool.slots[self.layer]


AnyPool = Pool | PagedPool


def make_room(pool: AnyPool, row: RowState, tokens: int, *, seam: bool) -> None:
    """Make room for more tokens of a row; where it has to move for that, batches that were made before are of no use."""
    if isinstance(pool, PagedPool):
        pool.grow(row, tokens)
    else:
        views.make_room(pool, row, tokens, seam=seam)


def make_batches(
    pool: AnyPool, rows: Sequence[RowState], *, seam: bool, width: int | None, span: StepSpan = views.ONE_TOKEN
) -> list[Batch]:
    """Grow full rows, then group the rows of a decode step into batches: one, or without slab attention one per slab."""
    if not isinstance(pool, PagedPool):
        return views.make_batches(pool, rows, seam=seam, width=width, span=span)
    for row in rows:
        pool.grow(row, span.first_of(row) + span.tokens - row.length)
    return [PagedBatch(pool, [*rows, *[None] * ((width or 0) - len(rows))], span)]
