"""Attention of one token per row over a slab's ragged rows as two CUDA kernels: sums over spans of keys, then their union.

MLX has no variable-length attention: a masked batch takes five kernels and reads the padding too. Here each row reads its
own keys and no others, and its numbers depend on its own length alone, whoever shares the slab.
"""

import math
from functools import cache
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

# A block: one span of one key head of one row. Thread t scores keys t, t + THREADS …; then every eight columns of the
# values have a thread in each of GROUPS teams, which take the keys in turn and are summed at the end.
PARTIAL = """
    constexpr int TEAM = VALUE_DIM / COLUMNS;
    constexpr int TEAMS = THREADS / TEAM;
    constexpr int SCORES = GROUP * KEY_DIM;
    constexpr int FIRST_USE = SCORES + GROUP * SPAN;
    constexpr int SECOND_USE = TEAMS * GROUP * VALUE_DIM;
    __shared__ float pool[FIRST_USE > SECOND_USE ? FIRST_USE : SECOND_USE];
    float* query = pool;
    float* score = pool + SCORES;

    const int thread = threadIdx.x, head = blockIdx.y, row = blockIdx.z;
    const int begin = max(bounds[2 * row], int(blockIdx.x) * SPAN);
    const int end = min(bounds[2 * row + 1], (int(blockIdx.x) + 1) * SPAN);
    if (begin >= end) return;
    const int count = end - begin;
    const size_t base = (size_t(slots[row]) * HEADS + head) * places[0];
    const T* key = keys + (base + begin) * KEY_DIM;
    const T* value = values + (base + begin) * VALUE_DIM;
    float* out = partial + ((size_t(row) * HEADS + head) * gridDim.x + blockIdx.x) * GROUP * (VALUE_DIM + 2);

    const T* asked = queries + (size_t(row) * HEADS + head) * GROUP * KEY_DIM;
    for (int i = thread; i < GROUP * KEY_DIM; i += THREADS) query[i] = static_cast<float>(asked[i]) * scale[0];
    __syncthreads();

    for (int j = thread; j < count; j += THREADS) {
        float sum[GROUP];
        for (int g = 0; g < GROUP; g++) sum[g] = 0.0f;
        for (int d = 0; d < KEY_DIM; d += COLUMNS) {
            float k[COLUMNS];
            load_columns(key + size_t(j) * KEY_DIM + d, k);
            for (int g = 0; g < GROUP; g++)
                for (int i = 0; i < COLUMNS; i++) sum[g] += query[g * KEY_DIM + d + i] * k[i];
        }
        for (int g = 0; g < GROUP; g++) score[g * SPAN + j] = sum[g];
    }
    __syncthreads();

    const int lane = thread % 32;
    for (int g = thread / 32; g < GROUP; g += THREADS / 32) {
        float highest = -INFINITY;
        for (int j = lane; j < count; j += 32) highest = fmaxf(highest, score[g * SPAN + j]);
        for (int step = 16; step; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
        float total = 0.0f;
        for (int j = lane; j < count; j += 32) {
            const float weight = __expf(score[g * SPAN + j] - highest);
            score[g * SPAN + j] = weight;
            total += weight;
        }
        for (int step = 16; step; step /= 2) total += __shfl_xor_sync(0xffffffff, total, step);
        if (lane == 0) {
            out[g * (VALUE_DIM + 2) + VALUE_DIM] = highest;
            out[g * (VALUE_DIM + 2) + VALUE_DIM + 1] = total;
        }
    }
    __syncthreads();

    const int column = (thread % TEAM) * COLUMNS, team = thread / TEAM;
    float sum[GROUP][COLUMNS];
    for (int g = 0; g < GROUP; g++)
        for (int i = 0; i < COLUMNS; i++) sum[g][i] = 0.0f;
    for (int j = team; j < count; j += TEAMS) {
        float v[COLUMNS];
        load_columns(value + size_t(j) * VALUE_DIM + column, v);
        for (int g = 0; g < GROUP; g++)
            for (int i = 0; i < COLUMNS; i++) sum[g][i] += score[g * SPAN + j] * v[i];
    }
    __syncthreads();
    for (int g = 0; g < GROUP; g++)
        for (int i = 0; i < COLUMNS; i++) pool[(team * GROUP + g) * VALUE_DIM + column + i] = sum[g][i];
    __syncthreads();
    for (int i = thread; i < GROUP * VALUE_DIM; i += THREADS) {
        float total = 0.0f;
        for (int t = 0; t < TEAMS; t++) total += pool[t * GROUP * VALUE_DIM + i];
        out[(i / VALUE_DIM) * (VALUE_DIM + 2) + i % VALUE_DIM] = total;
    }
"""

