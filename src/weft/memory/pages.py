"""Memory of decoding rows on CUDA: keys and values in pages, recurrent states in slots, all written in place by kernels.

A layer has one array of pages for all rows, so a step attends in one call per layer, whatever the rows' lengths; a row that grows
takes another page and moves nothing. States have one array of slots: rows that come and go touch nobody else's. MLX copies an
array that is written to while a step that reads it is still running; kernels that write in place copy nothing. For models all of
whose layers are such kernels (`kernels/cuda_model.py`); other models have slabs.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx

from weft.memory.slabs import NewRow, Refusal, RowState, StateTable, refusal_by
from weft.memory.spec import (
    MAX_STEP_TOKENS,
    FullAttention,
    KeyValues,
    LayerContents,
    LayerSpec,
    Recurrent,
    RowContents,
)
from weft.memory.transfer import to_device
from weft.memory.views import StepSpan

PAGE = 128  # tokens: those of one block of the attention kernel
IDLE = 0  # the page and the slot of rows that only fill a width
ROWS_AT_ONCE = 8  # that enter by the same launches
ROW_NUMBERS = 5  # that kernels know of each of them
FEWEST_PAGES = 16
FEWEST_SLOTS = 4
GROWTH = 1.25  # of an array that has become too small
SPARE = 4  # an array is cut when it has more than so many times what is used
NUM_COUNTERS = 1 << 16
KEPT_BYTES = 1 << 30  # stay allocated while no row is there


class StepTable(NamedTuple):
    """Where the memory of a step's rows is, as kernels read it (kernels/native/pages.h)."""

    rows: mx.array  # (B, 4): slot, tokens held, position of the first new token, index of the first page
    pages: mx.array  # (W, 2): row or −1, and page
    counters: mx.array  # zeros, with which blocks of one kernel count each other


class NewRows(NamedTuple):
    """A few rows that enter a pool, as kernels read them (kernels/native/place_prompts.cu)."""

    rows: (
        mx.array
    )  # flat, ROW_NUMBERS each: slot, tokens, capacities of its keys and values as they are given, its first page's place
    pages: mx.array  # page numbers of all of them


@dataclass(frozen=True)
class PlacedRows:
    """A table that a step was given, and what it says."""

    table: StepTable
    rows: list[RowState | None]
    firsts: list[int]
    layout: int  # of the pool's pages and slots


class PageKernels(Protocol):
    """What writes to pages and slots in place; each returns an array that is there when that is done."""

    def place_prompts(self, new: list[KeyValues], held: KeyValues, rows: NewRows) -> mx.array:
        """Copy the keys and values (1, heads, tokens, dim) of a few rows into their pages."""

    def place_tokens(self, keys: mx.array, values: mx.array, held: KeyValues, table: StepTable) -> mx.array:
        """Copy keys and values (B, heads, T, dim) of a step's tokens into their pages."""

    def place_states(self, new: list[tuple[mx.array, mx.array]], held: tuple[mx.array, mx.array], rows: NewRows) -> mx.array:
        """Copy the columns and states of a few rows into their slots."""

    def restore_states(self, kept: mx.array, state: mx.array, table: StepTable, counts: mx.array) -> mx.array:
        """Take rows' states back to those after their first `counts` tokens, of those `kept` after each line."""

    def advance_rows(self, rows: mx.array) -> mx.array:
        """Return the rows of a table when each holds one token more."""


