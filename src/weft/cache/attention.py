"""The one seam: the name `scaled_dot_product_attention` in a loaded model's modules is bound to `attend`.

Ordinary arrays go to mlx-lm's own function, untouched. A `Handle` is answered from the slabs: one call per slab in use,
each over its own rows and no further than its longest one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from weft.cache import cuda
from weft.cache.views import Handle, KeyValueView, Part, StepMask
from weft.errors import InternalError

ON_CPU = mx.default_device() != mx.gpu
ON_CUDA = not ON_CPU and not mx.metal.is_available()


def seam_over(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`original` with our views understood."""

    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        if isinstance(keys, Handle):
            return attend(queries, keys.view, scale, mask, sinks)
        return original(queries, keys, values, cache, scale, mask, sinks)

    scaled_dot_product_attention.weft_seam = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def attend(queries: mx.array, view: KeyValueView, scale: float, mask: Any, sinks: mx.array | None = None) -> mx.array:
    """Attention of one token per row over the rows' slabs. queries (B, heads, 1, dim) → (B, heads, 1, value dim)."""
    if not (mask is None or isinstance(mask, StepMask)):
        raise InternalError("this model makes its own mask, which the seam does not take")
    window = None if mask is None else mask.window
    outputs = [_attend_part(queries, view, part, scale, window, sinks) for part in view.batch.parts]
    idle = len(view.batch.rows) - sum(part.num_rows for part in view.batch.parts)
    if idle:
        outputs.append(mx.zeros((idle, *outputs[0].shape[1:]), outputs[0].dtype))
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
    allowed = view.batch.mask(part, view.spec, window)
    if ON_CPU and sinks is None:
        output = grouped_attention(own, keys, values, scale, allowed)
    else:
        output = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=allowed, sinks=sinks)
    return output if part.gather is None else output[part.gather]


def _attend_ragged(
    own: mx.array, view: KeyValueView, part: Part, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array | None:
    """The kernels' way, where they take these shapes."""
    keys, values = view.planes(part)
    bounds = view.batch.bounds(part, view.spec, window)
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


def grouped_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, allowed: mx.array | None) -> mx.array:
    """One-token attention for CPU: the query heads of a key head form one matrix, so each head's keys are read once."""
    n, num_heads, _, dim = queries.shape
    groups = keys.shape[1]
    grouped = (queries * scale).reshape(n, groups, num_heads // groups, dim)
    scores = grouped @ keys.swapaxes(-1, -2)  # (n, groups, heads per group, span)
    if allowed is not None:
        scores = mx.where(allowed, scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ values).reshape(n, num_heads, 1, values.shape[-1])
