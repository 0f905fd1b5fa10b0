"""Forwards over prompts of any lengths, with plain operations in place of CUDA's kernels: each has the numbers it has alone."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from plain_prompts import PlainOperations
from test_cuda_layers import LLAMA, QWEN, QWEN3, PlainKernels, model_of

from weft.kernels import block_product, cuda_layers, cuda_product, cuda_prompts, ragged
from weft.kernels.block_product import BLOCK, BlockProducts
from weft.kernels.cuda_prompts import RaggedPrompts

each_model = pytest.mark.parametrize("config", [QWEN, LLAMA, QWEN3], ids=lambda config: config["model_type"])
PROMPTS = [[(3 + 5 * row + 7 * n * n) % 64 for n in range(length)] for row, length in enumerate((19, 40, 3, 300))]


@pytest.fixture(autouse=True)
def float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits rounding would hide a fault. Few sizes of blocks are tried: mlx's product of packed weights is slow on a CPU."""
    monkeypatch.setattr(cuda_product, "can_multiply", lambda *_: True)
    monkeypatch.setattr(block_product, "SIZES", (BLOCK, 2 * BLOCK))


def bound(config: dict[str, Any], bits: int = 16) -> tuple[nn.Module, RaggedPrompts]:
    model = model_of(config, bits)
    cuda_layers.bind_steps(model, PlainKernels, PlainKernels)
    prompts = cuda_prompts.bind(model, BlockProducts(PlainKernels.product), PlainOperations)
    assert prompts is not None
    return model, prompts


def run(model: nn.Module, prompts: RaggedPrompts, chunks: list[list[int]], rows: list[list[Any]]) -> list[mx.array]:
    """The logits of each chunk's tokens, all in one forward."""
    lines, caches = prompts.forward_of(rows, chunks)
    logits = model(lines.tokens, cache=caches)[0]
    found = [logits[first:end] for first, end in zip(lines.bounds, lines.bounds[1:], strict=False)]
    mx.eval(found, [cache.state for row in rows for cache in row])
    return found


def states_of(row: list[Any]) -> list[mx.array]:
    """What a row holds of its tokens: not how much room there is behind them."""
    return [
        array[..., : cache.offset, :] if type(cache) is KVCache else array
        for cache in row
        for array in (cache.state[:2] if type(cache) is KVCache else cache.cache)
    ]


@pytest.mark.parametrize("bits", [16, 4])
@each_model
def test_a_prompt_is_what_the_plain_layers_compute(config: dict[str, Any], bits: int) -> None:
    plain = [model_of(config, bits)(mx.array([prompt]))[0] for prompt in PROMPTS]
    model, prompts = bound(config, bits)
    found = run(model, prompts, PROMPTS, [make_prompt_cache(model) for _ in PROMPTS])

    for own, right in zip(found, plain, strict=True):
        assert mx.abs(own - right).max() < 1e-4 * (right.max() - right.min())


@each_model
def test_prompts_together_have_the_bits_that_each_has_alone(config: dict[str, Any]) -> None:
    model, prompts = bound(config)
    rows, apart = ([make_prompt_cache(model) for _ in PROMPTS] for _ in range(2))
    together = run(model, prompts, PROMPTS, rows)
    alone = [run(model, prompts, [prompt], [row])[0] for prompt, row in zip(PROMPTS, apart, strict=True)]

    for at in range(len(PROMPTS)):
        assert mx.array_equal(together[at], alone[at])
        assert all(mx.array_equal(*pair) for pair in zip(states_of(rows[at]), states_of(apart[at]), strict=True))


