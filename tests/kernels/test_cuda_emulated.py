"""The texts of the CUDA kernels, run on a CPU by an emulation of the device: numbers, and which bits do not depend on what."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import emulation
from weft.kernels import cuda_cache, cuda_product
from weft.kernels.cuda_product import Weight, embed, gated_product, product, product_in_parts
from weft.kernels.cuda_sizes import FewSizes, ManySizes, ProductEnding

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel runs on the CPU."""
    monkeypatch.setattr(cuda_cache.CudaKernel, "__call__", emulation.call)


def weight_of(rows: int, width: int, bits: int, dtype: mx.Dtype = mx.bfloat16) -> tuple[Weight, mx.array]:
    """A random weight, and its numbers unpacked."""
    numbers = mx.random.normal((rows, width)).astype(dtype)
    if bits == 16:
        return Weight(numbers), numbers
    packed = mx.quantize(numbers, 64, bits)
    return Weight(*packed, bits), mx.dequantize(*packed, 64, bits)


def numbers(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32))


def difference(found: mx.array, wanted: np.ndarray[Any, Any]) -> float:
    """The largest difference in units of the spread."""
    return float(np.abs(numbers(found) - wanted).max() / wanted.std())


@pytest.mark.parametrize(("bits", "dtype"), [(16, mx.bfloat16), (8, mx.bfloat16), (4, mx.bfloat16), (4, mx.float16)], ids=str)
def test_a_line_has_the_same_bits_among_any_number_of_lines(bits: int, dtype: mx.Dtype) -> None:
    mx.random.seed(1)
    weight, unpacked = weight_of(200, 640, bits, dtype)
    x = mx.random.normal((140, 640)).astype(dtype)
    alone = product(x[:1], weight)

    for lines in (7, 16, 30, 60, 140):
        assert mx.array_equal(product(x[:lines], weight)[:1], alone)
    assert difference(product(x, weight), numbers(x) @ numbers(unpacked).T) < 0.05


@pytest.mark.parametrize(
    ("sizes", "bits"), [(ManySizes(5, 4), 16), (ManySizes(2, 2), 4), (ManySizes(1, 1), 8), (FewSizes(2, 32, 4), 16)], ids=repr
)
def test_a_product_s_endings_have_the_same_sums_in_blocks_of_any_size(
    sizes: ManySizes | FewSizes, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(2)
    weight, _ = weight_of(176, 512, bits)
    x = mx.random.normal((37, 512)).astype(mx.bfloat16)
    plain = mx.concatenate([product(x[at : at + 8], weight) for at in range(0, 37, 8)])
    gated = mx.concatenate([gated_product(x[at : at + 8], weight) for at in range(0, 37, 8)])

    def chosen(*given: Any) -> ManySizes | FewSizes:
        is_apart = given[4] is ProductEnding.APART and isinstance(sizes, ManySizes)
        return sizes._replace(splits=8) if is_apart else sizes  # type: ignore[call-arg]

    monkeypatch.setattr(cuda_product, "choose_sizes", chosen)
    parts = product_in_parts(x, weight)

    assert mx.array_equal(product(x, weight), plain)
    assert mx.array_equal(gated_product(x, weight), gated)
    if isinstance(sizes, ManySizes):
        assert parts.shape == (8, 37, 176)
        assert mx.array_equal(added(parts).astype(mx.bfloat16), plain)
    gate, up = np.split(numbers(plain), 2, axis=1)
    wanted = gate / (1 + np.exp(-gate)) * up
    assert np.abs(numbers(gated) - wanted).max() <= 0.01 * np.abs(wanted).max()


def added(parts: mx.array) -> mx.array:
    """The sum of a product's segments in their order."""
    total = mx.zeros(parts.shape[1:])
    for part in parts:
        total = total + part
    return total


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_embeddings_are_rows_of_the_weight(bits: int) -> None:
    mx.random.seed(4)
    weight, unpacked = weight_of(50, 192, bits)
    tokens = mx.array([[3], [49], [0]], mx.int32)

    found = embed(tokens, weight)

    assert found.shape == (3, 1, 192)
    assert difference(found, numbers(unpacked[tokens])) < 0.01


def test_a_width_of_which_threads_read_less_than_16_bytes_at_once() -> None:
    mx.random.seed(3)
    weight, unpacked = weight_of(64, 576, 4)
    x = mx.random.normal((40, 576)).astype(mx.bfloat16)

    found = product(x, weight)

    assert mx.array_equal(found[:3], product(x[:3], weight))
    assert difference(found, numbers(x) @ numbers(unpacked).T) < 0.05
