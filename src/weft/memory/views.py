"""Cache objects that mlx-lm models see in a batched decode step: views of slabs and state tables with mlx-lm's cache API.

A step runs in one of three ways; all give the same tokens. Through the *seam* all rows share one forward: the model's
`scaled_dot_product_attention` is bound to ours (`kernels/attention.py`), views hand it a `SlabHandle` in place of arrays, and
keys and values never leave their slabs. The *plain* way is one forward per slab: the model reads that slab's arrays under a
length mask. Rows that step *alone* use mlx-lm's own caches and nothing of this file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from weft.errors import InternalError
from weft.memory.slabs import Pool, RowState, Slab
from weft.memory.spec import FullAttention, Recurrent, SlidingWindow, difference, part_mismatch

FORBIDDEN = -1e30  # added to a score; finite, so that even a row that may look nowhere stays a number


class Part:
    """One slab's rows in a decode step, with slots in [low, high); for slab attention they are batch rows from `start` on."""

    def __init__(self, slab: Slab, rows: list[RowState], start: int, *, is_whole: bool) -> None:
        self.slab = slab
        self.rows = rows  # by slot
        self.start = start
        self.low, self.high = (0, len(slab.rows)) if is_whole else (rows[0].slot, rows[-1].slot + 1)
        self.longest = max(row.length for row in rows) + 1  # tokens of its longest row, the new one included
        self.span = slab.capacity if is_whole else self.longest  # token places that are read
        self.slots = mx.array([row.slot for row in rows], mx.int32)  # (n,) slot of each row
        self.lengths = mx.array([row.length for row in rows], mx.int32)  # (n,) tokens each row holds before this step
        self.spread: mx.array | None = None  # slot of the range → row of the part, when slots lie empty between
        self.gather: mx.array | None = None  # row of the part → slot of the range
        if self.high - self.low != len(rows):
            order = {row.slot: index for index, row in enumerate(rows)}
            self.spread = mx.array([order.get(slot, 0) for slot in range(self.low, self.high)], mx.int32)
            self.gather = mx.array([row.slot - self.low for row in rows], mx.int32)


class Batch:
    """The rows of one decode forward, grouped by slab, and values all layers share; built for one step and then dropped."""

    def __init__(self, pool: Pool, parts: list[Part], rows: list[RowState | None], *, seam: bool) -> None:
        self.pool = pool
        self.parts = parts
        self.rows = rows  # None: an idle row that fills the width
        self.seam = seam
        self.offsets = mx.array([0 if row is None else row.length for row in rows], mx.int32)  # (B,) of each row's new token
        self.table = pool.table_for(None if seam else parts[0].slab)
        self.table.arrange(rows)
        self._memo: dict[tuple[Any, ...], Any] = {}

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return this step's memoised value for `key`, calling `make` only the first time, so that layers share it."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]


def as_bias(mask: mx.array | None) -> mx.array | None:
    """Convert a boolean mask to numbers to add to attention scores (0 or −1e30); other masks and None stay as they are."""
    return mask if mask is None or mask.dtype != mx.bool_ else mx.where(mask, 0.0, FORBIDDEN)


@dataclass(eq=False)
class Reach:
    """Which token places a part's rows may attend to, in layers with this ring size and attention window (None: without)."""

    part: Part
    ring: int | None
    window: int | None

    @cached_property
    def mask(self) -> mx.array | None:
        """Boolean mask (rows or slot range, 1, 1, span), True where a row may attend; None if every place is allowed."""
        part, ring = self.part, self.ring
        span = part.span if ring is None else min(part.span, ring)
        if self.window is None and part.spread is None and min(row.length for row in part.rows) + 1 >= span:
            return None
        lengths, place = part.lengths[:, None], mx.arange(span)[None]
        # In a ring, place i holds the newest token whose position is i modulo the ring's size.
        position = place if ring is None else lengths - (lengths - place) % ring
        allowed = (position >= 0) & (position <= lengths)
        if self.window is not None:
            allowed = allowed & (position > lengths - self.window)
        return (allowed if part.spread is None else allowed[part.spread])[:, None, None, :]

    @cached_property
    def bias(self) -> mx.array | None:
        return as_bias(self.mask)

    @cached_property
    def bounds(self) -> mx.array | None:
        """Each row's half-open range of places it may attend to, flattened to (2n,); None if the places are not contiguous."""
        if self.ring is not None and self.window is not None:
            return None
        stops = [row.length + 1 if self.ring is None else min(row.length + 1, self.ring) for row in self.part.rows]
        starts = [0 if self.window is None else max(0, stop - self.window) for stop in stops]
        return mx.array([bound for pair in zip(starts, stops, strict=True) for bound in pair], mx.int32)


def make_batches(pool: Pool, rows: Sequence[RowState], *, seam: bool, width: int | None) -> list[Batch]:
    """Grow full rows, then group the rows of a decode step into batches: one with slab attention (seam), or one per slab."""
    # With a `width` shapes are constant: whole slabs are read, and idle rows fill the batch of the seam.
    for row in rows:
        pool.grow(row, table=None if seam or row.slab is None else pool.table_for(row.slab))
    parts: list[Part] = []
    for slab in pool.slabs:
        if live := [row for row in slab.occupied if row in rows]:
            start = sum(len(part.rows) for part in parts) if seam else 0
            parts.append(Part(slab, live, start, is_whole=width is not None))
    if not seam:
        ranges = [[row if row in part.rows else None for row in part.slab.rows[part.low : part.high]] for part in parts]
        return [Batch(pool, [part], rows, seam=False) for part, rows in zip(parts, ranges, strict=True)]
    batch_rows: list[RowState | None] = [row for part in parts for row in part.rows]
    return [Batch(pool, parts, batch_rows + [None] * ((width or 0) - len(batch_rows)), seam=True)]


