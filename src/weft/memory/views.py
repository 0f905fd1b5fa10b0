"""Cache objects that mlx-lm models see in a batched decode step: views of slabs and state tables with mlx-lm's cache API.

A step runs in one of three ways; all give the same tokens. Through the *seam* all rows share one forward: the model's
`scaled_dot_product_attention` is bound to ours (`kernels/attention.py`), views hand it a `SlabHandle` in place of arrays, and
keys and values never leave their slabs. The *plain* way is one forward per slab: the model reads that slab's arrays under a
length mask. Rows that step *alone* use mlx-lm's own caches and nothing of this file.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from weft.errors import InternalError
from weft.memory.positions import Noted, taking_notes
from weft.memory.slabs import Pool, RowState, Slab, StateTable
from weft.memory.spec import FullAttention, Recurrent, SlidingWindow, difference, part_mismatch
from weft.memory.transfer import to_device

FORBIDDEN = -1e30  # added to a score; finite, so that even a row that may look nowhere stays a number


class StepSpan(NamedTuple):
    """Which tokens of every row a step computes: so many, `ahead` of those that the row holds."""

    tokens: int = 1
    ahead: int = 0  # tokens between, which an earlier step has computed for some layers only
    is_unread: bool = False  # they begin where the row's MTP head has yet to read

    def first_of(self, row: RowState) -> int:
        """Return the position of the first of them in a row."""
        return row.length + self.ahead - (row.unread if self.is_unread else 0)


ONE_TOKEN = StepSpan()


class Part:
    """One slab's rows in a decode step, with slots in [low, high); for slab attention they are batch rows from `start` on."""

    def __init__(self, slab: Slab, rows: list[RowState], start: int, span: StepSpan, *, is_whole: bool) -> None:
        self.slab = slab
        self.rows = rows  # by slot
        self.start = start
        self.tokens = tokens = span.tokens  # new ones of every row
        self.first = [span.first_of(row) for row in rows]  # position of each row's first new token
        self.low, self.high = (0, len(slab.rows)) if is_whole else (rows[0].slot, rows[-1].slot + 1)
        self.longest = max(self.first) + tokens  # tokens of its longest row, the new ones included
        self.span = slab.capacity if is_whole else self.longest  # token places that are read
        ends = [end for first in self.first for token in range(1, tokens + 1) for end in (0, first + token)]
        # (n,) slot of each row; (n,) tokens each row holds before this step; (2nT,) places from and to which each token reads
        self.slots, self.lengths, self.bounds = to_device([row.slot for row in rows], self.first, ends)
        self.spread: mx.array | None = None  # slot of the range → row of the part, when slots lie empty between
        self.gather: mx.array | None = None  # row of the part → slot of the range
        if self.high - self.low != len(rows):
            order = {row.slot: index for index, row in enumerate(rows)}
            self.spread = mx.array([order.get(slot, 0) for slot in range(self.low, self.high)], mx.int32)
            self.gather = mx.array([row.slot - self.low for row in rows], mx.int32)


