"""What a layer writes in a step must have the geometry of its spec; anything else is an error that names the place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from weft.errors import InternalError
from weft.memory.slabs import Pool, RowState
from weft.memory.spec import FullAttention, KeyValues, LayerSpec, Plane, Recurrent
from weft.memory.views import Batch, KeyValueView, StateView, make_batches

LENGTHS = (5, 9)  # of two rows in one slab
SPECS: list[LayerSpec] = [
    Recurrent((((3, 5), mx.float32), None)),
    FullAttention(Plane(2, 4, mx.float32), Plane(2, 6, mx.float32)),
]


def batch(*, seam: bool) -> Batch:
    pool = Pool(SPECS, slab_tokens=256, max_rows=4)
    rows = [RowState() for _ in LENGTHS]
    for row, length in zip(rows, LENGTHS, strict=True):
        held = KeyValues(mx.zeros((1, 2, length, 4)), mx.zeros((1, 2, length, 6)))
        pool.allocate(row, [(mx.zeros((1, 3, 5)), None), held], length, upcoming=LENGTHS)
    (made,) = make_batches(pool, rows, seam=seam, width=None)
    return made


@pytest.mark.parametrize("seam", [True, False])
@pytest.mark.parametrize(
    ("keys", "values", "words"),
    [
        ((1, 2, 1, 4), (1, 2, 1, 6), "keys of a step are (1, 2, 1, 4) float32 instead of (2, 2, 1, 4) float32 (axis 0)"),
        ((2, 1, 1, 4), (2, 2, 1, 6), "keys of a step are (2, 1, 1, 4) float32 instead of (2, 2, 1, 4) float32 (axis 1)"),
        ((2, 2, 3, 4), (2, 2, 3, 6), "keys of a step are (2, 2, 3, 4) float32 instead of (2, 2, 1, 4) float32 (axis 2)"),
        ((2, 2, 1, 4), (2, 2, 1, 1), "values of a step are (2, 2, 1, 1) float32 instead of (2, 2, 1, 6) float32 (axis 3)"),
        ((2, 2, 4), (2, 2, 6), "keys of a step are (2, 2, 4) float32 instead of (2, 2, 1, 4) float32 (number of axes)"),
    ],
)
def test_keys_and_values_of_another_shape_are_not_written(
    seam: bool, keys: tuple[int, ...], values: tuple[int, ...], words: str
) -> None:
    """An axis of one would otherwise be written everywhere along it."""
    view = KeyValueView(batch(seam=seam), 1)

    with pytest.raises(InternalError) as error:
        view.update_and_fetch(mx.ones(keys), mx.ones(values))

    assert str(error.value) == f"layer 1: {words}"
    assert not any(np.array(plane).any() for plane in view.planes(view.batch.parts[0]))


def test_keys_and_values_of_another_dtype_are_converted_as_in_mlx_lms_caches() -> None:
    view = KeyValueView(batch(seam=True), 1)
    view.update_and_fetch(mx.ones((2, 2, 1, 4), mx.float16), mx.ones((2, 2, 1, 6), mx.float16))

    keys, values = view.planes(view.batch.parts[0])
    assert (keys.dtype, values.dtype) == (mx.float32, mx.float32)
    assert [int(keys[row, 0, :, 0].sum()) for row in range(2)] == [1, 1]


@pytest.mark.parametrize("seam", [True, False])
@pytest.mark.parametrize(
    ("index", "state", "words"),
    [
        (0, mx.ones((1, 3, 5)), "(1, 3, 5) float32 instead of (2, 3, 5) float32 (axis 0)"),
        (0, mx.ones((2, 3, 4)), "(2, 3, 4) float32 instead of (2, 3, 5) float32 (axis 2)"),
        (0, mx.ones((2, 15)), "(2, 15) float32 instead of (2, 3, 5) float32 (number of axes)"),
        (0, mx.ones((2, 3, 5), mx.float16), "(2, 3, 5) float16 instead of (2, 3, 5) float32 (dtype)"),
        (1, mx.ones((2, 3, 5)), "(2, 3, 5) float32 instead of missing"),
    ],
)
def test_a_state_of_another_geometry_is_not_kept(seam: bool, index: int, state: mx.array, words: str) -> None:
    view = StateView(batch(seam=seam), 0)
    before = view[index]

    with pytest.raises(InternalError) as error:
        view[index] = state

    assert str(error.value) == f"layer 0: state {index} became {words}"
    assert view[index] is before