# A block: one query head of one row; a thread per column.
UNION = """
    const int column = threadIdx.x, head = blockIdx.y, row = blockIdx.z;
    const int spans = num_spans[0], first = bounds[2 * row] / SPAN, last = (bounds[2 * row + 1] - 1) / SPAN;
    const int stride = GROUP * (VALUE_DIM + 2);
    const float* part = partial + (size_t(row) * HEADS + head / GROUP) * spans * stride + (head % GROUP) * (VALUE_DIM + 2);
    float highest = sinks[head];
    for (int s = first; s <= last; s++) highest = fmaxf(highest, part[s * stride + VALUE_DIM]);
    float total = __expf(sinks[head] - highest), sum = 0.0f;
    for (int s = first; s <= last; s++) {
        const float share = __expf(part[s * stride + VALUE_DIM] - highest);
        total += share * part[s * stride + VALUE_DIM + 1];
        sum += share * part[s * stride + column];
    }
    out[(size_t(row) * HEADS * GROUP + head) * VALUE_DIM + column] = static_cast<T>(sum / total);
"""


def can_attend(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernels take arrays of these types and shapes."""
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
    """Attention of queries (n, heads, 1, dim) over keys and values (slots, key heads, places, dim) → (n, heads, 1, value dim).

    Row i reads places bounds[2i] to bounds[2i + 1] of its slot; the reach must have bounds.
    """
    bounds, part = reach.bounds, reach.part
    assert bounds is not None
    n, num_heads, _, key_dim = queries.shape
    heads, value_dim = keys.shape[1], values.shape[3]
    group = num_heads // heads
    spans = -(-min(part.longest, keys.shape[2]) // SPAN)
    template = [("T", keys.dtype), ("HEADS", heads), ("GROUP", group), ("VALUE_DIM", value_dim)]
    if sinks is None:  # a sink of −∞ is none
        sinks = _constant(-math.inf, mx.float32, num_heads)
    partial, union = _kernels()
    sums = partial(
        inputs=[queries, keys, values, part.slots, bounds, _constant(keys.shape[2], mx.int32), _constant(scale, mx.float32)],
        template=[*template, ("KEY_DIM", key_dim)],
        grid=(spans * THREADS, heads, n),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(n, heads, spans, group, value_dim + 2)],
        output_dtypes=[mx.float32],
    )[0]
    output: mx.array = union(
        inputs=[sums, bounds, _constant(spans, mx.int32), sinks.astype(mx.float32)],
        template=template,
        grid=(value_dim, num_heads, n),
        threadgroup=(value_dim, 1, 1),
        output_shapes=[(n, num_heads, 1, value_dim)],
        output_dtypes=[queries.dtype],
    )[0]
    return output


@cache
def _constant(number: float, dtype: mx.Dtype, size: int = 1) -> mx.array:
    return mx.array([number] * size, dtype)


@cache
def _kernels() -> tuple[Any, Any]:
    def make(name: str, inputs: str, output: str, source: str) -> Any:
        return mx.fast.cuda_kernel(name=name, input_names=inputs.split(), output_names=[output], source=source, header=HEADER)

    partial = make("weft_attend_partial", "queries keys values slots bounds places scale", "partial", PARTIAL)
    return partial, make("weft_attend_union", "partial bounds num_spans sinks", "out", UNION)
