"""Which products go to the CUDA kernel: its block sizes, the lines of prompts, and what is not what MLX finds is left to MLX."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as some

from weft.kernels import cuda_product
from weft.kernels.cuda_product import InvariantLinear, is_prompt, prompt_product
from weft.kernels.cuda_sizes import (
    MOST_FEW_LINES,
    SHARED_BYTES,
    WARPS,
    FewSizes,
    ProductEnding,
    choose_sizes,
    grid_of,
    numbers_together,
)


@given(
    some.integers(1, 3000),
    some.integers(16, 300_000),
    some.integers(4, 600),
    some.sampled_from([4, 8, 16]),
    some.sampled_from(ProductEnding),
)
def test_blocks_cover_all_lines_and_rows_and_fit_into_shared_memory(
    lines: int, rows: int, blocks: int, bits: int, ending: ProductEnding
) -> None:
    sizes = choose_sizes(lines, rows, blocks * 32, bits, ending)
    across, down = grid_of(sizes, lines, rows)

    assert across * sizes.lines >= lines
    assert down * sizes.rows >= rows
    assert sizes.splits == 1 or ending is ProductEnding.APART
    if isinstance(sizes, FewSizes):
        assert lines <= MOST_FEW_LINES or numbers_together(bits, blocks * 32) < 16 // bits
        assert 2 <= sizes.ahead <= 8
    else:
        assert sizes.shared_bytes(bits) <= SHARED_BYTES
        assert WARPS % sizes.warp_lines == 0
        assert numbers_together(bits, blocks * 32) == 16 // bits  # a thread reads 16 bytes of a row at once


@given(some.sampled_from([4, 8, 16]), some.integers(4, 600))
def test_a_thread_reads_at_most_16_bytes_at_once_and_whole_blocks_make_up_the_width(bits: int, blocks: int) -> None:
    together = numbers_together(bits, blocks * 32)

    assert 8 * together * bits <= 128
    assert blocks * 32 % (32 * together) == 0


def test_a_chunk_of_one_prompt_is_told_from_a_step() -> None:
    assert is_prompt(mx.zeros((1, 9, 4)))
    assert is_prompt(mx.zeros((4, 9, 4)))
    assert not is_prompt(mx.zeros((1, 8, 4)))
    assert not is_prompt(mx.zeros((9, 1, 4)))
    assert not is_prompt(mx.zeros((300, 4)))


def layers_of(bits: int) -> nn.Module:
    mx.random.seed(1)
    layer = nn.Linear(128, 64, bias=False)
    layer.set_dtype(mx.bfloat16)
    return nn.Sequential(layer if bits == 16 else nn.QuantizedLinear.from_linear(layer, 32, bits))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_layers_use_a_product_that_finds_what_mlx_finds(bits: int) -> None:
    model = layers_of(bits)

    assert cuda_product.bind(model, prompt_product) == []
    assert cuda_product.bind(model, prompt_product) == []  # by a second adapter
    assert type(model.layers[0]).__name__.startswith("Invariant")


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_layers_keep_mlx_s_product_where_the_kernel_finds_something_else(bits: int) -> None:
    model = layers_of(bits)

    assert cuda_product.bind(model, lambda x, weight: prompt_product(x, weight)[:, ::-1]) == ["layers.0"]
    assert not type(model.layers[0]).__name__.startswith("Invariant")


def test_layers_keep_mlx_s_product_where_the_kernel_does_not_run() -> None:
    def broken(*_: object) -> mx.array:
        raise RuntimeError("no compiler")

    model = layers_of(16)

    assert cuda_product.bind(model, broken) == ["layers.0"]
    assert type(model.layers[0]) is nn.Linear


def test_products_of_other_widths_and_kinds_of_numbers_are_left_to_mlx() -> None:
    for layer in (nn.Linear(128, 64), nn.Linear(100, 64, bias=False)):
        assert cuda_product.bind(nn.Sequential(layer), prompt_product) == ["layers.0"]
        assert not isinstance(layer, InvariantLinear)
