"""Kernels over pages and slots, run by the emulation: what single operations find, in place, in any order of blocks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from test_cuda_layers import PlainKernels

import emulation
from weft.kernels import cuda_cache, cuda_paged
from weft.kernels.cuda import DeltaLayout, equal_spans
from weft.kernels.cuda_paged import DeltaArrays, DeltaKind, HeadsLayout, Rotation
from weft.memory.pages import PAGE, ROWS_AT_ONCE, NewRows, StepTable
from weft.memory.spec import KeyValues

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="no C++ compiler")

BF = mx.bfloat16
LENGTHS = (PAGE - 1, 5, 2 * PAGE + 3)  # the first row's second token is the first of a page


@pytest.fixture(autouse=True, params=[False, True], ids=["forward", "backward"])
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel runs on the CPU, its blocks in rising and in falling order."""
    run: Any = partial(emulation.call, is_backward=request.param)
    monkeypatch.setattr(cuda_cache.CudaKernel, "__call__", lambda kernel, **launch: run(kernel, **launch))


def table_of(lengths: tuple[int, ...], tokens: int) -> StepTable:
    """Rows with pages and slots that lie about in no order."""
    fields: list[int] = []
    entries: list[list[int]] = []
    numbers = iter(range(40, 0, -3))
    for row, length in enumerate(lengths):
        fields += [2 * (len(lengths) - row), length, length + 10 * row, len(entries)]
        entries += [[row, next(numbers)] for _ in range(-(-(length + tokens) // PAGE))]
    entries += [[-1, 0]] * 5
    return StepTable(mx.array(fields, mx.int32).reshape(-1, 4), mx.array(entries, mx.int32), mx.zeros(64, mx.int32))


def numbers(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32))


def close(found: mx.array, wanted: mx.array, share: float = 0.02) -> bool:
    right = numbers(wanted)
    return bool(np.abs(numbers(found) - right).max() <= share * max(np.abs(right).max(), 1e-6))


LAYOUT = DeltaLayout(2, 4, 32, 64, (384, 384, 384 + 256 + 8), 64, 128, 384 + 256 + 4, 384 + 256)
TAPS, RING = 4, 3 + 8


def test_a_delta_step_is_the_convolution_the_rule_and_the_norm_one_after_the_other() -> None:
    mx.random.seed(1)
    rows, tokens, channels, slots = 3, 2, 384, 8
    table = table_of(LENGTHS, tokens)
    projected = mx.random.normal((rows * tokens, LAYOUT.widths[2])).astype(BF)
    taps, rate, bias = mx.random.normal((channels, TAPS, 1)).astype(BF), mx.random.normal((4,)), mx.random.normal((4,)).astype(BF)
    norm = mx.random.normal((64,)).astype(BF)
    before, state = mx.random.normal((rows, 3, channels)).astype(BF), mx.random.normal((rows, 4, 64, 32))
    ring, states = mx.full((slots, RING, channels), math.nan).astype(BF), mx.full((slots, 4, 64, 32), math.nan)
    for row, (slot, length, *_) in enumerate(np.array(table.rows).tolist()):
        for column in range(3):
            ring[slot, (length - 3 + column) % RING] = before[row, column]
        states[slot] = state[row]

    found, kept = cuda_paged.delta_step(
        projected, DeltaArrays(taps, rate, bias, norm), (ring, states), table, DeltaKind(LAYOUT, 1e-6), keeps_states=True
    )

    spans = equal_spans(rows, tokens)
    mixed, following = PlainKernels.delta_inputs(projected, before, taps, spans, LAYOUT)
    by_token = (mixed, mixed, mixed, projected, projected)
    output, last, by_line = PlainKernels.delta_rule(by_token, (rate, bias, state), spans, LAYOUT, keeps_states=True)
    wanted = PlainKernels.gated_norm(output, projected, channels, norm, 1e-6)
    assert kept is not None
    assert by_line is not None
    assert close(found, wanted)
    assert close(kept, by_line)
    for row, (slot, length, *_) in enumerate(np.array(table.rows).tolist()):
        assert close(states[slot], last[row])
        newest = [ring[slot, (length + tokens - 3 + column) % RING] for column in range(3)]
        assert mx.array_equal(mx.stack(newest), following[row])


def test_one_token_after_the_other_has_the_bits_of_several_in_one_step() -> None:
    mx.random.seed(2)
    own = DeltaArrays(
        mx.random.normal((384, TAPS, 1)).astype(BF),
        mx.random.normal((4,)),
        mx.random.normal((4,)),
        mx.random.normal((64,)).astype(BF),
    )
    projected = mx.random.normal((3, LAYOUT.widths[2])).astype(BF)
    ring, states = mx.random.normal((3, RING, 384)).astype(BF), mx.random.normal((3, 4, 64, 32))
    copies = mx.array(ring), mx.array(states)
    kind = DeltaKind(LAYOUT, 1e-6)
    together, _ = cuda_paged.delta_step(projected, own, copies, table_of((9,), 3), kind, keeps_states=False)
    apart = [
        cuda_paged.delta_step(projected[at : at + 1], own, (ring, states), table_of((9 + at,), 1), kind, keeps_states=False)[0]
        for at in range(3)
    ]

    assert mx.array_equal(mx.concatenate(apart), together)
    assert mx.array_equal(states, copies[1])
    assert mx.array_equal(ring, copies[0])


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_traditional", [False, True])
def test_heads_are_normalised_turned_and_placed(is_gated: bool, is_traditional: bool) -> None:
    mx.random.seed(3)
    heads, key_heads, dim, tokens, rows = 4, 2, 64, 2, 3
    rope = nn.RoPE(32, is_traditional, base=1e4, scale=0.5)
    rotation = Rotation.of(rope)
    assert rotation is not None
    layout = HeadsLayout(heads, key_heads, dim, is_gated, (1e-6, 1e-5), rotation, 1.0)
    table, wide = table_of(LENGTHS, tokens), dim * (2 if is_gated else 1)
    projected = mx.random.normal((rows * tokens, heads * wide + 2 * key_heads * dim)).astype(BF)
    norms = [(1 + 0.1 * mx.random.normal((dim,))).astype(BF) for _ in range(2)]
    held = KeyValues(mx.zeros((41, key_heads, PAGE, dim), BF), mx.zeros((41, key_heads, PAGE, dim), BF))

    queries = cuda_paged.place_heads(projected, norms, None, held, table, layout)

    asked, keys, values = mx.split(projected, [heads * wide, heads * wide + key_heads * dim], axis=1)
    asked = asked.reshape(rows, tokens, heads, wide)[..., :dim]
    offset = table.rows[:, 2]
    normed = [mx.fast.rms_norm(one, *norm) for one, norm in
              ((asked, (norms[0], 1e-6)), (keys.reshape(rows, tokens, key_heads, dim), (norms[1], 1e-5)))]  # fmt: skip
    turned, right = (rope(one.transpose(0, 2, 1, 3), offset=offset).transpose(0, 2, 1, 3) for one in normed)
    assert close(queries, turned.reshape(rows * tokens, heads, dim))
    for row, (_, length, _, first) in enumerate(np.array(table.rows).tolist()):
        for token in range(tokens):
            page, place = int(table.pages[first + (length + token) // PAGE, 1]), (length + token) % PAGE
            assert close(held.keys[page, :, place], right[row, token])
            assert mx.array_equal(held.values[page, :, place], values.reshape(rows, tokens, key_heads, dim)[row, token])
    assert int((held.values != 0).any(axis=(1, 3)).sum()) == rows * tokens  # nothing else was written


def test_frequencies_of_their_own() -> None:
    frequencies = mx.exp(mx.arange(16) * 0.4)
    layout = HeadsLayout(2, 1, 32, False, (), Rotation(32, False, 1.0, 0.0, tuple(frequencies.tolist())), 1.0)
    projected = mx.random.normal((1, 4 * 32)).astype(BF)
    held = KeyValues(mx.zeros((41, 1, PAGE, 32), BF), mx.zeros((41, 1, PAGE, 32), BF))

    queries = cuda_paged.place_heads(projected, [], frequencies, held, table_of((37,), 1), layout)

    asked = projected[:, :64].reshape(1, 1, 2, 32).transpose(0, 2, 1, 3)
    turned = mx.fast.rope(asked, 32, traditional=False, base=None, scale=1.0, offset=37, freqs=frequencies)
    assert close(queries, turned.transpose(0, 2, 1, 3).reshape(1, 2, 32))


@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 64), (8, 1, 128), (4, 1, 256)])
def test_attention_over_pages_is_attention_over_a_row_s_tokens(heads: int, key_heads: int, dim: int, monkeypatch: Any) -> None:
    mx.random.seed(4)
    tokens, scale = 2, dim**-0.5
    table = table_of(LENGTHS, tokens)
    held = KeyValues(*(mx.random.normal((41, key_heads, PAGE, dim)).astype(BF) for _ in range(2)))
    queries = mx.random.normal((3 * tokens, heads, dim)).astype(BF)
    gates = mx.random.normal((3 * tokens, heads * 2 * dim + 8)).astype(BF)

    found = cuda_paged.attend(queries, queries, held, table, scale)
    gated = cuda_paged.attend(queries, queries, held, table, scale, gates)

    sigmoids = mx.sigmoid(gates[:, : heads * 2 * dim].reshape(3 * tokens, heads, 2, dim)[:, :, 1].astype(mx.float32))
    assert close(gated, found * sigmoids)
    for row, (_, length, _, first) in enumerate(np.array(table.rows).tolist()):
        own = [int(page) for _, page in np.array(table.pages).tolist()[first : first + -(-(length + tokens) // PAGE)]]
        keys, values = (mx.concatenate([plane[page] for page in own], axis=1)[None] for plane in (held.keys, held.values))
        for token in range(tokens):
            end = length + token + 1
            line = queries[row * tokens + token][None, :, None]
            right = mx.fast.scaled_dot_product_attention(line, keys[:, :, :end], values[:, :, :end], scale=scale)
            assert close(found[row * tokens + token], right[0, :, 0])
    assert not bool(table.counters.any())
    assert mx.array_equal(cuda_paged.attend_apart(queries, queries, held, table, scale), found)
    monkeypatch.setattr(cuda_paged, "UNITES_IN_PLACE", False)
    assert mx.array_equal(cuda_paged.attend(queries, queries, held, table, scale, gates), gated)


def test_attention_over_more_pages_than_a_warp_has_lanes() -> None:
    mx.random.seed(9)
    length, pages = 39 * PAGE + 5, list(range(40, 0, -1))
    table = StepTable(
        mx.array([[1, length, length, 0]], mx.int32), mx.array([[0, page] for page in pages], mx.int32), mx.zeros(64, mx.int32)
    )
    held = KeyValues(*(mx.random.normal((41, 1, PAGE, 32)).astype(BF) for _ in range(2)))
    queries = mx.random.normal((1, 2, 32)).astype(BF)

    found = cuda_paged.attend(queries, queries, held, table, 0.3)

    keys, values = (
        mx.concatenate([plane[page] for page in pages], axis=1)[None, :, : length + 1] for plane in (held.keys, held.values)
    )
    assert close(found, mx.fast.scaled_dot_product_attention(queries[:, :, None], keys, values, scale=0.3)[:, :, 0])
    assert mx.array_equal(cuda_paged.attend_apart(queries, queries, held, table, 0.3), found)


def test_what_lies_behind_a_row_s_tokens_does_not_matter() -> None:
    mx.random.seed(5)
    table = table_of((PAGE + 7,), 1)
    held = KeyValues(*(mx.random.normal((41, 1, PAGE, 64)).astype(BF) for _ in range(2)))
    queries = mx.random.normal((1, 4, 64)).astype(BF)
    found = cuda_paged.attend(queries, queries, held, table, 0.1)
    page = int(table.pages[1, 1])
    for plane in (held.keys, held.values):
        plane[page, :, 8:] = math.nan

    assert mx.array_equal(cuda_paged.attend(queries, queries, held, table, 0.1), found)


def test_a_prompt_and_new_tokens_are_copied_to_their_pages() -> None:
    mx.random.seed(6)
    held = KeyValues(mx.zeros((41, 2, PAGE, 32), BF), mx.zeros((41, 2, PAGE, 64), BF))
    planes = mx.random.normal((1, 2, PAGE + 64, 32)).astype(BF), mx.random.normal((1, 2, PAGE + 96, 64)).astype(BF)
    new = KeyValues(planes[0][:, :, : PAGE + 9], planes[1][:, :, : PAGE + 9], planes)
    other = KeyValues(mx.random.normal((1, 2, 5, 32)).astype(BF), mx.random.normal((1, 2, 5, 64)).astype(BF))
    fields = [0, PAGE + 9, PAGE + 64, PAGE + 96, 0, *[0, 5, 5, 5, 2] * (ROWS_AT_ONCE - 1)]
    cuda_paged.place_prompts([new, other], held, NewRows(mx.array(fields, mx.int32), mx.array([7, 3, 11], mx.int32)))
    alone = KeyValues(mx.zeros_like(held.keys), mx.zeros_like(held.values))
    cuda_paged.place_prompts([new], alone, NewRows(mx.array(fields[:5], mx.int32), mx.array([7, 3], mx.int32)))
    table = table_of(LENGTHS, 2)
    keys, values = mx.random.normal((3, 2, 2, 32)).astype(BF), mx.random.normal((3, 2, 2, 64)).astype(BF)

    for found in (held, alone):
        assert mx.array_equal(mx.concatenate([found.keys[7], found.keys[3, :, :9]], axis=1), new.keys[0])
        assert mx.array_equal(mx.concatenate([found.values[7], found.values[3, :, :9]], axis=1), new.values[0])
        assert not bool(found.keys[3, :, 9:].any())
    assert mx.array_equal(held.keys[11, :, :5], other.keys[0])
    assert mx.array_equal(held.values[11, :, :5], other.values[0])
    assert not bool(held.values[11, :, 5:].any())
    cuda_paged.place_tokens(keys, values, held, table)
    for row, (_, length, _, first) in enumerate(np.array(table.rows).tolist()):
        for token in range(2):
            page, place = int(table.pages[first + (length + token) // PAGE, 1]), (length + token) % PAGE
            assert mx.array_equal(held.keys[page, :, place], keys[row, :, token])
            assert mx.array_equal(held.values[page, :, place], values[row, :, token])


def test_states_enter_a_slot_and_go_back() -> None:
    mx.random.seed(7)
    held = mx.zeros((7, RING, 48), BF), mx.zeros((7, 2, 8, 4))
    both = [(mx.random.normal((1, 3, 48)).astype(BF), mx.random.normal((1, 2, 8, 4))) for _ in range(2)]
    places = [(5, 1), (2, 90)]  # slots, and tokens held
    fields = [(*place, 0, 0, 0) for place in (*places, *places[1:] * (ROWS_AT_ONCE - 2))]
    cuda_paged.place_states(both, held, NewRows(mx.array(fields, mx.int32).reshape(-1), mx.array([0], mx.int32)))

    for new, (slot, length) in zip(both, places, strict=True):
        assert mx.array_equal(held[1][slot], new[1][0])
        assert mx.array_equal(mx.stack([held[0][slot, (length - 3 + column) % RING] for column in range(3)]), new[0][0])
    held = mx.zeros((7, RING, 48), BF), mx.zeros((7, 2, 8, 4))
    kept, table = mx.random.normal((6, 2, 8, 4)), table_of((4, 9), 3)
    cuda_paged.restore_states(kept, held[1], table, mx.array([2, 3], mx.int32))
    assert mx.array_equal(held[1][int(table.rows[0, 0])], kept[1])
    assert not bool(held[1][int(table.rows[1, 0])].any())


def test_the_likeliest_token_is_the_first_of_the_highest() -> None:
    mx.random.seed(8)
    logits = mx.random.normal((4, 3001)).astype(BF)
    logits[0, 7] = logits[0, 2999] = 9.0
    logits[1, 5] = math.nan
    logits[2, 5] = math.inf
    tokens, report = cuda_paged.greedy(logits)

    assert np.array(tokens).tolist()[0] == 7
    assert int(tokens[3]) == int(mx.argmax(logits[3]))
    assert np.array(report)[:, 1].tolist() == [0, 1, 1, 0]
    assert np.array(report)[[0, 3], 0].tolist() == np.array(tokens)[[0, 3]].tolist()
    assert int(cuda_paged.greedy(mx.full((1, 64), -math.inf).astype(BF))[1][0, 1]) == 1


def test_rows_advance_and_tokens_are_taken() -> None:
    table = table_of(LENGTHS, 1)
    chosen = cuda_paged.take_tokens(mx.array([4, 5, 6], mx.int32), mx.array([2, -1, 0], mx.int32), mx.array([7, 8, 9], mx.int32))

    assert mx.array_equal(cuda_paged.advance_rows(table.rows), table.rows + mx.array([0, 1, 1, 0], mx.int32))
    assert np.array(chosen).tolist() == [6, 8, 4]
