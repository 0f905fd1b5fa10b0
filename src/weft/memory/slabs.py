"""Memory of decoding rows: KV slabs (arrays of slots, by capacity class) and tables of recurrent states.

A slab is [slots, heads, capacity, dim] per layer. Joining takes a free slot, leaving frees it, outgrowing moves that one
row up a class; nobody else's keys and values are touched. A long row may hand over its own arrays: a slab of one slot.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import mlx.core as mx

from weft.errors import InternalError
from weft.memory.spec import FullAttention, Geometry, KeyValues, LayerSpec, Plane, Recurrent, RowContents, mismatch

SMALLEST_CAPACITY = 32
GROWTH_ROOM = 32  # a row is allocated with room for one in so many of its tokens
HANDOVER_SLACK = 384  # tokens of room beyond its capacity class that an array which is handed over may have


@dataclass(frozen=True)
class Refusal:
    """Why the pool can not take a row: the layer whose contents do not match its spec, and both geometries as a sentence."""

    layer: int
    reason: str


class RowState:
    """One sequence's place in the pool: its token count, slab or pages, and slot, and recurrent states that are in no table."""

    def __init__(self) -> None:
        self.length = 0
        self.shift = 0  # of a token's position against its number: images take fewer positions than tokens
        self.unread = 0  # of its last tokens, by the model's MTP head; −1: the head has read the next one too
        self.is_blind = False  # hidden states of the last tokens were not kept, so the head can not read these
        self.slab: Slab | None = None
        self.pages: list[int] = []  # in a pool of pages, which has no slabs
        self.slot = -1
        self.loose: list[tuple[mx.array | None, ...]] | None = None  # recurrent states that are in no table

    @property
    def is_placed(self) -> bool:
        """Whether a pool has a place for it."""
        return self.slot >= 0

    def advance(self, count: int) -> None:
        """Count tokens whose keys, values and states are here now; an MTP head has yet to read them."""
        self.length += count
        self.unread += count


class Slab:
    """A KV slab: keys and values of up to `slots` rows of one capacity class, for every attention layer."""

    def __init__(self, capacity: int, slots: int, specs: Sequence[LayerSpec]) -> None:
        def zeros(spec: FullAttention, plane: Plane) -> mx.array:
            return mx.zeros((slots, plane.heads, spec.slots_needed(capacity), plane.dim), plane.dtype)

        self.capacity = capacity
        self.is_handed_over = False  # made of the arrays that its only row was prefilled in
        self.rows: list[RowState | None] = [None] * slots
        kinds = {layer: spec for layer, spec in enumerate(specs) if isinstance(spec, FullAttention)}
        self.layers = {layer: KeyValues(zeros(spec, spec.keys), zeros(spec, spec.values)) for layer, spec in kinds.items()}

    @classmethod
    def of_row(cls, layers: Mapping[int, KeyValues], capacity: int, specs: Sequence[LayerSpec]) -> Self:
        """Make a slab of one slot of a row's own keys and values, which have room for `capacity` tokens."""
        slab = cls(capacity, 1, specs)
        slab.layers, slab.is_handed_over = dict(layers), True
        return slab

    @property
    def occupied(self) -> list[RowState]:
        return [row for row in self.rows if row is not None]

    def write(self, layer: int, slot: int, first: int, contents: KeyValues) -> None:
        """Copy a row's keys and values, of which the first is token `first`, into its slot; a sliding window wraps around."""
        held = self.layers[layer]
        for target, array in ((held.keys, contents.keys), (held.values, contents.values)):
            places, tokens = target.shape[2], array.shape[2]
            start = first % places  # only a window ring is smaller than its rows
            head = min(tokens, places - start)
            target[slot : slot + 1, :, start : start + head] = array[:, :, :head]
            if head < tokens:
                target[slot : slot + 1, :, : tokens - head] = array[:, :, head:]

    def scrub(self, slot: int) -> None:
        """Zero a slot's keys and values, because NaNs left there would poison the next row even where they are masked."""
        for held in self.layers.values():
            for array in (held.keys, held.values):
                array[slot] = mx.zeros(array.shape[1:], array.dtype)

    def scrub_tokens(self, slot: int, first: int, last: int, layers: Iterable[int] | None = None) -> None:
        """Zero the keys and values of a slot's tokens [first, last) in some layers, or in all."""
        for layer in self.layers if layers is None else layers:
            for array in (self.layers[layer].keys, self.layers[layer].values):
                places = mx.array([token % array.shape[2] for token in range(first, last)])
                array[slot, :, places] = 0


