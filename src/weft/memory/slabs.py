"""Where rows live while they decode: key/value slabs by capacity class, and a table of recurrent states.

A slab is [slots, heads, capacity, dim] per layer. Joining takes a free slot, leaving frees it, outgrowing moves that one
row up a class; nobody else's keys and values are touched. Knows arrays and bytes; knows no model and no scheduler.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import mlx.core as mx

from weft.errors import InternalError
from weft.memory.spec import FullAttention, KeyValues, LayerContents, LayerSpec, Recurrent, mismatch

SMALLEST_CAPACITY = 32
GROWTH_ROOM = 32  # a row is seated with room for one in so many of its tokens


class RowState:
    """One sequence's place in the pool: how many tokens it holds, and where."""

    def __init__(self) -> None:
        self.length = 0
        self.slab: Slab | None = None
        self.slot = -1
        self.loose: list[tuple[mx.array | None, ...]] | None = None  # recurrent states not yet laid into a table


class Slab:
    """Keys and values of up to `slots` rows of one capacity class, for every layer that has them."""

    def __init__(self, capacity: int, slots: int, specs: Sequence[LayerSpec]) -> None:
        self.capacity = capacity
        self.rows: list[RowState | None] = [None] * slots
        self.keys: list[mx.array | None] = []
        self.values: list[mx.array | None] = []
        for spec in specs:
            if isinstance(spec, FullAttention):
                places = spec.slots_needed(capacity)
                self.keys.append(mx.zeros((slots, spec.keys.heads, places, spec.keys.dim), spec.keys.dtype))
                self.values.append(mx.zeros((slots, spec.values.heads, places, spec.values.dim), spec.values.dtype))
            else:
                self.keys.append(None)
                self.values.append(None)

    @property
    def occupied(self) -> list[RowState]:
        """The rows that live here, in slot order."""
        return [row for row in self.rows if row is not None]

    @property
    def nbytes(self) -> int:
        """Bytes held, free slots included."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> Iterable[mx.array]:
        """Every array of the slab."""
        return (array for array in itertools.chain(self.keys, self.values) if array is not None)

    def write(self, layer: int, slot: int, first: int, contents: KeyValues) -> None:
        """Put a row's keys and values into its slot; `contents` starts with token `first`."""
        for planes, array in ((self.keys, contents.keys), (self.values, contents.values)):
            target = planes[layer]
            assert target is not None
            places, tokens = target.shape[2], array.shape[2]
            start = first % places  # only a window ring is smaller than its rows
            head = min(tokens, places - start)
            target[slot : slot + 1, :, start : start + head] = array[:, :, :head]
            if head < tokens:
                target[slot : slot + 1, :, : tokens - head] = array[:, :, head:]
            planes[layer] = target

    def scrub(self, slot: int) -> None:
        """Zero a slot whose numbers are not finite: a masked NaN would still poison the next tenant."""
        for planes in (self.keys, self.values):
            for layer, array in enumerate(planes):
                if array is not None:
                    array[slot] = mx.zeros(array.shape[1:], array.dtype)
                    planes[layer] = array


