"""What a model sees of the rows of one decode step: objects with the few cache names that mlx-lm models touch.

A `Batch` is built afresh for every step and forgotten after it. Through the seam (`attention.py`) keys and values never
leave their slabs; the plain way hands the model one slab's arrays and a length mask. Both give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from weft.errors import InternalError
from weft.memory.slabs import Pool, RowState, Slab, StateTable
from weft.memory.spec import FullAttention, Recurrent, SlidingWindow

FORBIDDEN = -1e30  # added to a score; finite, so that even a row that may look nowhere stays a number


@dataclass(frozen=True)
class Part:
    """The rows of one slab inside a step: batch rows `start` to `start + len(rows)`, slots `low` to `high`."""

    slab: Slab
    rows: tuple[RowState, ...]
    num_rows: int
    start: int
    low: int
    high: int
    longest: int  # tokens of its longest row, the new one included
    span: int  # token places that are read
    slots: mx.array  # (n,) slot of each row
    lengths: mx.array  # (n,) tokens each row holds before this step
    spread: mx.array | None  # slot of the range → row of the part, when slots lie empty between
    gather: mx.array | None  # row of the part → slot of the range


@dataclass
class Batch:
    """One decode step's rows, how they lie in memory, and what all layers of the step share."""

    pool: Pool
    parts: list[Part]
    rows: list[RowState | None]  # None: an idle row that fills the width
    offsets: mx.array  # (B,) position of each row's new token
    table: StateTable
    seam: bool
    idle: int  # rows without an owner
    _memo: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def target(self, part: Part, heads: int, places: int) -> tuple[mx.array, mx.array, mx.array]:
        """Where the rows of a part write their new tokens, as indices into (slots, heads, places)."""

        def make() -> tuple[mx.array, mx.array, mx.array]:
            return part.slots[:, None, None], mx.arange(heads)[None, :, None], (part.lengths % places)[:, None, None]

        found: tuple[mx.array, mx.array, mx.array] = self.once(("target", part.start, heads, places), make)
        return found

    def mask(self, part: Part, spec: FullAttention, window: int | None) -> mx.array | None:
        """(n or range, 1, 1, span) True where a row may look; None when it may look everywhere."""
        ring, window = _reach(part, spec, window)
        found: mx.array | None = self.once(("mask", part.start, ring, window), lambda: _mask(part, ring, window))
        return found

    def bias(self, part: Part, spec: FullAttention, window: int | None) -> mx.array | None:
        """The mask as numbers to add to scores."""
        ring, window = _reach(part, spec, window)
        found: mx.array | None = self.once(("bias", part.start, ring, window), lambda: _bias(_mask(part, ring, window)))
        return found

    def bounds(self, part: Part, spec: FullAttention, window: int | None) -> mx.array | None:
        """(2n,) first and last + 1 place each row may look at; None when these places are not one run."""
        ring, window = _reach(part, spec, window)
        if ring is not None and window is not None:
            return None
        found: mx.array = self.once(("bounds", part.start, ring, window), lambda: _bounds(part, ring, window))
        return found

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What all layers of the step share, made by the first that asks."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]


def _reach(part: Part, spec: FullAttention, window: int | None) -> tuple[int | None, int | None]:
    """The ring a part's rows lie in, if it can be full, and the window a model asks for beyond what the ring gives."""
    ring = spec.window if isinstance(spec, SlidingWindow) and part.slab.capacity >= spec.window else None
    return ring, None if ring is not None and window is not None and window >= ring else window


def _bias(allowed: mx.array | None) -> mx.array | None:
    return None if allowed is None else mx.where(allowed, 0.0, FORBIDDEN)


def _bounds(part: Part, ring: int | None, window: int | None) -> mx.array:
    flat: list[int] = []
    for row in part.rows:
        stop = row.length + 1 if ring is None else min(row.length + 1, ring)
        flat += [0 if window is None else max(0, stop - window), stop]
    return mx.array(flat, mx.int32)


def _mask(part: Part, ring: int | None, window: int | None) -> mx.array | None:
    span = part.span if ring is None else min(part.span, ring)
    shortest = min(row.length for row in part.rows)
    if window is None and shortest + 1 >= span and (part.spread is None):
        return None
    lengths = part.lengths[:, None]
    place = mx.arange(span)[None]
    # In a ring, place i holds the newest token whose position is i modulo the ring's size.
    position = place if ring is None else lengths - (lengths - place) % ring
    allowed = (position >= 0) & (position <= lengths)
    if window is not None:
        allowed = allowed & (position > lengths - window)
    if part.spread is not None:
        allowed = allowed[part.spread]
    return allowed[:, None, None, :]


def make_batches(pool: Pool, rows: Sequence[RowState], *, seam: bool, width: int | None) -> list[Batch]:
    """Group seated rows into the forwards of one step: one through the seam, one per slab without it."""
    for row in rows:
        pool.grow(row, table=None if seam or row.slab is None else pool.table_for(row.slab))
    stepping = {id(row) for row in rows}
    chosen = [(slab, [row for row in slab.occupied if id(row) in stepping]) for slab in pool.slabs]
    chosen = [(slab, live) for slab, live in chosen if live]
    if seam:
        return [_seam_batch(pool, chosen, width)]
    return [_plain_batch(pool, slab, live, whole=width is not None) for slab, live in chosen]


def _seam_batch(pool: Pool, chosen: list[tuple[Slab, list[RowState]]], width: int | None) -> Batch:
    rows: list[RowState | None] = []
    parts = []
    for slab, live in chosen:
        parts.append(_part(slab, live, len(rows), whole=width is not None))
        rows.extend(live)
    if width is not None:
        rows.extend([None] * (width - len(rows)))
    return _batch(pool, parts, rows, pool.table_for(None), seam=True)


