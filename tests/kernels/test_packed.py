"""Weights that stay packed: the product, the embedding and the experts have the bits of a float32 copy of the same weights."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from weft.kernels import cpu, packed, primitives

pytestmark = pytest.mark.skipif(not cpu.is_bound(mx.float32), reason="needs weft's own operations")

SETS = ("avx512", "avx512_tiled", "avx2", "plain", "plain_tiled")
PACKINGS = [(bits, group, "affine") for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)] + [
    (4, 32, "mxfp4"),
    (4, 16, "nvfp4"),
]


def same(found: mx.array, right: mx.array) -> bool:
    return found.shape == right.shape and np.array(found).tobytes() == np.array(right).tobytes()


def expanded(layer: nn.Module) -> mx.array:
    scales = [None if layer.get(name) is None else layer[name] for name in ("scales", "biases")]
    wide = [one.astype(mx.float32) if one is not None and one.dtype in packed.HALVES else one for one in scales]
    options = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(layer["weight"], *wide, **options, dtype=mx.float32)


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize(("bits", "group", "mode"), PACKINGS)
@pytest.mark.parametrize("scales", [mx.float32, mx.float16, mx.bfloat16])
def test_a_packed_product_has_the_bits_of_a_float32_copy(bits: int, group: int, mode: str, scales: mx.Dtype) -> None:
    mx.random.seed(bits)
    layer = nn.Linear(384, 50, bias=True)
    layer.weight = mx.random.normal((50, 384)).astype(scales)
    layer = layer.to_quantized(group_size=group, bits=bits, mode=mode)
    copy = nn.Linear(384, 50)
    copy.weight, copy.bias = expanded(layer), layer.bias
    both = nn.Sequential(layer, copy)
    packed.bind(both)

    assert type(both.layers[0]) is packed.PackedLinear
    x = mx.random.normal((300, 384))
    right = both.layers[1](x)
    assert same(right, mx.addmm(copy.bias, x, copy.weight.T))
    for rows in (*range(1, 14), 60, 300):
        assert same(both.layers[0](x[:rows]), right[:rows])


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize(("bits", "group", "mode"), [(4, 32, "affine"), (8, 32, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4")])
def test_rows_of_very_many_groups_have_the_bits_of_a_float32_copy(bits: int, group: int, mode: str) -> None:
    """Rows that no nearest cache holds all of: their sums wait while others take theirs."""
    layer = nn.Linear(5024, 51, bias=False).to_quantized(group_size=group, bits=bits, mode=mode)
    copy = expanded(layer)
    packed.bind(layer)

    for rows in (1, 3, 4, 6, 8, 9, 10, 12, 13):
        x = mx.random.normal((rows, 5024))
        assert same(layer(x), x @ copy.T)


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [129, 133, 141, 180])
def test_what_is_left_of_rows_too_long_to_be_packed_together_has_the_bits_of_a_float32_copy(rows: int, bits: int) -> None:
    """Of rows of 32,768 numbers 128 are packed at a time, so some are left, and fewer of them take another way."""
    layer = nn.Linear(1 << 15, 13, bias=True).to_quantized(group_size=128, bits=bits)
    copy, bias = expanded(layer), layer.bias
    packed.bind(layer)
    x = mx.random.normal((rows, 1 << 15))

    assert same(layer(x), mx.addmm(bias, x, copy.T))


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_sixteen_bits_are_the_numbers_they_are(dtype: mx.Dtype) -> None:
    for k in (1, 5, 16, 40, 577):
        layer = nn.Linear(k, 21, bias=False)
        numbers = mx.concatenate([mx.random.normal((20, k)), mx.random.normal((1, k)) * 1e-6]).astype(dtype)  # some subnormal
        layer.weight = numbers
        packed.bind(layer)
        x = mx.random.normal((3, k))

        assert same(layer(x), x @ numbers.astype(mx.float32).T)


@pytest.mark.parametrize(("bits", "group", "mode"), PACKINGS)
def test_an_embeddings_rows_and_its_product_are_those_of_the_copy(bits: int, group: int, mode: str) -> None:
    layer = nn.Embedding(70, 128).to_quantized(group_size=group, bits=bits, mode=mode)
    copy = expanded(layer)
    packed.bind(layer)
    x = mx.random.normal((2, 128))

    assert same(layer(mx.array([[3, 69], [0, 3]])), copy[mx.array([[3, 69], [0, 3]])])
    assert same(layer.as_linear(x), x @ copy.T)


@pytest.mark.parametrize(("bits", "group", "mode"), PACKINGS)
def test_experts_have_the_bits_of_a_float32_copy(bits: int, group: int, mode: str) -> None:
    layer = SwitchLinear(128, 20, 5, bias=True).to_quantized(group_size=group, bits=bits, mode=mode)
    layer.bias = mx.random.normal((5, 20))
    copy = expanded(layer)
    packed.bind(layer)
    x, chosen = mx.random.normal((2, 7, 1, 1, 128)), mx.random.randint(0, 5, (2, 7, 2)).astype(mx.uint32)

    found = layer(x, chosen)

    assert found.shape == (2, 7, 2, 1, 20)
    rows = []
    for line, experts in zip(x.reshape(-1, 1, 128), chosen.reshape(-1, 2).tolist(), strict=True):
        rows += [line @ copy[expert].T + layer.bias[expert] for expert in experts]
    assert same(found, mx.stack(rows).reshape(found.shape))


def test_weights_packed_in_another_way_are_left_to_mlx() -> None:
    layer = nn.Linear(64, 32).to_quantized(32, 8, "mxfp8")
    packed.bind(layer)

    assert type(layer) is nn.QuantizedLinear


def test_a_layer_whose_weights_are_replaced_computes_with_the_new_ones() -> None:
    layer, x = nn.Linear(32, 8, bias=False), mx.random.normal((2, 32))
    packed.bind(layer)
    before = layer(x)

    layer.weight = 2 * layer.weight

    assert same(layer(x), 2 * before)


def test_products_of_every_size_are_what_numpy_says() -> None:
    """All 343,000 of up to 70 rows, columns and numbers in a row."""
    rng, sizes = np.random.default_rng(3), range(1, 71)
    rows, weights = rng.standard_normal((70, 70), np.float32), rng.standard_normal((70, 70), np.float32)
    for k in sizes:
        right = rows[:, :k].astype(np.float64) @ weights[:, :k].T
        x = [mx.array(rows[:m, :k]) for m in sizes]
        for n in sizes:
            w = primitives.ops.Weights(mx.array(weights[:n, :k]))
            found = [primitives.ops.linear(some, [w]) for some in x]
            mx.eval(found)
            worst = np.max([np.abs(np.array(some) - right[: len(some), :n]).max() for some in found])  # NaN if one is
            assert worst < 1e-5, (n, k)


def test_what_does_not_fit_is_refused_when_the_graph_is_built() -> None:
    weights = primitives.ops.Weights(mx.zeros((4, 32)))

    with pytest.raises(ValueError, match="as long as the weights'"):
        primitives.ops.linear(mx.zeros((2, 31)), [weights])
    with pytest.raises(ValueError, match="as long as the weights'"):
        primitives.ops.linear(mx.zeros((2, 32), mx.float16), [weights])
