"""The text of the kernel before the gated delta rule, run on a CPU: what plain sums find, whatever lines a warp has."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

import emulation
from weft.kernels import cuda, cuda_cache
from weft.kernels.cuda import DeltaLayout, LineSpans

BF = mx.bfloat16
TAPS = 4
COUNTS = (1, 9, 2, 30, 3)  # lines of the rows: some begin and end amid what a warp has

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="needs a compiler for x86")


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_cache.CudaKernel, "__call__", emulation.call)
        yield


def layout_of(dim: int) -> DeltaLayout:
    channels = 4 * dim
    return DeltaLayout(1, 2, dim, dim, (channels, channels, channels + 8), dim, 2 * dim)


def run(layout: DeltaLayout, projected: mx.array, state: mx.array, taps: mx.array, counts: tuple[int, ...]) -> list[np.ndarray]:
    found = cuda.delta_inputs(projected, state, taps, LineSpans.of(counts), layout)
    return [np.array(one.astype(mx.float32)) for one in found]


def arrays_of(layout: DeltaLayout, width: int) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(3)
    channels = 4 * layout.key_dim
    projected = mx.random.normal((sum(COUNTS), width)).astype(BF)
    return (
        projected,
        mx.random.normal((len(COUNTS), TAPS - 1, channels)).astype(BF),
        mx.random.normal((channels, TAPS)).astype(BF),
    )


def plain(layout: DeltaLayout, projected: mx.array, state: mx.array, taps: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """Each row's channels by plain sums, and its next columns."""
    dim, mixed, columns, first = layout.key_dim, [], [], 0
    lines, before, weights = (np.array(one.astype(mx.float32)) for one in (projected, state, taps))
    for row, count in enumerate(COUNTS):
        inputs = np.concatenate([before[row], lines[first : first + count, : 4 * dim]])
        sums = sum(inputs[tap : tap + count] * weights[:, tap] for tap in range(TAPS))
        found = (sums / (1 + np.exp(-sums))).reshape(count, 4, dim)
        lengths = np.sqrt((found[:, :2] ** 2).sum(-1, keepdims=True) + 1e-6)
        found[:, :2] /= lengths * np.array([dim**0.5, 1.0])[None, :, None]
        mixed.append(found.reshape(count, -1))
        columns.append(inputs[-(TAPS - 1) :])
        first += count
    return np.concatenate(mixed), np.stack(columns)


@pytest.mark.parametrize(("dim", "further"), [(128, 8), (128, 7), (64, 8)], ids=["four channels", "odd lines", "one channel"])
def test_channels_and_next_columns_are_those_of_plain_sums(dim: int, further: int) -> None:
    layout = layout_of(dim)
    arrays = arrays_of(layout, 4 * dim + further)
    mixed, columns = run(layout, *arrays, COUNTS)
    expected, following = plain(layout, *arrays)

    assert np.abs(mixed - expected).max() < 0.05 * np.abs(expected).max()
    assert np.array_equal(columns, following)


@pytest.mark.parametrize("dim", [128, 64])
def test_bits_do_not_depend_on_how_many_lines_a_warp_has(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(dim)
    arrays = arrays_of(layout, 4 * dim + 8)
    singly = run(layout, *arrays, COUNTS)
    monkeypatch.setattr(cuda, "MANY_LINES", 1)
    in_runs = run(layout, *arrays, COUNTS)

    for one, other in zip(singly, in_runs, strict=True):
        assert np.array_equal(one, other)
