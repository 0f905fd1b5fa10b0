"""Decode attention over a slab's rows of unequal length as two CUDA kernels: partial sums by span of keys, then their merge.

MLX has no variable-length attention: a masked batch takes five kernels and reads the padding too. Here each row reads its
own keys and no others, and its numbers depend on its own length alone, whoever shares the slab.
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
    """Attention of queries (n, heads, 1, dim) over slab keys and values (slots, key heads, tokens, dim), by each row's bounds."""
    bounds, part = reach.bounds, reach.part
    assert bounds is not None  # row i reads places bounds[2i] to bounds[2i + 1] of its slot
    n, num_heads, _, key_dim = queries.shape
    heads, value_dim = keys.shape[1], values.shape[3]
    group = num_heads // heads
    spans = -(-min(part.longest, keys.shape[2]) // SPAN)
    template = [("T", keys.dtype), ("HEADS", heads), ("GROUP", group), ("VALUE_DIM", value_dim)]
    if sinks is None:  # a sink of −∞ is none
        sinks = _constant(-math.inf, mx.float32, num_heads)
    sums = _kernel("attend_partial", "queries keys values slots bounds places scale", "partial")(
        inputs=[queries, keys, values, part.slots, bounds, _constant(keys.shape[2], mx.int32), _constant(scale, mx.float32)],
        template=[*template, ("KEY_DIM", key_dim)],
        grid=(spans * THREADS, heads, n),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(n, heads, spans, group, value_dim + 2)],
        output_dtypes=[mx.float32],
    )[0]
    return _kernel("attend_union", "partial bounds num_spans sinks", "out")(  # type: ignore[no-any-return]
        inputs=[sums, bounds, _constant(spans, mx.int32), sinks.astype(mx.float32)],
        template=template,
        grid=(value_dim, num_heads, n),
        threadgroup=(value_dim, 1, 1),
        output_shapes=[(n, num_heads, 1, value_dim)],
        output_dtypes=[queries.dtype],
    )[0]


@cache
def _constant(number: float, dtype: mx.Dtype, size: int = 1) -> mx.array:
    return mx.array([number] * size, dtype)


@cache
def _kernel(name: str, inputs: str, output: str) -> Any:
    source = Path(__file__).with_name("native").joinpath(f"{name}.cu").read_text()
    return mx.fast.cuda_kernel(f"weft_{name}", inputs.split(), [output], source=source, header=HEADER)