@each_model
def test_a_prompt_has_the_same_bits_wherever_it_is_cut_and_in_any_company(config: dict[str, Any]) -> None:
    model, prompts = bound(config)
    whole = [run(model, prompts, [prompt], [make_prompt_cache(model)])[0] for prompt in PROMPTS]
    rows = [make_prompt_cache(model) for _ in PROMPTS]
    first = run(model, prompts, [PROMPTS[1][:7], PROMPTS[3][:260]], [rows[1], rows[3]])
    second = run(model, prompts, [PROMPTS[3][260:261], PROMPTS[0], PROMPTS[1][7:]], [rows[3], rows[0], rows[1]])
    third = run(model, prompts, [PROMPTS[3][261:]], [rows[3]])

    assert mx.array_equal(mx.concatenate([first[0], second[2]]), whole[1])
    assert mx.array_equal(mx.concatenate([first[1], second[0], third[0]]), whole[3])
    assert mx.array_equal(second[1], whole[0])


@each_model
def test_a_step_goes_on_from_a_prompt(config: dict[str, Any]) -> None:
    plain = model_of(config, 16)
    right = plain(mx.array([[*PROMPTS[0], 9]]))[0, -1]
    model, prompts = bound(config)
    row = make_prompt_cache(model)
    run(model, prompts, [PROMPTS[0]], [row])
    found = model(mx.array([[9]]), cache=row)[0, -1]

    assert mx.abs(found - right).max() < 1e-4 * (right.max() - right.min())


def test_keys_and_values_grow_as_mlx_lm_s_cache_lets_them() -> None:
    model, prompts = bound(LLAMA)
    row = make_prompt_cache(model)
    for cache in row:
        cache.step = 512  # of a prompt of 300 tokens: what comes later finds room
    run(model, prompts, [PROMPTS[3][:200]], [row])
    planes = [id(cache.keys) for cache in row]
    run(model, prompts, [PROMPTS[3][200:]], [row])

    assert [cache.offset for cache in row] == [300] * len(row)
    assert [cache.keys.shape[2] for cache in row] == [512] * len(row)
    assert len({*planes}) == len(row)


def test_a_model_with_a_layer_of_another_kind_has_no_such_forward() -> None:
    model = model_of(QWEN, 16)
    assert cuda_prompts.bind(model, BlockProducts(PlainKernels.product), PlainOperations) is None  # not bound for steps

    cuda_layers.bind_steps(model, PlainKernels, PlainKernels)
    windowed = copy.copy(LLAMA) | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}
    other = model_of(windowed, 16)
    cuda_layers.bind_steps(other, PlainKernels, PlainKernels)
    assert cuda_prompts.bind(other, BlockProducts(PlainKernels.product), PlainOperations) is None


def test_a_model_whose_products_depend_on_neighbours_has_no_such_forward() -> None:
    def summed(x: mx.array, weight: cuda_product.Weight) -> mx.array:
        return PlainKernels.product(x, weight) + 1e-6 * mx.max(x)

    model = model_of(QWEN, 16)
    cuda_layers.bind_steps(model, PlainKernels, PlainKernels)

    assert cuda_prompts.bind(model, BlockProducts(summed), PlainOperations) is None


def test_lines_are_filled_up_to_blocks() -> None:
    model, prompts = bound(LLAMA)
    lines, _ = prompts.forward_of([make_prompt_cache(model) for _ in range(3)], [[5] * 200, [6] * 56, [7]])

    assert lines.num_lines == 2 * BLOCK
    assert lines.bounds == [0, 200, 256, 257]
    assert lines.tokens[0, 199:258].tolist() == [5, *[6] * 56, 7, 0]
    assert lines.positions.tolist()[198:258] == [198, 199, *range(56), 0, 0]


@pytest.mark.parametrize("config", [LLAMA], ids=["llama"])
def test_a_forward_takes_one_array_of_numbers_to_the_device(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    to_device = ragged.array_to_device

    def counted(numbers: Any) -> mx.array:
        made.append(len(numbers))
        return to_device(numbers)

    monkeypatch.setattr(ragged, "array_to_device", counted)
    model, prompts = bound(config)
    rows = [make_prompt_cache(model) for _ in range(2)]
    for chunks in ([PROMPTS[3][:250], PROMPTS[0]], [PROMPTS[3][250:], PROMPTS[1]]):  # new rows, and rows that outgrow their room
        made.clear()
        run(model, prompts, chunks, rows)
        assert len(made) == 1
