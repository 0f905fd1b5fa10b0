"""The text of the kernels of prompts, run on a CPU: what plain sums find, and a token's bits whatever chunk it is in."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from on_fibers import Arrays, EmulatedKernel, FiberKernel, from_bits, needs_compiler, to_bits
from plain_prompts import PlainOperations
from test_cuda_layers import QWEN, PlainKernels, model_of

from weft.kernels import block_product, cuda_layers, cuda_prompts, ragged
from weft.kernels.block_product import BlockProducts
from weft.kernels.cuda import DeltaLayout
from weft.kernels.cuda_prompts import RaggedPrompts
from weft.kernels.ragged import PAIRS, RaggedLines, own_lines

pytestmark = needs_compiler()
ORDERS = pytest.mark.parametrize(("late", "reversed_order"), [(True, False), (False, True)], ids=["late", "early-reversed"])
HEADS, GROUP = 2, 3
LENGTHS = (70, 130, 9, 64)  # tokens of the rows
SCALE = 0.3


def numbers_of(*shape: int, seed: int) -> np.ndarray:
    return to_bits(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def plain_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Causal attention of one row's tokens (tokens, heads, dim)."""
    queries, keys, values = (from_bits(one).astype(np.float64) for one in (queries, keys, values))
    keys, values = np.repeat(keys, GROUP, axis=1), np.repeat(values, GROUP, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) * SCALE
    scores[:, ~np.tri(len(queries), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), values)