class StateTable:
    """Recurrent states of the rows that step together, [rows, …] per array, in the order of the last step.

    Every step reads and writes each state whole, so the table is re-laid (one copy) only when the rows change.
    """

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        self.rows: list[RowState | None] = []
        self.specs = [spec if isinstance(spec, Recurrent) else None for spec in specs]
        self.states: list[list[mx.array | None]] = [[None] * len(spec.parts) if spec else [] for spec in self.specs]

    def arrange(self, rows: list[RowState | None]) -> None:
        """Lay the states out in the order of `rows`; None is an idle row of zeros. Who sits out keeps its states by itself."""
        if len(rows) == len(self.rows) and all(new is old for new, old in zip(rows, self.rows, strict=True)):
            return
        staying = {id(row) for row in rows}
        for row in self.rows:
            if row is not None and row.slab is not None and id(row) not in staying:
                row.loose = self.extract(row)
        place = {id(row): index for index, row in enumerate(self.rows) if row is not None}
        for layer, spec in enumerate(self.specs):
            for part in range(len(spec.parts) if spec else 0):
                self._lay(layer, part, rows, place)
        for row in rows:
            if row is not None:
                row.loose = None
        self.rows = list(rows)

    def _lay(self, layer: int, part: int, rows: list[RowState | None], place: dict[int, int]) -> None:
        spec = self.specs[layer]
        geometry = spec.parts[part] if spec else None
        if geometry is None:
            return
        old = self.states[layer][part]
        pieces: list[mx.array] = []
        run: list[int] = []  # consecutive old places, taken as one slice

        def close_run() -> None:
            if run and old is not None:
                pieces.append(old[run[0] : run[-1] + 1])
            run.clear()

        for row in rows:
            index = None if row is None or row.loose is not None else place.get(id(row))
            if index is not None:
                if run and index != run[-1] + 1:
                    close_run()
                run.append(index)
                continue
            close_run()
            pieces.append(_newcomer(row, layer, part, geometry))
        close_run()
        self.states[layer][part] = mx.concatenate(pieces) if len(pieces) > 1 else mx.contiguous(pieces[0])

    def extract(self, row: RowState) -> list[tuple[mx.array | None, ...]]:
        """One row's states as copies of their own; a bare slice would keep the whole table alive."""
        if row.loose is not None:
            return row.loose
        index = next(i for i, other in enumerate(self.rows) if other is row)
        return [
            tuple(None if array is None else mx.contiguous(array[index : index + 1]) for array in states)
            for states in self.states
        ]

    def arrays(self) -> Iterable[mx.array]:
        """Every array of the table."""
        return (array for states in self.states for array in states if array is not None)


def _newcomer(row: RowState | None, layer: int, part: int, geometry: tuple[tuple[int, ...], mx.Dtype]) -> mx.array:
    if row is None:
        return mx.zeros((1, *geometry[0]), geometry[1])
    if row.loose is None or (array := row.loose[layer][part]) is None:
        raise InternalError(f"layer {layer}: a row without a recurrent state reached the batch")
    return array