class Batch:
    """The rows of one decode forward, grouped by slab, and values all layers share; built for one step and then dropped.

    A step has T tokens for every row: one, or more where a row has tokens that are known or guessed. `keep` then says how
    many of each row's count.
    """

    def __init__(self, pool: Pool, parts: list[Part], rows: list[RowState | None], *, seam: bool) -> None:
        self.specs = pool.specs
        self.parts = parts
        self.rows = rows  # None: an idle row that fills the width
        self.seam = seam
        self._begin(parts[0].tokens, pool.table_for(None if seam else parts[0].slab))

    def _begin(self, tokens: int, table: StateTable) -> None:
        self.tokens = tokens
        self.table = table
        self.table.arrange(self.rows)
        self._memo: dict[tuple[Any, ...], Any] = {}
        self._replaced: list[tuple[int, int, mx.array]] = []  # states that the forward wrote, in order: layer, part, value
        self._by_token: list[tuple[int, int, Noted | None]] = []  # the same with what was noted of them
        self._left_open: list[
            tuple[int, int, Noted]
        ] = []  # states that are not replaced before it is known how many tokens count

    @cached_property
    def offsets(self) -> mx.array:
        """The positions (B,) of first new tokens, those `ahead` not counted."""
        held = [(row, first) for part in self.parts for row, first in zip(part.rows, part.first, strict=True)]
        if self.rows == [row for row, _ in held] and len(self.parts) == 1 and not any(row.shift for row, _ in held):
            return self.parts[0].lengths
        offsets = {row: first + row.shift for row, first in held}
        return to_device([0 if row is None else offsets[row] for row in self.rows])[0]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context manager around the building of this batch's forward: with T > 1 it notes the states after each token."""
        if self.tokens == 1:
            yield
            return
        with taking_notes(self.tokens) as notes:
            yield
        # At the end: some layers keep a convolution's input before they convolve it.
        self._by_token = [(layer, part, notes.of(value)) for layer, part, value in self._replaced]
        self._replaced = []

    def replace_state(self, layer: int, part: int, value: mx.array) -> None:
        self.table.states[layer][part] = value
        if self.tokens > 1:
            self._replaced.append((layer, part, value))

    def leave_open(self, layer: int, part: int, noted: Noted) -> None:
        """Let `keep` replace a state by what was noted of it, whichever of its tokens count."""
        self._left_open.append((layer, part, noted))

    def keep(self, counts: list[int]) -> None:
        """Let the first `counts` tokens of each row count (idle rows too), and give up the others.

        Raises InternalError where a layer has its state after the last token only, and not all rows keep all tokens.
        """
        for row, count in zip(self.rows, counts, strict=True):
            if row is not None:
                row.advance(count)
        if self.tokens == 1:
            return
        replaced = [] if all(count == self.tokens for count in counts) else self._by_token
        by_kind: dict[type[Noted], list[tuple[int, int, Noted]]] = {}
        for layer, part, noted in [*replaced, *self._left_open]:
            if noted is None:
                raise InternalError(f"layer {layer}: of state {part} only the one after the last token is known")
            by_kind.setdefault(type(noted), []).append((layer, part, noted))
        for kind, states in by_kind.items():
            found = kind.all_after([noted for _, _, noted in states], counts)
            for (layer, part, _), state in zip(states, found, strict=True):
                self.table.states[layer][part] = state

    @property
    def last_only(self) -> list[int]:
        """The layers of this forward whose state is known after the last token only."""
        return sorted({layer for layer, _, noted in self._by_token if noted is None})

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
        """Boolean mask (rows or slot range, 1, T, span), True where a token may attend; None if every place is allowed."""
        part, ring, tokens = self.part, self.ring, self.part.tokens
        span = part.span if ring is None else min(part.span, ring)
        if tokens == 1 and self.window is None and part.spread is None and min(part.first) + 1 >= span:
            return None
        own, place = part.lengths[:, None, None] + mx.arange(tokens)[:, None], mx.arange(span)
        # In a ring, place i holds the newest token whose position is i modulo the ring's size.
        position = place if ring is None else own[:, -1:] - (own[:, -1:] - place) % ring
        allowed = (position >= 0) & (position <= own)
        if self.window is not None:
            allowed = allowed & (position > own - self.window)
        return (allowed if part.spread is None else allowed[part.spread])[:, None]

    @cached_property
    def bias(self) -> mx.array | None:
        return as_bias(self.mask)

    @cached_property
    def slots(self) -> mx.array:
        """The slot of each token's row, (nT,)."""
        return self.part.slots if self.part.tokens == 1 else mx.repeat(self.part.slots, self.part.tokens)

    @cached_property
    def bounds(self) -> mx.array | None:
        """Each token's half-open range of places it may attend to, flattened to (2nT,); None if they are not contiguous."""
        if self.ring is not None and (self.window is not None or self.part.tokens > 1):
            return None
        if self.ring is None and self.window is None:
            return self.part.bounds
        ends = [first + 1 + token for first in self.part.first for token in range(self.part.tokens)]
        stops = [end if self.ring is None else min(end, self.ring) for end in ends]
        starts = [0 if self.window is None else max(0, stop - self.window) for stop in stops]
        return to_device([bound for pair in zip(starts, stops, strict=True) for bound in pair])[0]


def make_room(pool: Pool, row: RowState, tokens: int, *, seam: bool) -> None:
    """Make room for more tokens of a row; where it has to move for that, batches that were made before are of no use."""
    pool.grow(row, tokens, table=None if seam or row.slab is None else pool.table_for(row.slab))