class StateTable:
    """Recurrent states of the rows that decode together, batched into [rows, …] arrays in the order of the last step.

    Every step reads and writes each state whole, so the table is laid out anew (one copy) only when the rows change.
    """

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        self.rows: list[RowState | None] = []
        self.parts = [spec.parts if isinstance(spec, Recurrent) else () for spec in specs]
        self.states: list[list[mx.array | None]] = [[None] * len(parts) for parts in self.parts]

    def arrange(self, rows: list[RowState | None]) -> None:
        """Reorder the table to `rows` (None: an idle row of zeros); live rows left out get copies of their states."""
        if rows == self.rows:
            return
        for row in filter(None, self.rows):
            if row.is_placed and row not in rows:
                row.loose = self.extract(row)
        sources = self._sources(rows)
        for layer, parts in enumerate(self.parts):
            for part, geometry in enumerate(parts):
                if geometry is not None:
                    pieces = [self._piece(source, layer, part, geometry) for source in sources]
                    self.states[layer][part] = mx.concatenate(pieces) if len(pieces) > 1 else mx.contiguous(pieces[0])
        for row in filter(None, rows):
            row.loose = None
        self.rows = list(rows)

    def _sources(self, rows: list[RowState | None]) -> list[slice | RowState | None]:
        """Return the sources of the states of `rows`: slices of this table (merged), loose rows, or None for an idle row."""
        place = {row: index for index, row in enumerate(self.rows)}
        sources: list[slice | RowState | None] = []
        for row in rows:
            index = None if row is None or row.loose is not None else place.get(row)
            last = sources[-1] if sources else None
            if index is None:
                sources.append(row)
            elif isinstance(last, slice) and last.stop == index:
                sources[-1] = slice(last.start, index + 1)
            else:
                sources.append(slice(index, index + 1))
        return sources

    def _piece(self, source: slice | RowState | None, layer: int, part: int, geometry: Geometry) -> mx.array:
        if source is None:
            return mx.zeros((1, *geometry[0]), geometry[1])
        states = self.states if isinstance(source, slice) else source.loose
        if states is None or (array := states[layer][part]) is None:
            raise InternalError(f"layer {layer}: a row without a recurrent state reached the batch")
        return array[source] if isinstance(source, slice) else array

    def extract(self, row: RowState) -> list[tuple[mx.array | None, ...]]:
        """Return one row's states by layer, copied out of the table, since slices would keep the whole table alive."""
        if row.loose is not None:
            return row.loose
        at = self.rows.index(row)
        return [tuple(None if array is None else mx.contiguous(array[at : at + 1]) for array in states) for states in self.states]


class NewRow(NamedTuple):
    """A row that enters a pool, and what its layers hold of so many tokens."""

    row: RowState
    contents: RowContents
    length: int


def refusal_by(specs: Sequence[LayerSpec], contents: RowContents, length: int) -> Refusal | None:
    """Return the first layer of a row's contents that does not match its spec; None if all do."""
    for layer, (spec, content) in enumerate(zip(specs, contents, strict=True)):
        if reason := mismatch(spec, content, length):
            return Refusal(layer, f"layer {layer} ({type(spec).__name__}): {reason}")
    return None


