"""Rows in slabs: what joins is what was handed in, what grows moves alone, what leaves leaves nothing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InternalError
from weft.memory.slabs import Pool, RowState, Slab, StateTable
from weft.memory.spec import FullAttention, KeyValues, LayerContents, LayerSpec, Plane, Recurrent, SlidingWindow

FULL = FullAttention(Plane(2, 4, mx.float32), Plane(2, 6, mx.float32))
WINDOW = SlidingWindow(Plane(1, 4, mx.float32), Plane(1, 4, mx.float32), window=10)
STATE = Recurrent((((3, 5), mx.float32), None))
SPECS: list[LayerSpec] = [FULL, WINDOW, STATE]


def pool(**settings: int) -> Pool:
    return Pool(SPECS, **{"slab_tokens": 256, "max_rows": 4, **settings})  # type: ignore[arg-type]


def contents(length: int, mark: float) -> list[LayerContents]:
    """Keys and values that say whose they are (`mark`) and of which position."""

    def plane(form: Plane, first: int) -> mx.array:
        positions = np.arange(first, length, dtype=np.float32)[None, None, :, None]
        return mx.array(np.broadcast_to(1000 * mark + positions, (1, form.heads, length - first, form.dim)))

    kept = max(0, length - WINDOW.window)
    return [
        KeyValues(plane(FULL.keys, 0), plane(FULL.values, 0)),
        KeyValues(plane(WINDOW.keys, kept), plane(WINDOW.values, kept)),
        (mx.full((1, 3, 5), mark), None),
    ]


def kv(keys: tuple[int, ...], values: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> KeyValues:
    return KeyValues(mx.zeros(keys, dtype), mx.zeros(values, dtype))


def allocate(pool: Pool, length: int, mark: float, upcoming: tuple[int, ...] = ()) -> RowState:
    row = RowState()
    held = contents(length, mark)
    assert pool.refusal(held, length) is None
    pool.allocate(row, held, length, upcoming)
    return row


def arrays_of(slab: Slab) -> list[mx.array]:
    return [array for held in slab.layers.values() for array in (held.keys, held.values)]


def check(row: RowState, mark: float) -> None:
    """The slot holds the row's own tokens, each window token at its place modulo the window."""
    slab = row.slab
    assert slab is not None
    keys, ring = np.array(slab.layers[0].keys[row.slot, 0, :, 0]), np.array(slab.layers[1].values[row.slot, 0, :, 0])
    assert keys[: row.length].tolist() == [1000 * mark + place for place in range(row.length)]
    for position in range(max(0, row.length - WINDOW.window), row.length):
        assert ring[position % len(ring)] == 1000 * mark + position


@pytest.mark.parametrize("length", [1, 9, 10, 11, 25, 31, 32, 100])
def test_a_seated_row_holds_its_own_tokens(length: int) -> None:
    row = allocate(pool(), length, 3.0)

    check(row, 3.0)


def test_a_row_that_fills_its_slot_moves_up_a_class_and_nobody_else_moves() -> None:
    rows = pool()
    first, second = allocate(rows, 31, 1.0, upcoming=(31,)), allocate(rows, 20, 2.0)
    old, place = first.slab, (second.slab, second.slot)
    assert old is not None
    first.length += 1  # its last free place is taken
    old.layers[0].keys[first.slot, :, 31] = mx.full((2, 4), 1031.0)
    old.layers[1].values[first.slot, :, 31 % 10] = mx.full((1, 4), 1031.0)
    rows.grow(first)

    assert first.slab is not old
    check(first, 1.0)
    assert (second.slab, second.slot) == place
    check(second, 2.0)


def test_joining_and_leaving_touch_no_other_arrays() -> None:
    rows = pool()
    resident = allocate(rows, 100, 1.0)
    assert resident.slab is not None
    before = [np.array(array) for array in arrays_of(resident.slab)]
    arrays = [id(array) for array in arrays_of(resident.slab)]
    for length in (5, 40, 100, 130):
        rows.free(allocate(rows, length, 2.0))

    assert [id(array) for array in arrays_of(resident.slab)] == arrays
    assert all(np.array_equal(array, old) for array, old in zip(arrays_of(resident.slab), before, strict=True))


def test_a_left_slot_is_used_again_and_an_empty_slab_goes() -> None:
    rows = pool()
    first = allocate(rows, 20, 1.0, upcoming=(20, 20))
    second = allocate(rows, 20, 2.0)
    slab, slot = first.slab, first.slot
    rows.free(first)
    third = allocate(rows, 20, 3.0)

    assert (third.slab, third.slot) == (slab, slot)
    rows.free(second)
    rows.free(third)
    assert rows.slabs == []
    assert rows.bytes_held == 0


