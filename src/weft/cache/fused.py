"""What our CPU product does beside products: attention's weights and the gate of an MLP, which MLX has slow operations for.

MLX calls `cblas_sgemm` with the alpha it is given; one that no product has asks for more (native/sgemm.c). So the graph
stays lazy and in MLX's order. Used by attention and by the activations; neither asks unless `is_bound`.
"""

from __future__ import annotations

import functools
import struct

import mlx.core as mx

SOFTMAX, SILU = 0x1B58, 0x1B59
CAUSAL = "causal"  # as MLX spells it
MOST_TOKENS = 0xFFFF  # that an alpha can say
ZERO = mx.array(0.0)


def attention_weights(queries: mx.array, keys: mx.array, mask: mx.array | str | None, tokens: int) -> mx.array:
    """The softmax of queries (…, heads · tokens, dim) by keys (…, dim, span), with numbers added, or causal."""
    if isinstance(mask, mx.array):
        return mx.addmm(mask, queries, keys, alpha=_alpha(SOFTMAX), beta=1.0)
    return mx.addmm(ZERO, queries, keys, alpha=_alpha(SOFTMAX, tokens if mask == CAUSAL else 0), beta=0.0)


def silu(gate: mx.array) -> mx.array:
    """gate · sigmoid(gate)."""
    nothing = mx.zeros((*gate.shape[:-1], 1)), mx.zeros((1, gate.shape[-1]))
    return mx.addmm(gate, *nothing, alpha=_alpha(SILU), beta=1.0)


@functools.cache
def is_bound(dtype: mx.Dtype) -> bool:
    """Whether the product that MLX calls for this type is ours: tried, since nothing else tells."""
    if dtype != mx.float32 or mx.default_device() == mx.gpu:
        return False
    queries, keys = mx.arange(12).reshape(1, 3, 4) / 12, mx.arange(20).reshape(1, 5, 4).swapaxes(-1, -2) / 20
    causal = mx.where(mx.arange(5)[None] <= mx.arange(2, 5)[:, None], 0.0, -1e30)
    pairs = [
        (attention_weights(queries, keys, None, 3), mx.softmax(queries @ keys, axis=-1)),
        (attention_weights(queries, keys, CAUSAL, 3), mx.softmax(queries @ keys + causal, axis=-1)),
        (attention_weights(queries, keys, causal, 3), mx.softmax(queries @ keys + causal, axis=-1)),
        (silu(queries - 0.5), (queries - 0.5) * mx.sigmoid(queries - 0.5)),
    ]
    return all(bool(mx.allclose(found, right, atol=1e-5)) for found, right in pairs)


def _alpha(what: int, tokens: int = 0) -> float:
    number: float = struct.unpack("<f", struct.pack("<I", what << 16 | tokens))[0]
    return number