class Pool:
    """All KV slabs and state tables of one model; rows enter by `allocate`, get larger slots by `grow`, leave by `free`."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        slab_tokens: int,
        max_rows: int,
        coarse_tokens: int | None = None,
        constant_shapes: bool = False,
        handover_tokens: int | None = None,
    ) -> None:
        self.specs = list(specs)
        self.slab_tokens = slab_tokens
        self.coarse_tokens = slab_tokens // 4 if coarse_tokens is None else coarse_tokens  # up to here classes are wide
        self.max_rows = max_rows
        self.constant_shapes = constant_shapes  # a slab's slots depend on its class alone, not on who is there
        self.handover_tokens = handover_tokens  # rows of so many tokens hand over their arrays; None: all rows are copied
        self.slabs: list[Slab] = []
        self.tables: dict[Slab | None, StateTable] = {}  # None: one table over all slabs, for steps through the seam
        self.has_positions = any(isinstance(spec, FullAttention) for spec in specs)

    @property
    def rows(self) -> list[RowState]:
        return [row for slab in self.slabs for row in slab.occupied]

    @property
    def bytes_held(self) -> int:
        """Total bytes of all slabs and state tables, including free slots."""
        planes = [plane for slab in self.slabs for held in slab.layers.values() for plane in (held.keys, held.values)]
        return sum(array.nbytes for array in (*planes, *self.states()))

    def states(self) -> list[mx.array]:
        tables = self.tables.values()
        return [array for table in tables for states in table.states for array in states if array is not None]

    def table_for(self, slab: Slab | None) -> StateTable:
        """Return the state table of the rows that decode with this slab (None: of all rows), created if it is missing."""
        if slab not in self.tables:
            self.tables[slab] = StateTable(self.specs)
        return self.tables[slab]

    def refusal(self, contents: RowContents, length: int) -> Refusal | None:
        """Return the first layer of a row's contents that does not match its spec; None if the pool can take the row."""
        return refusal_by(self.specs, contents, length)

    def allocate(self, row: RowState, contents: RowContents, length: int, upcoming: Sequence[int] = ()) -> None:
        """Copy a row's keys and values into a free slot, or take them over if the row is long. Check `refusal` first.

        Its recurrent states are only referenced.
        """
        row.length, row.unread = length, 0
        row.loose = [content if isinstance(content, tuple) else () for content in contents]
        capacity = self._first_capacity(length)
        if (slab := self._handed_over(contents, length, capacity)) is not None:
            self.slabs.append(slab)
            row.slab, row.slot, slab.rows[0] = slab, 0, row
            return
        slab = self._place(row, capacity, 1 + sum(self._first_capacity(other) == capacity for other in upcoming))
        for layer, content in enumerate(contents):
            if isinstance(content, KeyValues) and length:
                slab.write(layer, row.slot, length - content.keys.shape[2], content)

    def _handed_over(self, contents: RowContents, length: int, capacity: int) -> Slab | None:
        """Return a slab made of a long row's own arrays; None if it is to be copied into one of this capacity.

        Arrays that have much more room than that are copied, and those of a sliding window, which are no ring yet.
        """
        if self.handover_tokens is None or length < self.handover_tokens:
            return None
        planes = {layer: content.planes for layer, content in enumerate(contents) if isinstance(content, KeyValues)}
        layers = {layer: KeyValues(*pair) for layer, pair in planes.items() if pair is not None}
        rooms = {array.shape[2] for held in layers.values() for array in (held.keys, held.values)}
        room = min(rooms, default=0)
        if len(layers) < len(planes) or len(rooms) != 1 or not length < room <= capacity + HANDOVER_SLACK:
            return None
        return Slab.of_row(layers, room, self.specs)

    def allocate_all(self, new: Sequence[NewRow], upcoming: Sequence[int] = ()) -> None:
        """Copy the contents of several rows, as `allocate` does."""
        for place, one in enumerate(new):
            self.allocate(one.row, one.contents, one.length, [*(other.length for other in new[place + 1 :]), *upcoming])

    def grow(self, row: RowState, tokens: int = 1, *, table: StateTable | None = None) -> None:
        """Make room for more tokens: a row whose slot is too small moves, alone, to a slot of a larger capacity class."""
        old, slot = row.slab, row.slot
        assert old is not None
        if row.length + tokens <= old.capacity or not self.has_positions:
            return
        if table is not None:
            row.loose = table.extract(row)
        peers = sum(len(slab.occupied) for slab in self.slabs if slab.capacity == old.capacity)  # they follow soon
        old.rows[slot] = None
        new = self._place(row, self.capacity_for(row.length + tokens), peers)
        for layer, held in old.layers.items():  # a ring that is already full keeps its layout: place 0 stays place 0
            new.write(layer, row.slot, 0, KeyValues(held.keys[slot : slot + 1], held.values[slot : slot + 1]))
        self._drop_if_empty(old)

    def free(self, row: RowState, *, poisoned: bool = False) -> None:
        slab, row.loose = row.slab, None
        if slab is None:
            return
        if poisoned:
            slab.scrub(row.slot)
        slab.rows[row.slot] = None
        row.slab, row.slot = None, -1
        self._drop_if_empty(slab)

    def trim(self) -> None:
        """Do nothing: a slab is dropped when its last row leaves."""

    def scrub_tokens(self, row: RowState, first: int, last: int, layers: Iterable[int] | None = None) -> None:
        """Zero the keys and values of a row's tokens [first, last) in some layers, or in all."""
        if row.slab is not None:
            row.slab.scrub_tokens(row.slot, first, last, layers)

    def capacity_of(self, row: RowState) -> int:
        """Return how many tokens a row has room for before it must move; 0 if it has no place."""
        return 0 if row.slab is None else row.slab.capacity

    def written_arrays(self, layer: int) -> list[mx.array]:
        """Return what must be evaluated for a layer's newest keys and values to be written."""
        held = [slab.layers[layer] for slab in self.slabs]
        return [array for one in held for array in (one.keys, one.values)]

    def capacity_for(self, tokens: int) -> int:
        if not self.has_positions:
            return 1
        # Classes grow by a third or a half while rows are short, so that many share a slab, then by an eighth or less.
        double = max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())
        step = double // (4 if double <= self.coarse_tokens else 16)
        return max(SMALLEST_CAPACITY, -(-tokens // step) * step)

    def _first_capacity(self, length: int) -> int:
        """Return a new row's capacity class, with some room so that a long row does not move after its first tokens."""
        return self.capacity_for(length + 1 + length // GROWTH_ROOM)

    def _place(self, row: RowState, capacity: int, wanted: int) -> Slab:
        """Put a row into a free slot of this capacity and return its slab, a new one (for about `wanted` rows) if necessary."""
        slab = next((slab for slab in self.slabs if slab.capacity == capacity and None in slab.rows), None)
        if slab is None:
            most = max(1, min(self.max_rows, self.slab_tokens // capacity))
            slots = most if self.constant_shapes or not self.has_positions else min(wanted, most)
            slab = Slab(capacity, slots, self.specs)
            self.slabs.append(slab)
        row.slab, row.slot = slab, slab.rows.index(None)
        slab.rows[row.slot] = row
        return slab

    def _drop_if_empty(self, slab: Slab) -> None:
        if not slab.occupied:
            self.slabs.remove(slab)
            self.tables.pop(slab, None)
        if not self.slabs:
            self.tables.clear()
