"""CUDA kernels of decode steps: attention over a slab's rows of unequal length, and the gated delta rule for a few tokens.

MLX has no variable-length attention: a masked batch takes five kernels and reads the padding too. Here it takes two, partial
sums by span of keys and their merge; each row reads its own keys and no others. Of the gated delta rule mlx-lm has a kernel
for Metal only; as single operations every token takes a dozen launches, which is what a step on a GPU waits for. Numbers of
a row depend on that row alone, whoever shares the batch.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from weft.memory.views import Reach

SPAN = 256  # keys one block works through; a row's cuts are multiples of it
THREADS = 128
COLUMNS = 8  # values one thread loads at once
MAX_GROUP = 8  # query heads per key head: bounds the shared memory

HEADER = f"""
constexpr int SPAN = {SPAN};
constexpr int THREADS = {THREADS};
constexpr int COLUMNS = {COLUMNS};

template <typename T>
__device__ inline void load_columns(const T* from, float* to) {{
    alignas(16) T raw[COLUMNS];
    const uint4* source = reinterpret_cast<const uint4*>(from);
    uint4* target = reinterpret_cast<uint4*>(raw);
    for (int i = 0; i < int(COLUMNS * sizeof(T) / 16); i++) target[i] = source[i];
    for (int i = 0; i < COLUMNS; i++) to[i] = static_cast<float>(raw[i]);
}}
"""


def can_attend(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the CUDA kernels support arrays of these dtypes and shapes."""
    num_heads, key_heads, key_dim, value_dim = queries.shape[1], keys.shape[1], keys.shape[3], values.shape[3]
    return (
        queries.dtype == keys.dtype == values.dtype
        and num_heads % key_heads == 0
        and num_heads // key_heads <= MAX_GROUP
        and all(dim % COLUMNS == 0 and dim <= 256 for dim in (key_dim, value_dim))
        and THREADS % (value_dim // COLUMNS) == 0
    )


def attend_ragged(
    queries: mx.array, keys: mx.array, values: mx.array, reach: Reach, scale: float, sinks: mx.array | None
) -> mx.array:
    """Attention of queries (n, heads, T, dim) over slab keys and values (slots, key heads, tokens, dim), by each token's bounds.

    For the kernels every token is a row of its own; those of one row read the same slot.
    """
    bounds, part = reach.bounds, reach.part
    assert bounds is not None  # line i reads places bounds[2i] to bounds[2i + 1] of its slot
    rows, num_heads, tokens, key_dim = queries.shape
    n = rows * tokens
    heads, value_dim = keys.shape[1], values.shape[3]
    group = num_heads // heads
    spans = -(-min(part.longest, keys.shape[2]) // SPAN)
    template = [("T", keys.dtype), ("HEADS", heads), ("GROUP", group), ("VALUE_DIM", value_dim)]
    if sinks is None:  # a sink of −∞ is none
        sinks = _constant(-math.inf, mx.float32, num_heads)
    places, factor = _constant(keys.shape[2], mx.int32), _constant(scale, mx.float32)
    sums = _kernel("attend_partial", "queries keys values slots bounds places scale", "partial")(
        inputs=[_lines(queries), keys, values, reach.slots, bounds, places, factor],
        template=[*template, ("KEY_DIM", key_dim)],
        grid=(spans * THREADS, heads, n),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(n, heads, spans, group, value_dim + 2)],
        output_dtypes=[mx.float32],
    )[0]
    found: mx.array = _kernel("attend_union", "partial bounds num_spans sinks", "out")(
        inputs=[sums, bounds, _constant(spans, mx.int32), sinks.astype(mx.float32)],
        template=template,
        grid=(value_dim, num_heads, n),
        threadgroup=(value_dim, 1, 1),
        output_shapes=[(n, num_heads, 1, value_dim)],
        output_dtypes=[queries.dtype],
    )[0]
    return found if tokens == 1 else found.reshape(rows, tokens, num_heads, value_dim).swapaxes(1, 2)


def _lines(queries: mx.array) -> mx.array:
    """Turn queries (n, heads, T, dim) into one row per token, (nT, heads, 1, dim)."""
    _, heads, tokens, dim = queries.shape
    return queries if tokens == 1 else queries.swapaxes(1, 2).reshape(-1, heads, 1, dim)


def can_step(query: mx.array, value: mx.array, fading: mx.array, state: mx.array | None) -> bool:
    """Whether the kernel of the gated delta rule supports arrays of these dtypes and shapes: one gate per head."""
    is_float = state is None or state.dtype == mx.float32
    return fading.ndim == 3 and query.shape[-1] % 32 == 0 and value.shape[-1] % (THREADS // 32) == 0 and is_float


def gated_delta_steps(
    by_token: tuple[mx.array, mx.array, mx.array, mx.array, mx.array],
    log_rate: mx.array,
    bias: mx.array,
    state: mx.array | None,
    *,
    keeps_states: bool,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Apply the gated delta rule to a few tokens in one launch; returns outputs, the last state, and those after each token.

    `by_token` are query, key (B, T, H, K), value (B, T, HG, V) and the projections of gates and betas (B, T, HG).
    """
    query, _, value, *_ = by_token
    (rows, tokens, key_heads, key_dim), (heads, value_dim) = query.shape, value.shape[2:]
    if state is None:
        state = mx.zeros((rows, heads, value_dim, key_dim))
    kept = (rows, tokens, heads, value_dim, key_dim) if keeps_states else (1,)
    sizes = [("HEADS", heads), ("GROUP", heads // key_heads), ("KEY_DIM", key_dim), ("VALUE_DIM", value_dim)]
    names = "query key value fading writing log_rate bias state tokens"
    output, last, states = _kernel("gated_delta", names, "out last states")(
        inputs=[*by_token, log_rate, bias, state, _constant(tokens, mx.int32)],
        template=[("T", query.dtype), *sizes, ("KEEPS_STATES", keeps_states)],
        grid=(value_dim * 32, heads, rows),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[value.shape, state.shape, kept],
        output_dtypes=[query.dtype, mx.float32, mx.float32],
    )
    return output, last, states if keeps_states else None


@cache
def _constant(number: float, dtype: mx.Dtype, size: int = 1) -> mx.array:
    return mx.array([number] * size, dtype)


@cache
def _kernel(name: str, inputs: str, outputs: str) -> Any:
    source = Path(__file__).with_name("native").joinpath(f"{name}.cu").read_text()
    return mx.fast.cuda_kernel(f"weft_{name}", inputs.split(), outputs.split(), source=source, header=HEADER)