def test_room_is_made_for_rows_in_sight_and_for_no_others() -> None:
    alone, crowd = pool(), pool()
    allocate(alone, 20, 1.0)
    allocate(crowd, 20, 1.0, upcoming=(25, 30, 200))

    assert len(alone.slabs[0].rows) == 1
    assert len(crowd.slabs[0].rows) == 3


def with_room(length: int, mark: float, room: int) -> list[LayerContents]:
    """Contents whose arrays have room for so many tokens, as a row's caches have."""
    whole, _, state = contents(room, mark)
    assert isinstance(whole, KeyValues)
    keys, values = whole.keys, whole.values
    return [KeyValues(keys[:, :, :length], values[:, :, :length], (keys, values)), state]


def handed_over(length: int, room: int, **settings: int) -> tuple[Pool, RowState, KeyValues]:
    """A pool that takes over rows of 40 tokens, its first row, and that row's arrays."""
    rows = Pool([FULL, STATE], **{"slab_tokens": 256, "max_rows": 4, "handover_tokens": 40, **settings})
    held, row = with_room(length, 1.0, room), RowState()
    rows.allocate(row, held, length)
    assert isinstance(held[0], KeyValues)
    assert held[0].planes is not None
    return rows, row, KeyValues(*held[0].planes)


def test_a_long_rows_arrays_become_its_slab() -> None:
    rows, row, own = handed_over(50, 64)

    assert row.slab is not None
    assert row.slab.is_handed_over
    assert (row.slab.layers[0].keys is own.keys, row.slab.layers[0].values is own.values) == (True, True)
    assert (row.slab.capacity, row.slot, rows.slabs) == (64, 0, [row.slab])
    assert row.loose is not None
    assert row.loose[1][0] is not None


@pytest.mark.parametrize(
    ("length", "room"),
    [pytest.param(39, 64, id="short"), pytest.param(50, 50, id="full"), pytest.param(50, 2000, id="too much room")],
)
def test_other_rows_are_copied(length: int, room: int) -> None:
    rows, row, own = handed_over(length, room)

    assert row.slab is not None
    assert not row.slab.is_handed_over
    assert row.slab.layers[0].keys is not own.keys
    assert rows.capacity_of(row) > length


def test_a_row_with_a_sliding_window_is_copied() -> None:
    rows = pool(handover_tokens=40)

    assert not allocate(rows, 100, 1.0).slab.is_handed_over  # type: ignore[union-attr]


def test_a_row_that_outgrows_the_arrays_it_handed_over_moves_and_leaves_them_as_they_are() -> None:
    rows, row, own = handed_over(64, 65)
    row.length += 1
    before = np.array(own.keys)
    rows.grow(row)

    assert row.slab is not None
    assert not row.slab.is_handed_over
    keys = np.array(row.slab.layers[0].keys[row.slot, 0, :, 0])
    assert keys[:65].tolist() == [1000 + place for place in range(65)]
    assert np.array_equal(np.array(own.keys), before)


def test_constant_shapes_depend_on_the_class_alone() -> None:
    rows = Pool(SPECS, slab_tokens=256, max_rows=4, constant_shapes=True)
    allocate(rows, 20, 1.0)

    assert len(rows.slabs[0].rows) == 4


@pytest.mark.parametrize("tokens", [1, 5, 32, 33, 64, 65, 100, 1000, 2049, 16385, 100_000])
def test_a_class_has_room_and_wastes_little(tokens: int) -> None:
    capacity = Pool(SPECS, slab_tokens=2048, max_rows=8).capacity_for(tokens)

    assert capacity >= tokens
    assert capacity <= max(32, 1.5 * tokens)
    assert tokens < 600 or capacity <= 1.13 * tokens