def _plain_batch(pool: Pool, slab: Slab, live: list[RowState], *, whole: bool) -> Batch:
    part = _part(slab, live, 0, whole=whole)
    held: dict[int, RowState] = {row.slot: row for row in live}
    rows = [held.get(slot) for slot in range(part.low, part.high)]
    return _batch(pool, [part], rows, pool.table_for(slab), seam=False)


def _batch(pool: Pool, parts: list[Part], rows: list[RowState | None], table: StateTable, *, seam: bool) -> Batch:
    table.arrange(rows)
    offsets = mx.array([0 if row is None else row.length for row in rows], mx.int32)
    return Batch(pool, parts, rows, offsets, table, seam, rows.count(None))


def _part(slab: Slab, live: list[RowState], start: int, *, whole: bool) -> Part:
    low, high = (0, len(slab.rows)) if whole else (live[0].slot, live[-1].slot + 1)
    longest = max(row.length for row in live) + 1
    gaps = high - low != len(live)
    order = {row.slot: index for index, row in enumerate(live)}
    return Part(
        slab=slab,
        rows=tuple(live),
        num_rows=len(live),
        start=start,
        low=low,
        high=high,
        longest=longest,
        span=slab.capacity if whole else longest,
        slots=mx.array([row.slot for row in live], mx.int32),
        lengths=mx.array([row.length for row in live], mx.int32),
        spread=mx.array([order.get(slot, 0) for slot in range(low, high)], mx.int32) if gaps else None,
        gather=mx.array([row.slot - low for row in live], mx.int32) if gaps else None,
    )


class Handle:
    """Stands for keys or values that stay in their slabs. Only the seam can read it: anything else is an error."""

    def __init__(self, view: KeyValueView) -> None:
        self.view = view


@dataclass(frozen=True)
class StepMask:
    """What `make_mask` gives through the seam: only the window a model asked for; lengths are known to the view."""

    window: int | None


class KeyValueView:
    """The cache of one attention layer for one step."""

    def __init__(self, batch: Batch, layer: int) -> None:
        spec = batch.pool.specs[layer]
        assert isinstance(spec, FullAttention)
        self.batch = batch
        self.layer = layer
        self.spec: FullAttention = spec

    @property
    def offset(self) -> mx.array:
        """(B,) position of each row's new token; the same before and after the update."""
        return self.batch.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append one token per row; give back what attention reads."""
        if keys.shape[0] != len(self.batch.rows) or keys.shape[2] != 1:
            raise InternalError(f"layer {self.layer}: keys {keys.shape} for {len(self.batch.rows)} rows of one token")
        for part in self.batch.parts:
            self._append(part, keys, values)
        return self.keys_and_values()

    def _append(self, part: Part, keys: mx.array, values: mx.array) -> None:
        for target, new in zip(self.planes(part), (self.rows_of(part, keys), self.rows_of(part, values)), strict=True):
            _, heads, places, _ = target.shape
            if part.num_rows == 1:
                slot, place = part.rows[0].slot, part.rows[0].length % places
                target[slot : slot + 1, :, place : place + 1] = new
            else:
                target[self.batch.target(part, heads, places)] = new

    def rows_of(self, part: Part, array: mx.array) -> mx.array:
        """The part's rows out of a batch-wide array; in the plain way the batch is the slab's slot range."""
        if self.batch.seam:
            if part.num_rows == array.shape[0]:
                return array
            return array[part.start : part.start + part.num_rows]
        return array if part.gather is None else array[part.gather]

    def keys_and_values(self) -> tuple[Any, Any]:
        """Keys and values as attention takes them; a layer that shares another's asks here."""
        if self.batch.seam:
            handle = Handle(self)
            return handle, handle
        return self.read(self.batch.parts[0])

    def planes(self, part: Part) -> tuple[mx.array, mx.array]:
        """(slots, heads, places, dim) keys and values of a whole slab."""
        keys, values = part.slab.keys[self.layer], part.slab.values[self.layer]
        assert keys is not None
        assert values is not None
        return keys, values

    def read(self, part: Part) -> tuple[mx.array, mx.array]:
        """(range, heads, span, dim) keys and values of one slab's slot range."""
        keys, values = self.planes(part)
        if part.high - part.low == keys.shape[0] and part.span >= keys.shape[2]:
            return keys, values
        return keys[part.low : part.high, :, : part.span], values[part.low : part.high, :, : part.span]

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask protocol of mlx-lm. Called before the update, from the first layer of a kind."""
        if n != 1:
            raise InternalError(f"a decode step has one token per row, not {n}")
        if self.batch.seam and not return_array:
            ring = isinstance(self.spec, SlidingWindow) and window_size is not None and window_size >= self.spec.window
            return None if window_size is None or ring else StepMask(window_size)
        if self.batch.seam:
            raise InternalError("this model wants its mask as an array, which the seam does not give")
        return self.batch.mask(self.batch.parts[0], self.spec, window_size)


class StateView:
    """The cache of one recurrent layer for one step: `view[i]` is [B, …], read and replaced whole."""

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
        geometry = self.spec.parts[index]
        if geometry is None or value.shape != (self.num_rows, *geometry[0]) or value.dtype != geometry[1]:
            raise InternalError(f"layer {self.layer}: state {index} became {value.shape} {value.dtype}, not {geometry}")
        self.states[index] = value

    def advance(self, n: int) -> None:
        """Lengths are python ints of the rows; nothing is counted on the device."""

    def make_mask(self, n: int) -> None:
        """No row of a step is padded."""


class CompositeView:
    """A layer with several caches: `view[i]` is the i-th."""

    def __init__(self, views: Sequence[Any]) -> None:
        self.views = tuple(views)

    def __getitem__(self, index: int) -> Any:
        return self.views[index]