class PagedPool:
    """All pages and slots of one model; rows enter by `allocate`, get pages by `grow`, leave by `free`."""

    def __init__(self, specs: Sequence[LayerSpec], slotted: Collection[int], kernels: PageKernels) -> None:
        """Make an empty pool; `slotted`: the recurrent layers whose states are in slots, of two parts each."""
        self.specs = list(specs)
        self.kernels = kernels
        self.paged = {layer: spec for layer, spec in enumerate(specs) if isinstance(spec, FullAttention)}
        self.slotted = {layer: spec for layer, spec in enumerate(specs) if layer in slotted and isinstance(spec, Recurrent)}
        self.pages: dict[int, KeyValues] = {}  # by layer: [pages, heads, PAGE, dim]
        self.slots: dict[int, tuple[mx.array, mx.array]] = {}  # by layer: [slots, ring, channels] and [slots, …]
        self.rows: list[RowState] = []
        self.layout = 0  # changes whenever a row's pages or slot do
        self.written: dict[int, mx.array] = {}  # by layer: done when its newest keys and values are written; of layers that ask
        self.counters = mx.zeros(NUM_COUNTERS, mx.int32)
        mx.eval(self.counters)  # sync: it has no part in anybody's graph
        self._page_numbers = Numbers(FEWEST_PAGES)
        self._slot_numbers = Numbers(FEWEST_SLOTS)
        self._table: StateTable | None = None
        self._last: PlacedRows | None = None

    @property
    def bytes_held(self) -> int:
        """Total bytes of all pages, slots and state tables, including free ones."""
        pages = [plane for held in self.pages.values() for plane in (held.keys, held.values)]
        return sum(array.nbytes for array in (*pages, *(part for held in self.slots.values() for part in held), *self.states()))

    def states(self) -> list[mx.array]:
        """Return the recurrent states that are not in slots."""
        table = self._table
        return [] if table is None else [array for states in table.states for array in states if array is not None]

    def state_table(self) -> StateTable:
        """Return the table of the recurrent states that are not in slots, created if it is missing."""
        if self._table is None:
            self._table = StateTable([Recurrent(()) if layer in self.slotted else spec for layer, spec in enumerate(self.specs)])
        return self._table

    def refusal(self, contents: RowContents, length: int) -> Refusal | None:
        """Return the first layer of a row's contents that does not match its spec; None if the pool can take the row."""
        return refusal_by(self.specs, contents, length)

    def allocate(self, row: RowState, contents: RowContents, length: int, upcoming: Sequence[int] = ()) -> None:
        """Start copying a row's contents into pages and a slot of its own. Check `refusal` first."""
        self.allocate_all([NewRow(row, contents, length)], upcoming)

    def allocate_all(self, new: Sequence[NewRow], upcoming: Sequence[int] = ()) -> None:
        """Start copying the contents of several rows into pages and slots of their own. Check `refusal` of each first."""
        num_pages = sum(_num_pages(one.length + 1) for one in new)
        if self._page_numbers.lacks(num_pages if self.paged else 0) or self._slot_numbers.lacks(len(new)):
            self._reserve(num_pages + sum(map(_num_pages, upcoming)), len(new) + len(upcoming))
        for one in new:
            one.row.length, one.row.unread, one.row.slot = one.length, 0, self._slot_numbers.take()
            one.row.pages = []
            self.rows.append(one.row)
            self.layout += 1
            self.grow(one.row)
            is_loose = [isinstance(content, tuple) and layer not in self.slotted for layer, content in enumerate(one.contents)]
            pairs = zip(is_loose, one.contents, strict=True)
            one.row.loose = [content if loose and isinstance(content, tuple) else () for loose, content in pairs]
        for first in range(0, len(new), ROWS_AT_ONCE):
            self._place_contents(new[first : first + ROWS_AT_ONCE])

    def _place_contents(self, new: Sequence[NewRow]) -> None:
        """Start copying a few rows' contents, all rows' of a layer in one launch."""
        rows, done = {}, []
        for layer in range(len(self.specs)):
            contents = [one.contents[layer] for one in new]
            capacities = tuple(map(_capacities, contents))
            if capacities not in rows:  # of few kinds: most layers have as much room
                rows[capacities] = _new_rows(new, capacities)
            if layer in self.slotted:
                states = [content for content in contents if isinstance(content, tuple)]
                pairs = [(one[0], one[1]) for one in states if one[0] is not None and one[1] is not None]
                assert len(pairs) == len(new)
                done.append(self.kernels.place_states(pairs, self.slots[layer], rows[capacities]))
            elif planes := [content for content in contents if isinstance(content, KeyValues)]:
                assert len(planes) == len(new)
                done.append(self.kernels.place_prompts(planes, self.pages[layer], rows[capacities]))
        mx.async_eval(done)  # type: ignore[no-untyped-call]  # before the step that reads them: MLX does not know what it reads

    def grow(self, row: RowState, tokens: int = 1) -> None:
        """Make room for more tokens of a row: it may take further pages."""
        missing = (_num_pages(row.length + tokens) if self.paged else 0) - len(row.pages)
        if missing > 0:
            self._reserve(missing, 0)
            row.pages += [self._page_numbers.take() for _ in range(missing)]
            self.layout += 1

    def free(self, row: RowState, *, poisoned: bool = False) -> None:  # noqa: ARG002 - nothing is read that its row did not write
        """Free a row's pages and slot."""
        row.loose = None
        if not row.is_placed:
            return
        self.rows.remove(row)
        self._page_numbers.give_back(row.pages)
        self._slot_numbers.give_back([row.slot])
        row.pages, row.slot = [], -1
        self.layout += 1
        if not self.rows:
            self._table = self._last = None
            if self.bytes_held > KEPT_BYTES:
                self._forget()

    def scrub_tokens(self, row: RowState, first: int, last: int, layers: Iterable[int] | None = None) -> None:
        """Zero the keys and values of a row's tokens [first, last) in some layers; in all there is no need to."""
        if layers is None or not row.is_placed or last <= first:
            return
        table, count = self._build([row], [first]).table, last - first
        for layer in layers:
            spec = self.paged[layer]
            zeros = [mx.zeros(plane.shape_of(count), plane.dtype) for plane in (spec.keys, spec.values)]
            mx.async_eval(self.kernels.place_tokens(zeros[0], zeros[1], self.pages[layer], table))  # type: ignore[no-untyped-call]

    def capacity_of(self, row: RowState) -> int:
        """Return how many tokens a row has room for before it takes another page."""
        return len(row.pages) * PAGE

    def written_arrays(self, layer: int) -> list[mx.array]:
        """Return what must be evaluated for a layer's newest keys and values to be written."""
        return [self.written[layer]] if layer in self.written else []

    def trim(self) -> None:
        """Give memory back when little of it is used; to be called while no step is being built."""
        used = sum(len(row.pages) for row in self.rows), len(self.rows)
        counts = self._page_numbers.count, self._slot_numbers.count
        fewest = FEWEST_PAGES, FEWEST_SLOTS
        if self.rows and any(count > SPARE * max(few, one) for count, few, one in zip(counts, fewest, used, strict=True)):
            self._compact()

    def place(self, rows: Sequence[RowState | None], span: StepSpan) -> StepTable:
        """Return the table of a step over these rows; if all that changed is that each has a token more, the device makes it."""
        firsts = [0 if row is None else span.first_of(row) for row in rows]
        last = self._last
        if last is not None and last.layout == self.layout and last.rows == list(rows):
            further = {first - before for first, before in zip(firsts, last.firsts, strict=True)}
            if further == {0}:
                return last.table
            if further == {1}:
                table = last.table._replace(rows=self.kernels.advance_rows(last.table.rows))
                self._last = PlacedRows(table, list(rows), firsts, self.layout)
                return table
        self._last = self._build(rows, firsts)
        return self._last.table

    def keep_states(self, kept: dict[int, mx.array], table: StepTable, counts: list[int]) -> None:
        """Take the states of slots back to those after each row's first `counts` tokens, of those kept after each line."""
        (own,) = to_device(counts)
        restored = [self.kernels.restore_states(states, self.slots[layer][1], table, own) for layer, states in kept.items()]
        mx.async_eval(restored)  # type: ignore[no-untyped-call]

    def _build(self, rows: Sequence[RowState | None], firsts: list[int]) -> PlacedRows:
        entries: list[int] = []
        fields: list[int] = []
        for index, (row, first) in enumerate(zip(rows, firsts, strict=True)):
            slot, shift, pages = (IDLE, 0, [IDLE]) if row is None else (row.slot, row.shift, row.pages or [IDLE])
            fields += [slot, first, first + shift, len(entries) // 2]
            entries += [number for page in pages for number in (index, page)]
        width = _padded(len(entries) // 2)
        entries += [-1, IDLE] * (width - len(entries) // 2)
        in_rows, in_pages = to_device(fields, entries)
        table = StepTable(in_rows.reshape(-1, 4), in_pages.reshape(-1, 2), self.counters)
        return PlacedRows(table, list(rows), firsts, self.layout)

    def _reserve(self, num_pages: int, num_slots: int) -> None:
        """Make sure that so many pages and slots are free, in larger arrays if necessary."""
        pages, slots = self._page_numbers.grown_by(num_pages if self.paged else 0), self._slot_numbers.grown_by(num_slots)
        made: list[mx.array] = []
        if pages and self.paged:
            for layer, spec in self.paged.items():
                held = self.pages.get(layer)
                more = [mx.zeros((pages, plane.heads, PAGE, plane.dim), plane.dtype) for plane in (spec.keys, spec.values)]
                old = (None, None) if held is None else (held.keys, held.values)
                keys, values = (_joined(*pair) for pair in zip(old, more, strict=True))
                self.pages[layer] = KeyValues(keys, values)
                made += _evaluated([keys, values], is_new=held is None)
        if slots:
            for layer, recurrent in self.slotted.items():
                more = [mx.zeros((slots, *shape), dtype) for shape, dtype in _slot_shapes(recurrent)]
                states = self.slots.get(layer, (None, None))
                columns, state = (_joined(*pair) for pair in zip(states, more, strict=True))
                self.slots[layer] = columns, state
                made += _evaluated([columns, state], is_new=states[0] is None)
        mx.eval(made)  # sync: seldom

    def _compact(self) -> None:
        """Copy the pages and slots that are used into arrays of about their number."""
        pages, slots = [IDLE, *(page for row in self.rows for page in row.pages)], [IDLE, *(row.slot for row in self.rows)]
        order = mx.array(pages), mx.array(slots)
        for layer, held in self.pages.items():
            self.pages[layer] = KeyValues(held.keys[order[0]], held.values[order[0]])
            mx.eval(self.pages[layer].keys, self.pages[layer].values)  # sync: seldom
        for layer, (columns, state) in self.slots.items():
            self.slots[layer] = columns[order[1]], state[order[1]]
            mx.eval(self.slots[layer])  # sync: seldom
        at = 1
        for slot, row in enumerate(self.rows, 1):
            row.slot, row.pages = slot, list(range(at, at + len(row.pages)))
            at += len(row.pages)
        self._page_numbers.restart(len(pages))
        self._slot_numbers.restart(len(slots))
        self.layout += 1

    def _forget(self) -> None:
        self.pages, self.slots, self.written = {}, {}, {}
        self._page_numbers, self._slot_numbers = Numbers(FEWEST_PAGES), Numbers(FEWEST_SLOTS)


class Numbers:
    """The numbers of an array's entries, of which some are free; the first is for idle rows."""

    def __init__(self, fewest: int) -> None:
        self.count = 0
        self.fewest = fewest
        self.free: list[int] = []  # the last is taken first

    def take(self) -> int:
        return self.free.pop()

    def give_back(self, numbers: list[int]) -> None:
        self.free += reversed(numbers)

    def lacks(self, wanted: int) -> bool:
        """Whether there are not so many free numbers, or none at all yet."""
        return len(self.free) < wanted or not self.count

    def grown_by(self, wanted: int) -> int:
        """Make sure that so many numbers are free; returns how many entries the array must get for that."""
        if not self.lacks(wanted):
            return 0
        before, needed = self.count, max(1, self.count) + wanted - len(self.free)
        self.count = max(needed, self.fewest, int(before * GROWTH))
        self.free[:0] = reversed(range(max(1, before), self.count))
        return self.count - before

    def restart(self, used: int) -> None:
        """Number entries anew: so many are used and none is free."""
        self.count, self.free = used, []


def _new_rows(new: Sequence[NewRow], capacities: Sequence[tuple[int, int]]) -> NewRows:
    """Return a few rows as kernels read them; of several the last one again, until they are ROWS_AT_ONCE."""
    fields: list[int] = []
    numbers: list[int] = []
    pairs = list(zip(new, capacities, strict=True))
    for one, room in (*pairs, *pairs[-1:] * (ROWS_AT_ONCE - len(new) if len(new) > 1 else 0)):
        fields += [one.row.slot, one.length, *room, len(numbers)]
        numbers += one.row.pages or [IDLE]
    return NewRows(*to_device(fields, numbers))


def _capacities(content: LayerContents | None) -> tuple[int, int]:
    """Return for how many tokens there is room in the arrays that a layer's keys and values are read from."""
    if not isinstance(content, KeyValues):
        return 0, 0
    keys, values = content.planes or (content.keys, content.values)
    return keys.shape[2], values.shape[2]


def _num_pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def _padded(count: int) -> int:
    """Return the next power of two, or one and a half of one: tables have few sizes, since a step is traced for each."""
    power = 1 << max(5, (count - 1).bit_length())
    return power * 3 // 4 if count <= power * 3 // 4 and power > 32 else power


def _slot_shapes(spec: Recurrent) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Return the shapes of a slot's columns and state; columns are those before a step and those of its tokens."""
    columns, state = spec.parts
    assert columns is not None
    assert state is not None
    (kept, channels), dtype = columns
    return [((kept + MAX_STEP_TOKENS, channels), dtype), state]


def _evaluated(arrays: list[mx.array], *, is_new: bool) -> list[mx.array]:
    """Evaluate arrays that replace others, so that these are freed one by one; returns those that may be evaluated later."""
    if is_new:
        return arrays
    mx.eval(arrays)  # sync: seldom
    return []


def _joined(old: mx.array | None, more: mx.array) -> mx.array:
    return more if old is None else mx.concatenate([old, more])