class Pool:
    """All slabs and tables of one model. `allocate`, `grow` and `free` are the only ways in, up and out."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        slab_tokens: int,
        max_rows: int,
        coarse_tokens: int | None = None,
        constant_shapes: bool = False,
    ) -> None:
        self.specs = list(specs)
        self.slab_tokens = slab_tokens
        self.coarse_tokens = slab_tokens // 4 if coarse_tokens is None else coarse_tokens  # up to here classes are wide
        self.max_rows = max_rows
        self.constant_shapes = constant_shapes  # a slab's slots depend on its class alone, not on who is there
        self.slabs: list[Slab] = []
        self.tables: dict[Slab | None, StateTable] = {}  # None: one table over all slabs (the seam's way)
        self.has_positions = any(isinstance(spec, FullAttention) for spec in specs)

    def refusal(self, contents: Sequence[LayerContents | None], length: int) -> str | None:
        """Why a row with these contents can not be seated; None when it can."""
        for layer, (spec, content) in enumerate(zip(self.specs, contents, strict=True)):
            if reason := mismatch(spec, content, length):
                return f"layer {layer} ({type(spec).__name__}): {reason}"
        return None

    def allocate(
        self, row: RowState, contents: Sequence[LayerContents | None], length: int, upcoming: Sequence[int] = ()
    ) -> None:
        """Copy a row's own states into a free slot. Ask `refusal` first. `upcoming`: lengths of rows that will follow soon."""
        row.length = length
        capacity = self._first_capacity(length)
        self._place(row, capacity, 1 + sum(self._first_capacity(other) == capacity for other in upcoming))
        assert row.slab is not None
        loose: list[tuple[mx.array | None, ...]] = []
        for layer, content in enumerate(contents):
            if isinstance(content, KeyValues):
                row.slab.write(layer, row.slot, length - content.keys.shape[2], content)
            loose.append(content if isinstance(content, tuple) else ())
        row.loose = loose

    def grow(self, row: RowState, *, table: StateTable | None = None) -> None:
        """Make room for one more token: a row that fills its slot moves up a class, alone."""
        slab, slot = row.slab, row.slot
        assert slab is not None
        if row.length < slab.capacity or not self.has_positions:
            return
        if table is not None:
            row.loose = table.extract(row)
        peers = sum(len(other.occupied) for other in self.slabs if other.capacity == slab.capacity)  # they follow soon
        slab.rows[slot] = None
        self._place(row, self.capacity_for(row.length + 1), peers)
        assert row.slab is not None
        for layer, spec in enumerate(self.specs):
            keys, values = slab.keys[layer], slab.values[layer]
            if isinstance(spec, FullAttention) and keys is not None and values is not None:
                # A ring that is already full keeps its layout: place 0 stays place 0.
                held = spec.slots_needed(row.length)
                moved = KeyValues(keys[slot : slot + 1, :, :held], values[slot : slot + 1, :, :held])
                row.slab.write(layer, row.slot, 0, moved)
        self._drop_if_empty(slab)

    def free(self, row: RowState, *, poisoned: bool = False) -> None:
        """Free a row's slot. A poisoned one is zeroed first."""
        slab, row.loose = row.slab, None
        if slab is None:
            return
        if poisoned:
            slab.scrub(row.slot)
        slab.rows[row.slot] = None
        row.slab, row.slot = None, -1
        self._drop_if_empty(slab)

    def capacity_for(self, tokens: int) -> int:
        """The capacity class for a row of `tokens` tokens.

        Classes grow by a third or a half while rows are short, by an eighth or less when they are long: the first want company,
        the second waste little.
        """
        if not self.has_positions:
            return 1
        double = max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())
        step = double // (4 if double <= self.coarse_tokens else 16)
        return max(SMALLEST_CAPACITY, -(-tokens // step) * step)

    def slots_for(self, capacity: int, wanted: int) -> int:
        """How many slots a new slab of this class gets when `wanted` rows are in sight."""
        most = max(1, min(self.max_rows, self.slab_tokens // capacity))
        return most if self.constant_shapes or not self.has_positions else min(wanted, most)

    @property
    def rows(self) -> list[RowState]:
        """Every seated row."""
        return [row for slab in self.slabs for row in slab.occupied]

    @property
    def bytes_held(self) -> int:
        """Bytes of slabs and tables, free slots included."""
        return sum(slab.nbytes for slab in self.slabs) + sum(array.nbytes for array in self.states())

    def table_for(self, slab: Slab | None) -> StateTable:
        """The recurrent states of the rows that step together with this slab (None: with all)."""
        if slab not in self.tables:
            self.tables[slab] = StateTable(self.specs)
        return self.tables[slab]

    def states(self) -> list[mx.array]:
        """Every recurrent state."""
        return [array for table in self.tables.values() for array in table.arrays()]

    def _first_capacity(self, length: int) -> int:
        """With some room, so that a long row does not move up a class with its first tokens."""
        return self.capacity_for(length + 1 + length // GROWTH_ROOM)

    def _place(self, row: RowState, capacity: int, wanted: int) -> None:
        for slab in self.slabs:
            if slab.capacity == capacity and None in slab.rows:
                break
        else:
            slab = Slab(capacity, self.slots_for(capacity, wanted), self.specs)
            self.slabs.append(slab)
        row.slab, row.slot = slab, slab.rows.index(None)
        slab.rows[row.slot] = row

    def _drop_if_empty(self, slab: Slab) -> None:
        if not slab.occupied:
            self.slabs.remove(slab)
            self.tables.pop(slab, None)
        if not self.slabs:
            self.tables.clear()
