"""Decoder layers of a few operations: they are bound where their bits are those of the layers they replace, and only there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama, qwen3
from mlx_lm.models.cache import KVCache

from weft.kernels import blocks, cpu
from weft.kernels.primitives import ops
from weft.model.adapter import Adapter
from weft.model.loader import load
from zoo import make_checkpoint

pytestmark = pytest.mark.skipif(not cpu.is_bound(mx.float32), reason="needs weft's own operations")

ATTENTION = [  # heads, heads of keys, numbers in a head: around the lanes
    (4, 2, 16), (3, 3, 5), (9, 3, 64), (6, 1, 33),
]  # fmt: skip


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, scale: float) -> np.ndarray:
    """What attention says of one row, in double precision: (T, heads, dim) over (kv heads, places, dim)."""
    tokens, heads, dim = q.shape
    found = np.zeros((tokens, heads, dim))
    for t in range(tokens):
        for h in range(heads):
            own = h * keys.shape[0] // heads
            seen = first + t + 1
            scores = keys[own, :seen].astype(np.float64) @ q[t, h] * scale
            weights = np.exp(scores - scores.max())
            found[t, h] = weights / weights.sum() @ values[own, :seen]
    return found


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), ATTENTION)
def test_rows_of_any_lengths_attend_in_one_call_and_each_has_its_own_bits(heads: int, kv_heads: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    rows = [(0, 1, 0, 1), (0, 0, 17, 3), (1, 0, 64, 1), (1, 2, 5, 40)]  # slab, slot, tokens before, tokens that come
    slabs = [rng.standard_normal((3, kv_heads, 80, dim), np.float32) for _ in range(4)]
    lines = rng.standard_normal((sum(row[3] for row in rows), (heads + 2 * kv_heads) * dim), np.float32)
    layout = ops.Heads(heads, kv_heads, dim, 0.3, False)

    def run(chosen: list[tuple[int, int, int, int]], its_lines: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        starts = np.cumsum([0, *(row[3] for row in chosen)]).tolist()
        step = ops.StepRows([(*row, start) for row, start in zip(chosen, starts, strict=False)])
        x = mx.array(its_lines)[None]
        planes = [mx.array(slab) for slab in slabs]
        written = [ops.append(plane, x, None, step, layout, i // 2, i % 2 == 1) for i, plane in enumerate(planes)]
        number = max(row[0] for row in chosen) + 1
        found = ops.attend(x, written[: 2 * number : 2], written[1 : 2 * number : 2], None, step, layout)
        return np.array(found[0]), [np.array(plane) for plane in written]

    together, planes = run(rows, lines)

    start = 0
    for slab, slot, first, tokens in rows:
        own = lines[start : start + tokens]
        q, k, v = np.split(own.reshape(tokens, -1, dim), [heads, heads + kv_heads], axis=1)
        keys, values = planes[2 * slab][slot], planes[2 * slab + 1][slot]
        assert keys[:, first : first + tokens].tobytes() == np.ascontiguousarray(k.swapaxes(0, 1)).tobytes()
        assert values[:, first : first + tokens].tobytes() == np.ascontiguousarray(v.swapaxes(0, 1)).tobytes()
        right = attend(q, keys, values, first, 0.3).reshape(tokens, -1)
        np.testing.assert_allclose(together[start : start + tokens], right, atol=2e-5)
        alone, _ = run([(slab, slot, first, tokens)], own)
        assert alone.tobytes() == together[start : start + tokens].tobytes()
        start += tokens


def test_a_slab_is_written_in_place_unless_somebody_else_has_it() -> None:
    layout, step = ops.Heads(1, 1, 4, 1.0, False), ops.StepRows([(0, 0, 2, 1, 0)])
    held = mx.zeros((1, 1, 8, 4))
    mx.eval(held)

    changed = ops.append(held, mx.ones((1, 1, 12)), None, step, layout, 0, False)
    mx.eval(changed)

    assert held.sum().item() == 0
    assert changed.sum().item() == 4


def test_rows_without_a_place_are_refused_when_the_graph_is_built() -> None:
    layout, lines, slab = ops.Heads(1, 1, 4, 1.0, False), mx.ones((1, 1, 12)), mx.zeros((1, 1, 8, 4))

    for row in ((0, 1, 0, 1, 0), (0, 0, 8, 1, 0)):  # no such slot; no place left in it
        with pytest.raises(ValueError, match="have their place"):
            ops.append(slab, lines, None, ops.StepRows([row]), layout, 0, False)
    with pytest.raises(ValueError, match="every line belongs to a row"):
        ops.append(slab, lines, None, ops.StepRows([(0, 0, 0, 2, 0)]), layout, 0, False)


def test_layers_built_as_the_common_ones_are_replaced(tmp_path: Path) -> None:
    names = {
        name: set(Adapter(load(make_checkpoint(name, tmp_path / name))).fused_layers) for name in ("llama", "qwen3", "qwen3_moe")
    }

    assert "FusedTransformerBlock" in names["llama"]
    assert "FusedTransformerBlock" in names["qwen3"]
    assert "FusedSwitchGLU" in names["qwen3_moe"]


def test_a_layer_that_computes_something_else_keeps_its_own_code() -> None:
    class Doubling(llama.TransformerBlock):  # type: ignore[misc]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return 2 * super().__call__(x, mask, cache)

    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 2}
    block = Doubling(llama.ModelArgs(**config, rms_norm_eps=1e-5, vocab_size=8))
    cpu.bind(block)

    assert blocks.bind(block) == ["FusedMLP"]
    assert type(block) is Doubling


def test_a_forward_that_only_the_layers_own_code_takes_goes_there(tmp_path: Path) -> None:
    adapter = Adapter(load(make_checkpoint("qwen3", tmp_path)))
    block = adapter.model.model.layers[0]  # type: ignore[attr-defined]
    x = mx.random.normal((1, 6, 64))
    assert isinstance(block, blocks.FusedBlock)
    assert isinstance(block, qwen3.TransformerBlock)

    without_cache = block(x, "causal", None)
    assert mx.array_equal(without_cache, block(x, "causal", KVCache()))


def test_a_mask_that_is_not_causal_acts(tmp_path: Path) -> None:
    adapter = Adapter(load(make_checkpoint("llama", tmp_path)))
    block = adapter.model.model.layers[0]  # type: ignore[attr-defined]
    x, sees_all = mx.random.normal((1, 6, 64)), mx.ones((6, 6), mx.bool_)

    found = block(x, sees_all, KVCache())

    assert isinstance(block, blocks.FusedBlock)
    assert mx.array_equal(found, block(x, sees_all, None))
    assert not mx.allclose(found, block(x, "causal", KVCache()))


END_IN_A_STEP = """
from weft.kernels import blas
blas.bind()
import mlx.core as mx
from weft.kernels.primitives import ops
x, weights = mx.ones((64, 1024)), ops.Weights(mx.ones((1024, 1024)))
for _ in range(200):
    x = ops.linear(x, [weights])
mx.async_eval(x)
"""


def test_a_process_may_end_while_operations_run() -> None:
    assert subprocess.run([sys.executable, "-c", END_IN_A_STEP], timeout=60, check=False).returncode == 0


def test_ten_thousand_evaluations_leave_memory_as_it_was() -> None:
    layer, x = nn.Linear(64, 64).to_quantized(32, 4), mx.ones((3, 64))
    cpu.bind(layer)
    for _ in range(100):
        mx.eval(layer(x))
    before = mx.get_active_memory()

    for _ in range(10_000):
        mx.eval(layer(x))

    assert mx.get_active_memory() == before


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_second_adapter_over_the_same_model_finds_its_layers_replaced(name: str, tmp_path: Path) -> None:
    loaded = load(make_checkpoint(name, tmp_path))
    prompt = list(range(1, 12))
    first = np.array(Adapter(loaded).prefill(prompt, Adapter(loaded).new_caches(12))[1])

    assert np.array_equal(np.array(Adapter(loaded).prefill(prompt, Adapter(loaded).new_caches(12))[1]), first)
