"""The one seam: the name `scaled_dot_product_attention` in a loaded model's modules is bound to `attend`.

Ordinary arrays go to mlx-lm's own function, untouched. A `Handle` is answered from the slabs: one call per slab in use,
each over its own rows and no further than its longest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from weft.errors import InternalError
from weft.kernels import cuda, fused
from weft.memory.views import FORBIDDEN, KeyValueView, Part, SlabHandle, StepMask

ON_CPU = mx.default_device() != mx.gpu
ON_CUDA = not ON_CPU and not mx.metal.is_available()


def seam_over(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`original` with our views understood."""

    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        if isinstance(keys, SlabHandle):
            return attend(queries, keys.view, scale, mask, sinks)
        if ON_CPU and sinks is None and queries.shape[2] > 1 and queries.dtype == mx.float32 and not hasattr(cache, "bits"):
            return grouped_attention(queries, keys, values, scale, mask if isinstance(mask, str) else _bias(mask))
        return original(queries, keys, values, cache, scale, mask, sinks)

    scaled_dot_product_attention.weft_seam = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def attend(queries: mx.array, view: KeyValueView, scale: float, mask: Any, sinks: mx.array | None = None) -> mx.array:
    """Attention of one token per row over the rows' slabs. queries (B, heads, 1, dim) → (B, heads, 1, value dim)."""
    if not (mask is None or isinstance(mask, StepMask)):
        raise InternalError("this model makes its own mask, which the seam does not take")
    window = None if mask is None else mask.window
    outputs = [_attend_part(queries, view, part, scale, window, sinks) for part in view.batch.parts]
    if view.batch.rows.count(None):
        outputs.append(mx.zeros((view.batch.rows.count(None), *outputs[0].shape[1:]), outputs[0].dtype))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_part(
    queries: mx.array, view: KeyValueView, part: Part, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array:
    own = view.rows_of(part, queries)
    if ON_CUDA and (output := _attend_ragged(own, view, part, scale, window, sinks)) is not None:
        return output
    if part.spread is not None:
        own = own[part.spread]
    keys, values = view.read(part)
    if ON_CPU and sinks is None:
        output = grouped_attention(own, keys, values, scale, view.reach(part, window).bias)
    else:
        allowed = view.reach(part, window).mask
        output = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=allowed, sinks=sinks)
    return output if part.gather is None else output[part.gather]


def _attend_ragged(
    own: mx.array, view: KeyValueView, part: Part, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array | None:
    """The kernels' way, where they take these shapes."""
    keys, values = view.planes(part)
    bounds = view.reach(part, window).bounds
    if (
        bounds is None
        or not own.dtype == keys.dtype == values.dtype
        or not cuda.can_attend(own.shape[1], keys.shape[1], keys.shape[3], values.shape[3])
    ):
        return None
    key = ("constants", scale, None if sinks is None else view.layer)
    constants = view.batch.once(key, lambda: cuda.Constants(scale, sinks))
    longest = min(part.longest, keys.shape[2])
    return cuda.attend_ragged(own, keys, values, slots=part.slots, bounds=bounds, longest=longest, constants=constants)


def grouped_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
    """Attention for CPU: the query heads of a key head form one matrix, so each head's keys are read once.

    `mask` is "causal", or numbers to add to the scores. The softmax is our product's where that is bound.
    """
    n, num_heads, tokens, dim = queries.shape
    groups = keys.shape[1]
    together: tuple[int, ...] = (n, groups, num_heads // groups * tokens)
    is_fused = fused.is_bound(queries.dtype) and tokens <= fused.MOST_TOKENS
    if isinstance(mask, str) and not is_fused:
        mask = _causal(tokens, keys.shape[2])
    if tokens > 1 and isinstance(mask, mx.array):
        together = (n, groups, num_heads // groups, tokens)
        keys, values = keys[:, :, None], values[:, :, None]
        if mask.ndim == 4 and mask.shape[1] > 1:  # each head has its own
            mask = mask.reshape(mask.shape[0], *together[1:3], *mask.shape[2:])
        elif mask.ndim == 4:
            mask = mask[:, :, None]
    scaled, turned = (queries * scale).reshape(*together, dim), keys.swapaxes(-1, -2)
    weights = fused.attention_weights(scaled, turned, mask, tokens) if is_fused else _weights(scaled, turned, mask)
    return (weights @ values).reshape(n, num_heads, tokens, values.shape[-1])


def _weights(queries: mx.array, keys: mx.array, bias: mx.array | str | None) -> mx.array:
    """MLX's exp takes 12 ns a number, its power 4.4, its where as long again as either; so the softmax is written out."""
    scores = queries @ keys + bias if isinstance(bias, mx.array) else queries @ keys
    weights = mx.power(math.e, scores - mx.max(scores, axis=-1, keepdims=True))
    return weights / mx.sum(weights, axis=-1, keepdims=True)


def _bias(mask: mx.array | None) -> mx.array | None:
    """A mask of either kind as numbers to add to the scores."""
    return mask if mask is None or mask.dtype != mx.bool_ else mx.where(mask, 0.0, FORBIDDEN)


def _causal(tokens: int, span: int) -> mx.array:
    """What the last tokens of a prompt add to their scores."""
    return mx.where(mx.arange(span)[None] <= mx.arange(span - tokens, span)[:, None], 0.0, FORBIDDEN)
