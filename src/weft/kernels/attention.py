"""Attention over KV slabs: `seam_over` wraps a model's `scaled_dot_product_attention`; the wrapper is called the seam.

The seam passes ordinary arrays on to mlx-lm's own function, or to a faster one on a CPU. A `SlabHandle` (`memory/views.py`) is
answered from the slabs: one call per slab in use, each over its own rows and no further than its longest one.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from weft.errors import InternalError
from weft.kernels import cpu, cuda, cuda_paged
from weft.memory.grouped import RowArrays, attend_each
from weft.memory.paged_views import PagedHandle
from weft.memory.transfer import ON_CUDA
from weft.memory.views import FORBIDDEN, KeyValueView, Reach, SlabHandle, StepMask, as_bias

ON_CPU = mx.default_device() != mx.gpu


def seam_over(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap a model's attention function: slab handles attend over slabs, prompts together each over their own keys.

    Else CPU float32 prefill is grouped by key heads, and everything else goes to `original`.
    """

    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        if isinstance(keys, SlabHandle):
            return attend(queries, keys.view, scale, mask, sinks)
        if isinstance(keys, PagedHandle):
            return attend_paged(queries, keys, scale, mask, sinks)
        if isinstance(keys, RowArrays):

            def attend_row(own: mx.array, its_keys: mx.array, its_values: mx.array, its_cache: Any, its_mask: Any) -> mx.array:
                return scaled_dot_product_attention(own, its_keys, its_values, its_cache, scale, its_mask, sinks)

            return attend_each(attend_row, queries, keys, values, mask, cache.rows)
        if ON_CPU and sinks is None and queries.dtype == mx.float32 and not hasattr(cache, "bits"):
            return grouped_attention(queries, keys, values, scale, mask if isinstance(mask, str) else as_bias(mask))
        return original(queries, keys, values, cache, scale, mask, sinks)

    scaled_dot_product_attention.weft_seam = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def attend(queries: mx.array, view: KeyValueView, scale: float, mask: Any, sinks: mx.array | None = None) -> mx.array:
    """Compute attention of a step's tokens over the rows' slabs: (B, heads, T, dim) → (B, heads, T, value dim)."""
    if not (mask is None or isinstance(mask, StepMask)):
        raise InternalError("this model makes its own mask, which the seam does not take")
    window = None if mask is None else mask.window
    outputs = [_attend_part(queries, view, view.reach(part, window), scale, sinks) for part in view.batch.parts]
    if num_idle := view.batch.rows.count(None):
        outputs.append(mx.zeros((num_idle, *outputs[0].shape[1:]), outputs[0].dtype))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def attend_paged(queries: mx.array, keys: PagedHandle, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    """Compute attention of a step's tokens over the rows' pages: (B, heads, T, dim) → (B, heads, T, value dim)."""
    if mask is not None or sinks is not None:
        raise InternalError("attention over pages takes no mask and no sinks")
    (rows, heads, tokens, dim), view = queries.shape, keys.view
    lines = queries.swapaxes(1, 2).reshape(-1, heads, dim)
    found = cuda_paged.attend_apart(lines, keys.done, view.held, view.batch.step_table, scale)
    return found.reshape(rows, tokens, heads, -1).swapaxes(1, 2)


def _attend_part(queries: mx.array, view: KeyValueView, reach: Reach, scale: float, sinks: mx.array | None) -> mx.array:
    part = reach.part
    own = view.rows_of(part, queries)
    if ON_CUDA and reach.bounds is not None and cuda.can_attend(own, *view.planes(part)):
        return cuda.attend_ragged(own, *view.planes(part), reach, scale, sinks)
    if part.spread is not None:
        own = own[part.spread]
    keys, values = view.read(part)
    if ON_CPU and sinks is None:
        output = grouped_attention(own, keys, values, scale, reach.bias)
    else:
        output = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=reach.mask, sinks=sinks)
    return output if part.gather is None else output[part.gather]


def grouped_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
    """Grouped-query attention for CPUs, softmax fused where weft's operations are there; `mask`: "causal", a bias or None."""
    (n, num_heads, tokens, dim), groups = queries.shape, keys.shape[1]
    together: tuple[int, ...] = (n, groups, num_heads // groups * tokens)  # one matrix for a key head: its keys are read once
    is_fused = cpu.is_bound(queries.dtype)
    if isinstance(mask, str) and not is_fused:
        span = keys.shape[2]
        mask = mx.where(mx.arange(span)[None] <= mx.arange(span - tokens, span)[:, None], 0.0, FORBIDDEN)
    if tokens == 1 and isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] > 1:  # each head has its own
        mask = mask.reshape(mask.shape[0], groups, num_heads // groups, -1)
    elif tokens > 1 and isinstance(mask, mx.array):
        together = (n, groups, num_heads // groups, tokens)
        keys, values = keys[:, :, None], values[:, :, None]
        if mask.ndim == 4 and mask.shape[1] > 1:  # each head has its own
            mask = mask.reshape(mask.shape[0], *together[1:3], *mask.shape[2:])
        elif mask.ndim == 4:
            mask = mask[:, :, None]
    scaled = (queries * scale).reshape(*together, dim)
    weights = cpu.attention_weights(scaled, keys, mask, tokens) if is_fused else _weights(scaled, keys, mask)
    return (weights @ values).reshape(n, num_heads, tokens, values.shape[-1])


def _weights(queries: mx.array, keys: mx.array, bias: mx.array | str | None) -> mx.array:
    """Return softmax(queries @ keysᵀ + bias), made with `power` because MLX's exp is slower (12 ns a number against 4.4)."""
    scores = queries @ keys.swapaxes(-1, -2)
    scores = scores + bias if isinstance(bias, mx.array) else scores
    weights = mx.power(math.e, scores - mx.max(scores, axis=-1, keepdims=True))
    return weights / mx.sum(weights, axis=-1, keepdims=True)