@dataclass(frozen=True)
class StepMask:
    """Mask of a step with slab attention (the seam): only the attention window, because the view knows the row lengths."""

    window: int | None


class KeyValueView:
    """The KV cache of one attention layer in one decode step, stored in slabs; implements mlx-lm's cache API."""

    def __init__(self, batch: Batch, layer: int) -> None:
        spec = batch.pool.specs[layer]
        assert isinstance(spec, FullAttention)
        self.batch = batch
        self.layer = layer
        self.spec: FullAttention = spec
        self.offset = batch.offsets  # the same before and after the update

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append one token's keys and values per row; returns handles for slab attention (seam), else one slab's arrays."""
        for side, array, plane in (("keys", keys, self.spec.keys), ("values", values, self.spec.values)):
            # Only the shape: a slab converts numbers of another dtype, as mlx-lm's own caches do.
            if array.shape != (shape := plane.shape_of(1, len(self.batch.rows))):
                raise InternalError(f"layer {self.layer}: {side} of a step are {difference(array, shape, array.dtype)}")
        for part in self.batch.parts:
            for target, new in zip(self.planes(part), (keys, values), strict=True):
                self._append(part, target, self.rows_of(part, new))
        return self.keys_and_values()

    def _append(self, part: Part, target: mx.array, new: mx.array) -> None:
        _, heads, places, _ = target.shape
        if len(part.rows) == 1:
            slot, place = part.rows[0].slot, part.rows[0].length % places
            target[slot : slot + 1, :, place : place + 1] = new
            return

        def indices() -> tuple[mx.array, mx.array, mx.array]:
            return part.slots[:, None, None], mx.arange(heads)[None, :, None], (part.lengths % places)[:, None, None]

        target[self.batch.once(("indices", part.start, heads, places), indices)] = new

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what attention reads: SlabHandles where weft's attention reads the slabs itself, else the one slab's arrays."""
        return (SlabHandle(self), SlabHandle(self)) if self.batch.seam else self.read(self.batch.parts[0])

    def rows_of(self, part: Part, array: mx.array) -> mx.array:
        """Select a part's rows from a batch array: a slice with slab attention (seam), else a gather that skips idle slots."""
        if not self.batch.seam:
            return array if part.gather is None else array[part.gather]
        num_rows = len(part.rows)
        return array if num_rows == array.shape[0] else array[part.start : part.start + num_rows]

    def reach(self, part: Part, window: int | None) -> Reach:
        """Return which places a part's rows may attend to in this layer with this window; shared by layers of one kind."""
        ring = self.spec.window if isinstance(self.spec, SlidingWindow) and part.slab.capacity >= self.spec.window else None
        window = None if ring is not None and window is not None and window >= ring else window
        found: Reach = self.batch.once(("reach", part.start, ring, window), lambda: Reach(part, ring, window))
        return found

    def planes(self, part: Part) -> tuple[mx.array, mx.array]:
        """Return the key and value arrays of a part's whole slab, (slots, heads, places, dim) each."""
        held = part.slab.layers[self.layer]
        return held.keys, held.values

    def read(self, part: Part) -> tuple[mx.array, mx.array]:
        """Return keys and values of a part's slot range, cut to its span: (range, heads, span, dim) each."""
        keys, values = self.planes(part)
        if part.high - part.low == keys.shape[0] and part.span >= keys.shape[2]:
            return keys, values
        return keys[part.low : part.high, :, : part.span], values[part.low : part.high, :, : part.span]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return a decode step's attention mask, None if not needed; with slab attention (seam) a StepMask, else an array."""
        if n != 1:
            raise InternalError(f"a decode step has one token per row, not {n}")
        if not self.batch.seam:
            return self.reach(self.batch.parts[0], window_size).mask
        if return_array:
            raise InternalError("this model wants its mask as an array, which the seam does not give")
        is_ring = isinstance(self.spec, SlidingWindow) and window_size is not None and window_size >= self.spec.window
        return None if window_size is None or is_ring else StepMask(window_size)


@dataclass(frozen=True)
class SlabHandle:
    """Stand-in for keys or values that stay in their slabs; only weft's attention function (the seam) can read it."""

    view: KeyValueView


class StateView:
    """The cache of one recurrent layer in one decode step: `view[i]` is a batched state [B, …], read and replaced whole."""

    lengths = None
    left_padding = None

    def __init__(self, batch: Batch, layer: int) -> None:
        spec = batch.pool.specs[layer]
        assert isinstance(spec, Recurrent)
        self.layer = layer
        self.spec: Recurrent = spec
        self.states = batch.table.states[layer]
        self.num_rows = len(batch.rows)

    def __getitem__(self, index: int) -> mx.array | None:
        return self.states[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        if reason := part_mismatch(value, self.spec.parts[index], self.num_rows):
            raise InternalError(f"layer {self.layer}: state {index} became {reason}")
        self.states[index] = value

    def advance(self, n: int) -> None:
        """Do nothing (mlx-lm calls it after each step): rows' lengths are Python integers, nothing is counted on the device."""

    def make_mask(self, n: int) -> None:
        """Return None: no row of a step is padded."""
