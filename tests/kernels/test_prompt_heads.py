"""The text of the kernel that makes queries, keys and values of prompts, run on a CPU: what MLX's own operations make."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

import emulation
from weft.kernels import cuda_cache, ragged
from weft.kernels.cuda_paged import HeadsLayout, Rotation
from weft.kernels.ragged import RaggedLines

BF = mx.bfloat16
HEADS, KEY_HEADS, EPS = 4, 2, 1e-6
CHUNKS, STARTS = ([1] * 5, [2] * 3), (0, 700)
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="needs a compiler for x86")


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_cache.CudaKernel, "__call__", emulation.call)
        yield


ROPES = {
    "a quarter, gated": (nn.RoPE(16, base=1e6), 64, True, True),
    "all, in pairs": (nn.RoPE(64, traditional=True), 64, False, False),
    "frequencies": (Llama3RoPE(32, 2048, False, 10000.0, SCALING), 32, False, True),
}


@pytest.mark.parametrize("name", ROPES)
def test_heads_are_normalised_and_turned_as_mlx_does(name: str) -> None:
    mx.random.seed(4)
    rope, dim, is_gated, has_norms = ROPES[name]
    lines, rotation = RaggedLines(CHUNKS, STARTS), Rotation.of(rope)
    assert rotation is not None
    layout = HeadsLayout(HEADS, KEY_HEADS, dim, is_gated, (EPS, EPS) if has_norms else (), rotation, 1.0)
    wide = dim * (2 if is_gated else 1)
    projected = mx.random.normal((lines.num_lines, HEADS * wide + 2 * KEY_HEADS * dim)).astype(BF)
    norms = [1 + 0.1 * mx.random.normal((dim,)) for _ in range(2)] if has_norms else []
    norms = [norm.astype(BF) for norm in norms]
    turns = ragged.turns_of(lines, ragged.speeds_of(rotation))
    found = ragged.prompt_heads(projected, norms, turns, layout)

    queries, keys, values = mx.split(projected, [HEADS * wide, HEADS * wide + KEY_HEADS * dim], axis=-1)
    queries = queries.reshape(lines.num_lines, HEADS, wide)[..., :dim]
    keys, values = (one.reshape(lines.num_lines, KEY_HEADS, dim) for one in (keys, values))
    if has_norms:
        queries, keys = (mx.fast.rms_norm(one, norm, EPS) for one, norm in zip((queries, keys), norms, strict=True))
    queries, keys = (rope(one[:, :, None], offset=lines.positions).reshape(one.shape) for one in (queries, keys))
    count = sum(map(len, CHUNKS))
    for own, right in zip(found, (queries, keys, values), strict=True):
        apart = np.abs(np.array((own - right).astype(mx.float32))[:count])
        assert apart.max() <= 0.02 * float(mx.abs(right.astype(mx.float32)).max())
    assert mx.array_equal(found[2], values)
