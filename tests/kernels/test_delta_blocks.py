"""Gated delta layers as one operation: what it computes, and that neither neighbours nor cuts change a bit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_5

from weft.kernels import blocks, cpu
from weft.kernels.primitives import ops
from weft.llm import LLM
from weft.memory.positions import taking_notes
from weft.model.adapter import Adapter
from weft.model.loader import load
from zoo import make_checkpoint

pytestmark = pytest.mark.skipif(not cpu.is_bound(mx.float32), reason="needs weft's own operations")

SHAPES = [  # heads of keys, heads, width, height, taps: around the lanes and the rows taken together
    (1, 1, 16, 4, 2), (2, 4, 64, 64, 4), (2, 2, 48, 12, 3), (1, 3, 32, 20, 4), (3, 6, 16, 8, 7),
]  # fmt: skip
Array = np.ndarray[Any, np.dtype[np.float32]]


class Net:
    """A gated delta layer of random weights: the operation's, and the same in double precision."""

    def __init__(self, key_heads: int, heads: int, width: int, height: int, taps: int) -> None:
        rng = np.random.default_rng(width)
        self.shape = key_heads, heads, width, height, taps
        self.channels = 2 * key_heads * width + heads * height
        self.line = self.channels + heads * (height + 2)
        self.convolution = rng.standard_normal((self.channels, taps, 1), np.float32)
        self.rate, self.bias = rng.uniform(0.1, 2, heads).astype(np.float32), rng.standard_normal(heads, np.float32)
        self.query_norm, self.key_norm = np.full(width, 0.3, np.float32), np.full(width, 0.2, np.float32)
        self.norm = rng.standard_normal(height, np.float32)
        norms = [ops.Norm(mx.array(one), 1e-6) for one in (self.query_norm, self.key_norm, self.norm)]
        self.layer = ops.DeltaLayer(*map(mx.array, (self.convolution, self.rate, self.bias)), *norms)

    def noise(self, rows: int, tokens: int) -> list[Array]:
        """Return lines, channels before and a state."""
        rng, (_, heads, width, height, taps) = np.random.default_rng(tokens), self.shape
        shapes = (rows, tokens, self.line), (rows, taps - 1, self.channels), (rows, heads, height, width)
        return [rng.standard_normal(shape, np.float32) for shape in shapes]

    def run(self, lines: Array, columns: Array, state: Array, *, keeps: bool = False) -> list[Array]:
        return [np.array(one) for one in ops.delta(mx.array(lines), mx.array(columns), mx.array(state), self.layer, keeps)]

    def right(self, lines: Array, columns: Array, state: Array) -> tuple[Array, Array]:
        """Return what one row's output and last state are, in double precision."""
        key_heads, heads, width, height, taps = self.shape
        channels = np.concatenate([columns, lines[:, : self.channels]]).astype(np.float64)
        z, b, a = np.split(lines[:, self.channels :].astype(np.float64), [heads * height, heads * (height + 1)], axis=1)
        found, held = [], state.astype(np.float64)
        for token in range(len(lines)):
            mixed = silu((channels[token : token + taps] * self.convolution[:, :, 0].T).sum(axis=0))
            keys, values = mixed[: 2 * key_heads * width].reshape(2, key_heads, width), mixed[2 * key_heads * width :]
            keys = keys / np.sqrt((keys**2).mean(axis=-1, keepdims=True) + 1e-6)
            query, key = (
                np.repeat(one, heads // key_heads, axis=0) for one in (keys[0] * self.query_norm, keys[1] * self.key_norm)
            )
            held = held * np.exp(-self.rate * np.log1p(np.exp(a[token] + self.bias)))[:, None, None]
            change = values.reshape(heads, height) - np.einsum("hvk,hk->hv", held, key)
            held = held + np.einsum("hv,hk->hvk", change / (1 + np.exp(-b[token]))[:, None], key)
            output = np.einsum("hvk,hk->hv", held, query)
            output = output / np.sqrt((output**2).mean(axis=-1, keepdims=True) + 1e-6) * self.norm
            found.append(output.reshape(-1) * silu(z[token]))
        return np.array(found, np.float32), held.astype(np.float32)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_what_its_formulas_say(shape: tuple[int, int, int, int, int]) -> None:
    net = Net(*shape)
    for rows, tokens in ((1, 1), (3, 2), (1, 9), (2, 5)):
        lines, columns, state = net.noise(rows, tokens)
        output, kept, states = net.run(lines, columns, state)
        for row in range(rows):
            right, last = net.right(lines[row], columns[row], state[row])
            np.testing.assert_allclose(output[row], right, atol=5e-4, rtol=1e-3)
            np.testing.assert_allclose(states[row], last, atol=1e-4, rtol=1e-3)
        whole = np.concatenate([columns, lines[..., : net.channels]], axis=1)
        assert kept.tobytes() == np.ascontiguousarray(whole[:, tokens:]).tobytes()


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize(("rows", "tokens"), [(1, 4), (3, 8), (1, 150), (40, 3), (70, 2)])
def test_tokens_of_rows_in_one_call_have_the_bits_of_one_row_and_token_after_the_other(rows: int, tokens: int) -> None:
    net = Net(*SHAPES[1])
    lines, columns, state = net.noise(rows, tokens)

    together, _, by_token = net.run(lines, columns, state, keeps=True)
    plainly, last_columns, last = net.run(lines, columns, state)

    assert plainly.tobytes() == together.tobytes()
    for row in {0, rows - 1}:
        own = [one[row : row + 1] for one in (columns, state)]
        for token in range(tokens):
            output, *own = net.run(lines[row : row + 1, token : token + 1], *own)
            assert output.tobytes() == together[row, token].tobytes()
            assert own[1].tobytes() == by_token[row, token].tobytes()
        assert own[0].tobytes() == last_columns[row].tobytes()
        assert own[1].tobytes() == last[row].tobytes()


def test_each_row_takes_the_state_after_its_own_number_of_tokens() -> None:
    states, counts = np.random.default_rng(5).standard_normal((3, 4, 2, 5), np.float32), [4, 1, 2]

    found = np.array(ops.window(mx.array(states), [count - 1 for count in counts]))
    assert all(np.array_equal(found[row], states[row, count - 1]) for row, count in enumerate(counts))
    found = np.array(ops.window(mx.array(states), [0, 1, 2], 2))
    assert all(np.array_equal(found[row], states[row, row : row + 2]) for row in range(3))
    with pytest.raises(ValueError, match="entries are those of the row"):
        ops.window(mx.array(states), [0, 3, 0], 2)


def test_arrays_of_another_shape_are_refused_when_the_graph_is_built() -> None:
    net = Net(*SHAPES[0])
    arrays = [mx.array(one) for one in net.noise(2, 3)]

    for wrong in range(3):
        given = [one[..., 1:] if place == wrong else one for place, one in enumerate(arrays)]
        with pytest.raises(ValueError, match=r"as long as|those of each row|has its state"):
            ops.delta(*given, net.layer, False)


def test_all_decoder_layers_of_a_hybrid_and_of_its_head_are_replaced() -> None:
    llm = LLM("tiny-hybrid")
    head = llm.engine.adapter.head
    layers = [layer for layer in llm.loaded.model.modules() if "input_layernorm" in layer]

    assert len(layers) == 8
    assert all(isinstance(layer, blocks.FusedBlock) for layer in layers)
    assert head is not None
    assert isinstance(head.layer, blocks.FusedBlock)


def test_a_delta_layer_that_computes_something_else_keeps_its_own_code(tmp_path: Path) -> None:
    class Doubling(qwen3_5.DecoderLayer):  # type: ignore[misc]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return 2 * super().__call__(x, mask, cache)

    model = load(make_checkpoint("qwen3_5", tmp_path)).model
    (layer, *_) = (one for one in model.modules() if "linear_attn" in one)
    layer.__class__ = Doubling
    cpu.bind(layer)

    blocks.bind(layer)

    assert type(layer) is Doubling


def test_a_prompt_in_one_forward_leaves_the_states_of_its_tokens_one_by_one(tmp_path: Path) -> None:
    adapter = Adapter(load(make_checkpoint("qwen3_5", tmp_path)))
    (layer, *_) = (one for one in adapter.model.modules() if "linear_attn" in one)  # type: ignore[attr-defined]
    size, caches = layer.input_layernorm.weight.shape[0], [adapter.new_caches(8)[0] for _ in range(2)]
    x = mx.random.normal((1, 6, size), key=mx.random.key(3))

    with taking_notes(6) as notes:
        whole = layer(x, None, caches[0])
    noted = [notes.of(caches[0][part]) for part in range(2)]
    for token in range(6):
        one = layer(x[:, token : token + 1], None, caches[1])
        assert mx.array_equal(one[:, 0], whole[:, token])
        for part in range(2):
            state = noted[part]
            assert state is not None
            assert mx.array_equal(state.after([token + 1]), caches[1][part])