class Attention:
    """Rows of keys, values and queries, and their attention in chunks that the caller chooses."""

    def __init__(self, folder: Path, dim: int) -> None:
        self.dim = dim
        self.rows = [
            {name: numbers_of(length, heads, dim, seed=7 * row + at) for at, (name, heads) in enumerate(
                (("queries", HEADS * GROUP), ("keys", HEADS), ("values", HEADS)))}
            for row, length in enumerate(LENGTHS)
        ]  # fmt: skip
        scale = f"constexpr float SCALE = {SCALE * math.log2(math.e)!r}f;"
        self.kernel = FiberKernel(
            folder, "attend_prompt", {"HEADS": HEADS, "GROUP": GROUP, "DIM": dim}, self.arrays([(0, 0, 1)]), scale
        )

    def arrays(self, chunks: list[tuple[int, int, int]]) -> Arrays:
        """The kernel's arrays for chunks (row, start, end); what the rows hold beyond their chunks' ends is not numbers."""
        lines = RaggedLines([[1] * (end - start) for _, start, end in chunks], [start for _, start, _ in chunks])
        packed = {name: np.concatenate([self.rows[row][name][start:end] for row, start, end in chunks]) for name in self.rows[0]}
        for name, own in packed.items():
            filling = np.full((lines.num_lines - len(own), *own.shape[1:]), 0x7FC0, np.uint16)
            packed[name] = np.concatenate([own, filling])
        capacities = tuple(end + 5 + row for row, _, end in chunks)
        earlier = {}
        for name in ("keys", "values"):
            planes = [np.full((HEADS, capacity, self.dim), 0x7FC0, np.uint16) for capacity in capacities]
            for plane, (row, _, end) in zip(planes, chunks, strict=True):
                plane[:, :end] = self.rows[row][name][:end].swapaxes(0, 1)
            held = [plane.reshape(-1) for plane, (_, start, _) in zip(planes, chunks, strict=True) if start]
            earlier[f"earlier_{name}"] = np.concatenate(held) if held else packed[name].reshape(-1)
        numbers = {"tiles": np.array(lines.tiles_of(GROUP)), "rows": np.array(lines.rows_of(capacities))}
        return {**packed, **earlier, **numbers, "out": np.full_like(packed["queries"], 0x7FC0)}

    @functools.cached_property
    def whole(self) -> list[np.ndarray]:
        return self(WHOLE)

    def __call__(self, chunks: list[tuple[int, int, int]], **order: bool) -> list[np.ndarray]:
        """The bits of each chunk's attention."""
        arrays = self.arrays(chunks)
        self.kernel(arrays, (len(arrays["tiles"]) // 2, HEADS, 1), **order)
        bounds = np.cumsum([0, *(end - start for _, start, end in chunks)])
        return [arrays["out"][first:end] for first, end in itertools.pairwise(bounds)]


@pytest.fixture(scope="module", params=[96, 128])
def attention(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Attention:
    return Attention(tmp_path_factory.mktemp("attention"), request.param)


WHOLE = [(row, 0, length) for row, length in enumerate(LENGTHS)]


@ORDERS
def test_attention_is_what_plain_sums_find(attention: Attention, late: bool, reversed_order: bool) -> None:
    found = attention(WHOLE, late=late, reversed_order=reversed_order)

    for row, own in zip(attention.rows, found, strict=True):
        right = plain_attention(row["queries"], row["keys"], row["values"])
        assert np.abs(from_bits(own) - right).max() < 0.03


@pytest.mark.parametrize(
    "chunks",
    [[(1, 0, 130)], [(1, 0, 50), (3, 0, 64)], [(3, 1, 64), (1, 50, 130), (0, 30, 70)], [(0, 0, 9), (1, 129, 130), (2, 8, 9)]],
    ids=["alone", "begun", "going-on", "one-token"],
)
def test_a_token_has_its_bits_in_every_chunk_and_company(attention: Attention, chunks: list[tuple[int, int, int]]) -> None:
    whole = attention.whole
    found = attention(chunks)

    for (row, start, end), own in zip(chunks, found, strict=True):
        assert np.array_equal(own, whole[row][start:end])


def test_every_pair_of_a_line_and_a_head_is_in_one_tile() -> None:
    lines = RaggedLines([[1] * 70, [1], [1] * 33], [0, 500, 7])
    tiles = np.array(lines.tiles_of(GROUP)).reshape(-1, 2)
    pairs = {(row, pair) for row, first in tiles.tolist() for pair in range(first, min(first + PAIRS, lines.counts[row] * GROUP))}

    assert pairs == {(row, pair) for row, count in enumerate(lines.counts) for pair in range(count * GROUP)}
    assert tiles[0].tolist() == [1, 0]  # it reads most keys, so it is begun first


# The gated delta rule.

ROWS = (40, 1, 16, 33)


class Rule:
    """Rows of a gated delta layer's lines, and the rule over chunks of them that the caller chooses."""

    def __init__(self, folder: Path, key_dim: int) -> None:
        self.layout = layout = layout_of(key_dim)
        self.mixed = [numbers_of(count, layout.widths[0], seed=row) for row, count in enumerate(ROWS)]
        self.mixed = [to_bits(from_bits(own) * 0.2) for own in self.mixed]
        self.projected = [numbers_of(count, layout.widths[2], seed=50 + row) for row, count in enumerate(ROWS)]
        self.rates = np.random.default_rng(1).normal(size=layout.heads).astype(np.float32)
        self.bias = numbers_of(layout.heads, seed=99)
        states = np.random.default_rng(3).normal(size=(len(ROWS), layout.heads, layout.value_dim, key_dim))
        self.states = states.astype(np.float32)
        arrays = self.arrays([(0, 0, 1)], self.states[:1])
        self.kernels = {
            own: FiberKernel(folder, "delta_prompt", {**dict(layout.template), "OWN": own}, arrays) for own in (1, 2, 4)
        }

    def arrays(self, chunks: list[tuple[int, int, int]], states: np.ndarray) -> Arrays:
        mixed = np.concatenate([self.mixed[row][start:end] for row, start, end in chunks])
        projected = np.concatenate([self.projected[row][start:end] for row, start, end in chunks])
        starts = np.cumsum([0, *(end - start for _, start, end in chunks)]).astype(np.int32)
        names = {"query": mixed, "key": mixed, "value": mixed, "fading": projected, "writing": projected}
        fixed = {"log_rate": self.rates, "bias": self.bias, "state": np.ascontiguousarray(states), "starts": starts}
        out = np.zeros((len(mixed), self.layout.heads, self.layout.value_dim), np.uint16)
        return {**names, **fixed, "out": out, "last": np.zeros_like(states)}

    def __call__(
        self, chunks: list[tuple[int, int, int]], states: np.ndarray, **order: bool
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The bits of each chunk's output, and the rows' last states."""
        arrays, own = self.arrays(chunks, states), own_lines(len(chunks), self.layout.value_dim)
        self.kernels[own](arrays, (self.layout.value_dim // (16 * own), self.layout.heads, len(chunks)), **order)
        starts = arrays["starts"]
        return [arrays["out"][first:end] for first, end in itertools.pairwise(starts)], arrays["last"]


def layout_of(key_dim: int) -> DeltaLayout:
    key_heads, heads, value_dim = 1, 2, 64
    width = 2 * key_heads * key_dim + heads * value_dim
    gates = width + heads * value_dim + 2 * heads
    keys = key_heads * key_dim
    return DeltaLayout(
        key_heads, heads, key_dim, value_dim, (width, width, gates), keys, 2 * keys, gates - heads, gates - 2 * heads
    )


def plain_rule(rule: Rule, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The rule over all tokens of a row, in double precision."""
    layout, mixed, projected = rule.layout, from_bits(rule.mixed[row]), from_bits(rule.projected[row]).astype(np.float64)
    state, outputs = rule.states[row].astype(np.float64), []
    of_head = np.arange(layout.heads) // (layout.heads // layout.key_heads)
    for line, gates in zip(mixed.astype(np.float64), projected, strict=True):
        query, key = (line[at : at + layout.key_at].reshape(layout.key_heads, -1)[of_head] for at in (0, layout.key_at))
        value = line[layout.value_at :].reshape(layout.heads, -1)
        fading = gates[layout.fading_at : layout.fading_at + layout.heads] + from_bits(rule.bias)
        beta = 1 / (1 + np.exp(-gates[layout.writing_at : layout.writing_at + layout.heads]))
        state = state * np.exp(-np.exp(rule.rates) * np.log1p(np.exp(fading)))[:, None, None]
        change = beta[:, None] * (value - np.einsum("hvk,hk->hv", state, key))
        state = state + change[..., None] * key[:, None]
        outputs.append(np.einsum("hvk,hk->hv", state, query))
    return np.stack(outputs), state


@pytest.fixture(scope="module", params=[32, 128])
def rule(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rule:
    return Rule(tmp_path_factory.mktemp("delta"), request.param)


ALL = [(row, 0, count) for row, count in enumerate(ROWS)]


@ORDERS
def test_the_delta_rule_is_what_plain_sums_find(rule: Rule, late: bool, reversed_order: bool) -> None:
    outputs, last = rule(ALL, rule.states, late=late, reversed_order=reversed_order)

    for row, own in enumerate(outputs):
        right, state = plain_rule(rule, row)
        assert np.abs(from_bits(own) - right).max() < 0.02 * np.abs(right).max()
        assert np.allclose(last[row], state, atol=1e-4)


def test_a_prompt_has_its_bits_however_it_is_cut_and_beside_whom(rule: Rule) -> None:
    whole, ends = rule(ALL, rule.states)
    first, states = rule([(3, 0, 17), (0, 0, 5)], rule.states[[3, 0]])
    second, last = rule([(0, 5, 40)], states[[1]])  # one row, two and four: a thread has as many lines
    third, end = rule([(2, 0, 16), (3, 17, 33)], np.stack([rule.states[2], states[0]]))

    assert np.array_equal(np.concatenate([first[1], second[0]]), whole[0])
    assert np.array_equal(np.concatenate([first[0], third[1]]), whole[3])
    assert np.array_equal(third[0], whole[2])
    assert np.array_equal(last[0], ends[0])
    assert np.array_equal(end, ends[[2, 3]])


def test_keys_and_values_of_a_new_row_are_laid_out_with_zeros_behind_them(tmp_path: Path) -> None:
    lines, capacities = RaggedLines([[1] * 7, [1] * 20, [1] * 3], [0, 0, 9]), (16, 48, 16)
    keys, values = (numbers_of(lines.num_lines, HEADS, 32, seed=seed) for seed in (1, 2))
    plane = np.full((HEADS, 48, 32), 0x7FC0, np.uint16)
    row = np.array(lines.row_of(1, capacities))
    arrays = {"keys": keys, "values": values, "row": row, "key_plane": plane, "value_plane": plane.copy()}
    FiberKernel(tmp_path, "prompt_planes", {"HEADS": HEADS, "DIM": 32}, arrays)(arrays, (-(-plane.size // (8 * 128)), 1, 1))

    for name, own in (("key_plane", keys), ("value_plane", values)):
        assert np.array_equal(arrays[name][:, :20], own[7:27].swapaxes(0, 1))
        assert not arrays[name][:, 20:].any()


# All of it in a model.


class EmulatedOperations(PlainOperations):
    """Plain operations, but for those whose kernels are here."""

    attend = staticmethod(ragged.attend)  # type: ignore[assignment]
    delta_rule = staticmethod(ragged.delta_rule)  # type: ignore[assignment]
    new_planes = staticmethod(ragged.new_planes)  # type: ignore[assignment]
    gate_lines = staticmethod(ragged.gate_lines)  # type: ignore[assignment]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    makers = (ragged._attend_kernel, ragged._planes_kernel, ragged._delta_kernel, ragged._gate_kernel)
    monkeypatch.setattr(ragged, "CudaKernel", EmulatedKernel)
    monkeypatch.setattr(EmulatedKernel, "folder", tmp_path, raising=False)
    monkeypatch.setattr(block_product, "SIZES", (block_product.BLOCK,))
    for maker in makers:
        maker.cache_clear()
    yield
    for maker in makers:
        maker.cache_clear()


@pytest.mark.usefixtures("emulated")
def test_a_model_computed_by_the_kernels_is_the_model_and_its_prompts_have_their_bits_in_any_company() -> None:
    model = model_of(QWEN, 16)
    model.set_dtype(mx.bfloat16)
    cuda_layers.bind_steps(model, PlainKernels, PlainKernels)
    plain, own = (
        cuda_prompts.bind(model, BlockProducts(PlainKernels.product), kind) for kind in (PlainOperations, EmulatedOperations)
    )
    assert plain is not None
    assert own is not None
    chunks = [[3 * n % 64 for n in range(20)], [5 * n % 64 for n in range(33)], [7]]

    def run(prompts: RaggedPrompts, chunks: list[list[int]], rows: list[list[Any]]) -> list[mx.array]:
        lines, caches = prompts.forward_of(rows, chunks)
        logits = model(lines.tokens, cache=caches)[0]
        return [logits[first:end] for first, end in itertools.pairwise(lines.bounds)]

    right = run(plain, chunks, [make_prompt_cache(model) for _ in chunks])
    whole = run(own, chunks, [make_prompt_cache(model) for _ in chunks])
    rows = [make_prompt_cache(model) for _ in chunks]
    first = run(own, [chunks[1][:19]], rows[1:2])
    second = run(own, [chunks[0], chunks[1][19:]], rows[:2])

    for found, wanted in zip(whole, right, strict=True):
        assert mx.abs(found - wanted).max() < 0.06 * mx.abs(wanted).max()  # bf16 through four layers
    assert mx.array_equal(second[0], whole[0])
    assert mx.array_equal(mx.concatenate([first[0], second[1]]), whole[1])
