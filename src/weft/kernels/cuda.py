"""CUDA kernels of decode steps: attention over a slab's rows of unequal length, and what gated delta layers need.

MLX has no variable-length attention: a masked batch takes five kernels and reads the padding too. Here it takes two, partial
sums by span of keys and their merge; each row reads its own keys and no others. Of the gated delta rule mlx-lm has a kernel
for Metal only; as single operations every token takes a dozen launches, which is what a step on a GPU waits for. Numbers of
a row depend on that row alone, whoever shares the batch.
"""

import itertools
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple, Self

import mlx.core as mx
import mlx.nn as nn

from weft.kernels.cuda_cache import CudaKernel
from weft.memory.transfer import to_device
from weft.memory.views import Reach

SPAN = 128  # keys one block works through; a row's cuts are multiples of it
THREADS = 128
COLUMNS = 8  # values one thread loads at once
SIDE = 4  # neighbouring channels of a convolution that one thread has
RUN = 8  # lines one behind the other whose convolution one warp computes, of MANY_LINES
MANY_LINES = 256
MAX_GROUP = 8  # query heads per key head: bounds the shared memory


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
    sums = _kernel("attend_partial", "queries keys values slots bounds", "partial", SCALE=scale)(
        inputs=[_lines(queries), keys, values, reach.slots, bounds],
        template=[*template, ("KEY_DIM", key_dim)],
        grid=(spans * THREADS, heads, n),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(n, heads, spans, group, value_dim + 2)],
        output_dtypes=[mx.float32],
    )[0]
    found: mx.array = _kernel("attend_union", "partial bounds sinks", "out")(
        inputs=[sums, bounds, sums if sinks is None else sinks.astype(mx.float32)],  # without sinks any array stands for them
        template=[*template, ("HAS_SINKS", sinks is not None)],
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
    return fading.ndim == 3 and query.shape[-1] % 32 == 0 and value.shape[-1] % (THREADS // 8) == 0 and is_float


class LineSpans(NamedTuple):
    """Which lines of an array belong to which row: the row of each line, and where each row's lines start."""

    rows: mx.array  # (lines,)
    starts: mx.array  # (rows + 1,)

    @classmethod
    def of(cls, counts: tuple[int, ...]) -> Self:
        """Return the spans of rows with so many lines each, one after the other."""
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        return cls(*to_device(rows, [0, *itertools.accumulate(counts)]))


@lru_cache(256)
def equal_spans(rows: int, tokens: int) -> LineSpans:
    """Return the spans of rows with the same number of lines; made once."""
    found = LineSpans.of((tokens,) * rows)
    mx.eval(found)  # sync: it has no part in anybody's graph
    return found


class DeltaLayout(NamedTuple):
    """The sizes of a gated delta layer, and where in their lines its keys, values, gates and betas begin."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    widths: tuple[int, int, int]  # of the lines that hold queries and keys, values, gates and betas
    key_at: int = 0
    value_at: int = 0
    fading_at: int = 0
    writing_at: int = 0

    @property
    def template(self) -> list[tuple[str, int]]:
        key_width, value_width, gate_width = self.widths
        sizes = {"HEADS": self.heads, "GROUP": self.heads // self.key_heads, "KEY_DIM": self.key_dim, "VALUE_DIM": self.value_dim}
        widths = {"KEY_WIDTH": key_width, "VALUE_WIDTH": value_width, "GATE_WIDTH": gate_width}
        places = {"KEY_AT": self.key_at, "VALUE_AT": self.value_at, "FADING_AT": self.fading_at, "WRITING_AT": self.writing_at}
        return [*sizes.items(), *widths.items(), *places.items()]


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
    (rows, _, key_heads, key_dim), (heads, value_dim) = query.shape, value.shape[2:]
    if state is None:
        state = mx.zeros((rows, heads, value_dim, key_dim))
    widths = (key_heads * key_dim, heads * value_dim, heads)
    layout = DeltaLayout(key_heads, heads, key_dim, value_dim, widths)
    spans = equal_spans(rows, query.shape[1])
    output, last, states = delta_rule(by_token, (log_rate, bias, state), spans, layout, keeps_states=keeps_states)
    return output.reshape(value.shape), last, None if states is None else states.reshape(*value.shape[:2], *state.shape[1:])


def delta_rule(
    by_token: tuple[mx.array, ...],
    of_row: tuple[mx.array, mx.array, mx.array],
    spans: LineSpans,
    layout: DeltaLayout,
    *,
    keeps_states: bool,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Apply the gated delta rule to what `layout` finds in the arrays `by_token`; `of_row`: log rate, bias and states.

    Returns outputs (lines, heads, V), the rows' last states, and those after each line if asked for.
    """
    *_, state = of_row
    shape = (spans.rows.shape[0], layout.heads, layout.value_dim)
    kept = (*shape, layout.key_dim) if keeps_states else (1,)
    names = "query key value fading writing log_rate bias state starts"
    output, last, states = _kernel("gated_delta", names, "out last states")(
        inputs=[*by_token, *of_row, spans.starts],
        template=[("T", by_token[0].dtype), *layout.template, ("KEEPS_STATES", keeps_states)],
        grid=(layout.value_dim * 8, layout.heads, state.shape[0]),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape, state.shape, kept],
        output_dtypes=[by_token[0].dtype, mx.float32, mx.float32],
    )
    return output, last, states if keeps_states else None


def delta_inputs(
    projected: mx.array, state: mx.array, taps: mx.array, spans: LineSpans, layout: DeltaLayout
) -> tuple[mx.array, mx.array]:
    """Convolve the first channels of projections (lines, …) over time and normalise queries and keys.

    Returns these channels and the convolution's next state.
    """
    heads = {"KEY_HEADS": layout.key_heads, "VALUE_HEADS": layout.heads, "KEY_DIM": layout.key_dim, "VALUE_DIM": layout.value_dim}
    num_heads, lines = 2 * layout.key_heads + layout.heads, projected.shape[0]
    warps, run = THREADS // 32, RUN if lines >= MANY_LINES else 1
    is_wide = all(size % (32 * SIDE) == 0 for size in (layout.key_dim, layout.value_dim)) and projected.shape[1] % SIDE == 0
    sides = {"TAPS": taps.shape[1], "SIDE": SIDE if is_wide else 1, "RUN": run}
    mixed, following = _kernel("delta_inputs", "projected state taps rows starts", "out next")(
        inputs=[projected, state, taps, spans.rows, spans.starts],
        template=[("T", projected.dtype), *heads.items(), *sides.items()],
        grid=(-(-num_heads // warps) * THREADS, -(-lines // run), 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, state.shape[-1]), state.shape],
        output_dtypes=[projected.dtype, state.dtype],
    )
    return mixed, following


def gated_norm(x: mx.array, gates: mx.array, gate_at: int, weight: mx.array, eps: float) -> mx.array:
    """RMSNorm of each head of x (lines, heads, dim), times the weight and SiLU of its gate, in `gates` from `gate_at` on."""
    lines, heads, dim = x.shape
    found: mx.array = _kernel("gated_norm", "x gates weight", "out", EPS=eps)(
        inputs=[x, gates, weight],
        template=[("T", x.dtype), ("HEADS", heads), ("DIM", dim), ("GATE_AT", gate_at)],
        grid=(-(-heads // (THREADS // 32)) * THREADS, lines, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(lines, heads * dim)],
        output_dtypes=[x.dtype],
    )[0]
    return found


def add_norm(x: mx.array, y: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Return x + y, both (lines, width), and its RMSNorm times the weight; y may be a product in parts (parts, lines, width)."""
    threads, vectors = norm_threads(x.shape[1])
    added, normed = _kernel("add_norm", "x y weight", "sum normed", EPS=eps)(
        inputs=[x, y, weight],
        template=[("T", x.dtype), ("VECTORS", vectors), ("PARTS", y.shape[0] if y.ndim == 3 else 0)],
        grid=(x.shape[0] * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape, x.shape],
        output_dtypes=[x.dtype, x.dtype],
    )
    return added, normed


def norm_threads(width: int) -> tuple[int, int]:
    """Return by how many threads the squares of a line are added up, and how many times each has eight numbers."""
    vectors = width // COLUMNS
    threads = min(1024, -(-vectors // 32) * 32)
    return threads, -(-vectors // threads)


def can_convolve(x: mx.array, convolution: nn.Conv1d) -> bool:
    """Whether the kernel supports this convolution: one of each channel for itself, without padding or bias."""
    channels, taps, each = convolution.weight.shape
    is_plain = convolution.stride == 1 and convolution.padding == 0 and convolution.dilation == 1 and "bias" not in convolution
    return is_plain and each == 1 and channels == x.shape[-1] and taps <= x.shape[1] and convolution.weight.dtype == x.dtype


def convolve(x: mx.array, weight: mx.array) -> mx.array:
    """Convolve each channel of x (B, S, C) over time with its own taps (C, taps, 1): (B, S − taps + 1, C).

    cuDNN makes a plan for every length, which takes longer than the rest of a short prompt.
    """
    (rows, places, channels), taps = x.shape, weight.shape[1]
    found: mx.array = _kernel("convolve", "x w", "out")(
        inputs=[x, weight],
        template=[("T", x.dtype), ("TAPS", taps)],
        grid=(-(-channels // THREADS) * THREADS, places - taps + 1, rows),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, places - taps + 1, channels)],
        output_dtypes=[x.dtype],
    )[0]
    return found


@cache
def _kernel(name: str, inputs: str, outputs: str, **constants: float) -> CudaKernel:
    sizes = {"SPAN": SPAN, "THREADS": THREADS, "COLUMNS": COLUMNS}
    header = f"{constants_text(sizes)}{read_source('columns.h')}\n{constants_text(constants)}"
    return CudaKernel(f"weft_{name}", inputs.split(), outputs.split(), (header, read_source(f"{name}.cu")))


def constants_text(constants: Mapping[str, float]) -> str:
    """Return constants as part of a kernel's text: an array of the host's would be read from its memory at every launch."""
    lines = (
        f"constexpr int {key} = {one};" if isinstance(one, int) else f"constexpr float {key} = {one!r}f;"
        for key, one in constants.items()
    )
    return "".join(f"{line}\n" for line in lines)


def read_source(name: str) -> str:
    """Return a file of native/ without comments and indentation: mlx hashes a kernel's whole text at every launch."""
    text = Path(__file__).with_name("native").joinpath(name).read_text()
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)
