"""Products in blocks: any number of lines, blocks of sizes whose bits agree; products that depend on company are refused."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as some

from weft.kernels import block_product
from weft.kernels.block_product import BLOCK, SIZES, BlockProducts, find_sizes
from weft.kernels.cuda_product import Weight, prompt_product


def weight_of(bits: int = 16, outputs: int = 48) -> Weight:
    mx.random.seed(2)
    layer = nn.Linear(128, outputs, bias=False)
    return Weight(layer.weight) if bits == 16 else _packed(nn.QuantizedLinear.from_linear(layer, 32, bits))


def _packed(layer: nn.QuantizedLinear) -> Weight:
    return Weight(layer.weight, layer.scales, layer.biases, layer.bits)


def lines_of(count: int) -> mx.array:
    return mx.random.normal((count, 128), key=mx.random.key(count))


def by_number_of_lines(x: mx.array, weight: Weight) -> mx.array:
    """A product that adds K in two halves for many lines, as cuBLAS may."""
    if x.shape[0] < 4 * BLOCK:
        return prompt_product(x, weight)
    half = x.shape[1] // 2
    return x[:, :half] @ weight.array[:, :half].T + x[:, half:] @ weight.array[:, half:].T


def divided_for_few(x: mx.array, weight: Weight) -> mx.array:
    """A product that divides K for a few lines, as cuBLAS may, and adds in another order for all that are more."""
    return by_number_of_lines(mx.concatenate([x] * 4), weight)[: x.shape[0]] if x.shape[0] <= BLOCK else prompt_product(x, weight)


def by_place(x: mx.array, weight: Weight) -> mx.array:
    return prompt_product(x, weight) * (1 + 1e-6 * (mx.arange(x.shape[0]) % 16)[:, None])


def by_neighbours(x: mx.array, weight: Weight) -> mx.array:
    return prompt_product(x, weight) + 0 * x.sum()


@pytest.mark.parametrize("bits", [16, 4])
def test_a_product_whose_lines_are_independent_may_have_blocks_of_all_sizes(bits: int) -> None:
    assert find_sizes(weight_of(bits)) == SIZES


def test_sizes_whose_bits_differ_are_not_used() -> None:
    products = BlockProducts(by_number_of_lines)

    assert products.try_sizes(weight_of())
    assert find_sizes(weight_of(), by_number_of_lines) == (BLOCK, 2 * BLOCK, 3 * BLOCK)
    assert [end - start for start, end in products.blocks(7 * BLOCK, weight_of())] == [3 * BLOCK, 3 * BLOCK, BLOCK]


def test_where_only_few_lines_differ_the_smallest_block_is_larger() -> None:
    products, weight = BlockProducts(divided_for_few), weight_of()

    assert products.try_sizes(weight)
    assert find_sizes(weight, divided_for_few) == SIZES[1:]
    assert list(products.blocks(3 * BLOCK, weight)) == [(0, 3 * BLOCK)]
    assert list(products.blocks(BLOCK, weight)) == [(0, BLOCK)]
    lines = lines_of(5 * BLOCK)
    assert mx.array_equal(products(lines[:BLOCK], weight), products(lines, weight)[:BLOCK])  # filled up to two blocks
    assert mx.array_equal(products(lines[:BLOCK], weight), prompt_product(lines[:BLOCK], weight))


@pytest.mark.parametrize("multiply", [by_place, by_neighbours])
def test_a_product_that_depends_on_place_or_neighbours_is_refused(multiply: block_product.Product) -> None:
    products = BlockProducts(multiply)

    assert not products.try_sizes(weight_of())
    assert products(lines_of(5), weight_of()).shape == (5, 48)  # and used, in blocks of one size, for a prompt alone


def test_a_product_that_does_not_run_is_refused() -> None:
    def broken(*_: object) -> mx.array:
        raise RuntimeError("no compiler")

    assert not BlockProducts(broken).try_sizes(weight_of())


def test_a_shape_is_tried_once() -> None:
    tried = []

    def counting(x: mx.array, weight: Weight) -> mx.array:
        tried.append(x.shape)
        return prompt_product(x, weight)

    products = BlockProducts(counting)
    products.try_sizes(weight_of())
    count = len(tried)
    assert {shape[0] for shape in tried} == {*SIZES}

    products.try_sizes(weight_of())
    assert len(tried) == count
    products.try_sizes(weight_of(outputs=64))
    assert len(tried) > count


def test_very_wide_results_are_tried_in_small_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_product, "MOST_NUMBERS", 48 * 600)

    assert find_sizes(weight_of()) == (BLOCK, 2 * BLOCK)


@given(some.integers(1, 3000))
def test_any_number_of_lines_is_multiplied_in_blocks_of_constant_numbers(count: int) -> None:
    seen = []

    def noting(x: mx.array, weight: Weight) -> mx.array:
        seen.append(x.shape[0])
        return mx.zeros((x.shape[0], weight.array.shape[0]))

    products = BlockProducts(noting)
    products.sizes = {block_product._kind(weight_of()): SIZES}

    assert products(mx.zeros((1, count, 128)), weight_of()).shape == (1, count, 48)
    assert {*seen} <= {*SIZES}
    assert sum(seen) == -(-count // BLOCK) * BLOCK
    assert len(seen) <= 2


@pytest.mark.parametrize("count", [1, 255, 256, 700])
def test_a_line_has_the_bits_of_its_block_among_any_number_of_lines(count: int) -> None:
    products, weight = BlockProducts(by_number_of_lines), weight_of()
    products.try_sizes(weight)
    lines = lines_of(3000)
    found = products(lines[:count], weight)

    assert mx.array_equal(found, products(lines, weight)[:count])
    assert mx.array_equal(found[:1], products(lines[:1], weight))