def make_batches(
    pool: Pool, rows: Sequence[RowState], *, seam: bool, width: int | None, span: StepSpan = ONE_TOKEN
) -> list[Batch]:
    """Grow full rows, then group the rows of a decode step into batches: one with slab attention (seam), or one per slab."""
    # With a `width` shapes are constant: whole slabs are read, and idle rows fill the batch of the seam.
    for row in rows:
        make_room(pool, row, span.first_of(row) + span.tokens - row.length, seam=seam)
    parts: list[Part] = []
    for slab in pool.slabs:
        if live := [row for row in slab.occupied if row in rows]:
            start = sum(len(part.rows) for part in parts) if seam else 0
            parts.append(Part(slab, live, start, span, is_whole=width is not None))
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
        spec = batch.specs[layer]
        assert isinstance(spec, FullAttention)
        self.batch = batch
        self.layer = layer
        self.spec: FullAttention = spec
        self.offset = batch.offsets  # the same before and after the update

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append the new tokens' keys and values; returns handles for slab attention (seam), else one slab's arrays."""
        for side, array, plane in (("keys", keys, self.spec.keys), ("values", values, self.spec.values)):
            # Only the shape: a slab converts numbers of another dtype, as mlx-lm's own caches do.
            if array.shape != (shape := plane.shape_of(self.batch.tokens, len(self.batch.rows))):
                raise InternalError(f"layer {self.layer}: {side} of a step are {difference(array, shape, array.dtype)}")
        for part in self.batch.parts:
            for target, new in zip(self.planes(part), (keys, values), strict=True):
                self._append(part, target, self.rows_of(part, new))
        return self.keys_and_values()

    def _append(self, part: Part, target: mx.array, new: mx.array) -> None:
        (_, heads, places, _), tokens = target.shape, part.tokens
        slot, place = part.rows[0].slot, part.first[0] % places
        if len(part.rows) == 1 and place + tokens <= places:
            target[slot : slot + 1, :, place : place + tokens] = new
            return

        def indices() -> tuple[mx.array, mx.array, mx.array]:
            own = part.lengths[:, None, None] + mx.arange(tokens)
            return part.slots[:, None, None], mx.arange(heads)[None, :, None], own % places

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
        ring = None
        if isinstance(self.spec, SlidingWindow):
            ring = self.spec.ring if part.slab.capacity >= self.spec.ring else None
            window = min(window or self.spec.window, self.spec.window)
        if window is not None and (part.longest <= window or (ring is not None and window >= ring)):
            window = None
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
        if n != self.batch.tokens:
            raise InternalError(f"this step has {self.batch.tokens} tokens per row, not {n}")
        if not self.batch.seam:
            return self.reach(self.batch.parts[0], window_size).mask
        if return_array:
            raise InternalError("this model wants its mask as an array, which the seam does not give")
        return None if window_size is None else StepMask(window_size)


@dataclass(frozen=True)
class SlabHandle:
    """Stand-in for keys or values that stay in their slabs; only weft's attention function (the seam) can read it."""

    view: KeyValueView


class StateView:
    """The cache of one recurrent layer in one decode step: `view[i]` is a batched state [B, …], read and replaced whole."""

    lengths = None
    left_padding = None

    def __init__(self, batch: Batch, layer: int) -> None:
        spec = batch.specs[layer]
        assert isinstance(spec, Recurrent)
        self.batch = batch
        self.layer = layer
        self.spec: Recurrent = spec

    def __getitem__(self, index: int) -> mx.array | None:
        return self.batch.table.states[self.layer][index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        if reason := part_mismatch(value, self.spec.parts[index], len(self.batch.rows)):
            raise InternalError(f"layer {self.layer}: state {index} became {reason}")
        self.batch.replace_state(self.layer, index, value)

    def leave_open(self, index: int, noted: Noted) -> None:
        """Replace a state when it is known how many of the step's tokens count, by what was noted of it."""
        self.batch.leave_open(self.layer, index, noted)

    def advance(self, n: int) -> None:
        """Do nothing (mlx-lm calls it after each step): rows' lengths are Python integers, nothing is counted on the device."""

    def make_mask(self, n: int) -> None:
        """Return None: no row of a step is padded."""