@pytest.mark.parametrize(
    ("layer", "wrong", "words"),
    [
        (0, kv((1, 2, 8, 5), (1, 2, 8, 6)), "keys are (1, 2, 8, 5) float32 instead of (1, 2, 8, 4) float32 (axis 3)"),
        (0, kv((1, 2, 8, 4), (1, 3, 8, 6)), "values are (1, 3, 8, 6) float32 instead of (1, 2, 8, 6) float32 (axis 1)"),
        (0, kv((1, 2, 7, 4), (1, 2, 7, 6)), "keys are (1, 2, 7, 4) float32 instead of (1, 2, 8, 4) float32 (axis 2)"),
        (0, kv((1, 2, 8, 4), (1, 2, 7, 6)), "values are (1, 2, 7, 6) float32 instead of (1, 2, 8, 6) float32 (axis 2)"),
        (0, kv((2, 2, 8, 4), (2, 2, 8, 6)), "keys are (2, 2, 8, 4) float32 instead of (1, 2, 8, 4) float32 (axis 0)"),
        (0, kv((2, 8, 4), (2, 8, 6)), "keys are (2, 8, 4) float32 instead of (1, 2, 8, 4) float32 (number of axes)"),
        (0, kv((1, 2, 8, 4), (1, 2, 8, 6), mx.float16), "keys are (1, 2, 8, 4) float16 instead of (1, 2, 8, 4) float32 (dtype)"),
        (2, (mx.zeros((1, 3, 4)), None), "state 0 is (1, 3, 4) float32 instead of (1, 3, 5) float32 (axis 2)"),
        (2, (None, None), "state 0 is missing instead of (1, 3, 5) float32"),
        (2, (mx.zeros((1, 3, 5)), mx.zeros((1, 2))), "state 1 is (1, 2) float32 instead of missing"),
        (2, (mx.zeros((1, 3, 5)),), "it holds 1 states instead of 2"),
        (2, None, "its cache is of a kind that slabs can not hold"),
        (2, kv((1, 2, 8, 4), (1, 2, 8, 6)), "it holds keys and values, which is not what Recurrent has"),
        (1, (mx.zeros((1, 3, 5)), None), "it holds 2 states, which is not what SlidingWindow has"),
    ],
)
def test_what_does_not_have_the_geometry_is_refused_by_name(layer: int, wrong: LayerContents | None, words: str) -> None:
    held: list[LayerContents | None] = list(contents(8, 1.0))
    held[layer] = wrong

    refusal = pool().refusal(held, 8)

    assert refusal is not None
    assert refusal.layer == layer
    assert refusal.reason == f"layer {layer} ({type(SPECS[layer]).__name__}): {words}"


def test_the_table_follows_its_rows_through_any_order() -> None:
    table = StateTable(SPECS)
    rows = [allocate(pool(), 5, float(mark)) for mark in range(5)]

    def lay(*order: int | None) -> list[float]:
        table.arrange([None if index is None else rows[index] for index in order])
        state = table.states[2][0]
        assert state is not None
        return np.array(state[:, 0, 0]).tolist()

    assert lay(0) == [0]
    assert lay(0, 3, 1) == [0, 3, 1]
    assert lay(1, 0, 3, None) == [1, 0, 3, 0]
    table.states[2][0] += 10  # a step
    assert lay(3, 2, None) == [13, 2, 0]
    assert lay(None, 3, 2) == [0, 13, 2]  # as many, but others in each place
    assert lay(None, 2, None, 4) == [0, 2, 0, 4]
    assert lay(0, 3, 1) == [10, 13, 11]  # those who sat out have what they had
    assert np.array(table.extract(rows[2])[2][0]).flat[0] == 2


def test_a_row_nobody_gave_a_state_never_reaches_the_batch() -> None:
    table = StateTable(SPECS)

    with pytest.raises(InternalError, match="without a recurrent state"):
        table.arrange([RowState()])


@settings(max_examples=40)
@given(st.lists(st.one_of(st.integers(1, 90), st.tuples(st.just("leave"), st.integers(0, 9)), st.just("grow")), max_size=25))
def test_no_order_of_joining_growing_and_leaving_mixes_rows_up(events: list[int | tuple[str, int] | str]) -> None:
    rows = pool()
    live: list[tuple[RowState, float]] = []
    for number, event in enumerate(events):
        match event:
            case int(length) if len(live) < 6:
                live.append((allocate(rows, length, float(number)), float(number)))
            case ("leave", index) if live:
                rows.free(live.pop(index % len(live))[0])
            case "grow":
                for row, mark in live:
                    rows.grow(row)
                    token = [1000 * mark + row.length]
                    for layer in (0, 1):
                        held = row.slab.layers[layer]  # type: ignore[union-attr]
                        for array in (held.keys, held.values):
                            array[row.slot, :, row.length % array.shape[2]] = mx.array(token)
                    row.length += 1
        for row, mark in live:
            check(row, mark)
        assert {id(row) for row in rows.rows} == {id(row) for row, _ in live}


def test_bytes_are_fixed_per_token_and_bounded_by_the_window() -> None:
    assert FULL.bytes_at(7) == 7 * (2 * 4 + 2 * 6) * 4
    assert WINDOW.bytes_at(7) == 7 * 8 * 4
    assert WINDOW.bytes_at(700) == 10 * 8 * 4
    assert STATE.bytes_at(7) == STATE.bytes_at(7000) == 3 * 5 * 4
