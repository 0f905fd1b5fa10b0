"""What our CPU product does beside products: what MLX has only slow operations for, or many small ones.

MLX calls `cblas_sgemm` with the alpha it is given; one that no product has asks for more (native/sgemm.c). So the graph
stays lazy and in MLX's order. Used by attention and by what is bound into models; nobody asks unless `is_bound`.
"""

from __future__ import annotations

import functools
import math
import struct
from collections import deque

import mlx.core as mx

SOFTMAX, SILU, NORM, TURN = 0x1B58, 0x1B59, 0x1B5A, 0x1B5B
CAUSAL = "causal"  # as MLX spells it
MOST_TOKENS = 0xFFFF  # that an alpha can say
ZERO = mx.array(0.0)
KNOWN_ANGLES = 4  # a model has one or two kinds of positions, asked for by every layer of a step


def attention_weights(queries: mx.array, keys: mx.array, mask: mx.array | str | None, tokens: int) -> mx.array:
    """The softmax of queries (…, heads · tokens, dim) by keys (…, dim, span), with numbers added, or causal."""
    if isinstance(mask, mx.array):
        return mx.addmm(mask, queries, keys, alpha=_alpha(SOFTMAX), beta=1.0)
    return mx.addmm(ZERO, queries, keys, alpha=_alpha(SOFTMAX, tokens if mask == CAUSAL else 0), beta=0.0)


def silu(gate: mx.array) -> mx.array:
    """gate · sigmoid(gate)."""
    return mx.addmm(gate, _all((*gate.shape[:-1], 1), 0.0), _all((1, gate.shape[-1]), 0.0), alpha=_alpha(SILU), beta=1.0)


def norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x over the root of its mean square, weighed."""
    return mx.addmm(x, _all((*x.shape[:-1], 1), eps), weight[None], alpha=_alpha(NORM), beta=1.0)


def turned(x: mx.array, angles: mx.array, *, of_neighbours: bool) -> mx.array:
    """x (B, heads, T, dim) with its first numbers turned by `angles`: (B or 1, 1, T, as many), cosines and then sines."""
    nothing = mx.broadcast_to(_all((angles.shape[-1], x.shape[-1]), 0.0), (*x.shape[:2], angles.shape[-1], x.shape[-1]))
    return mx.addmm(x, angles, nothing, alpha=_alpha(TURN, int(of_neighbours)), beta=1.0)


class Angles:
    """Cosines and sines of rotary positions, made once for all layers of a step."""

    def __init__(self) -> None:
        self._known: deque[tuple[int | mx.array, mx.array | None, tuple[object, ...], mx.array]] = deque(maxlen=KNOWN_ANGLES)

    def at(
        self, offset: int | mx.array, tokens: int, dims: int, base: float | None, scale: float, freqs: mx.array | None
    ) -> mx.array:
        """(B or 1, 1, T, dims) for the tokens behind each row's offset."""
        kind = (tokens, dims, base, scale)
        for known, its_freqs, its_kind, angles in self._known:
            if its_freqs is not freqs or its_kind != kind:
                continue
            if known is offset or (isinstance(known, int) and isinstance(offset, int) and known == offset):
                return angles
        rates = mx.exp(mx.arange(0, -(dims // 2), -1) * (math.log(base or 1.0) / (dims // 2))) if freqs is None else 1.0 / freqs
        places = mx.array(offset).reshape(-1, 1, 1, 1) + mx.arange(tokens).reshape(-1, 1)
        turns = places * scale * rates
        found = mx.concatenate([mx.cos(turns), mx.sin(turns)], axis=-1)
        self._known.appendleft((offset, freqs, kind, found))
        return found


@functools.cache
def is_bound(dtype: mx.Dtype) -> bool:
    """Whether the product that MLX calls for this type is ours: tried, since nothing else tells."""
    if dtype != mx.float32 or mx.default_device() == mx.gpu:
        return False
    queries, keys = mx.arange(12).reshape(1, 3, 4) / 12, mx.arange(20).reshape(1, 5, 4).swapaxes(-1, -2) / 20
    causal = mx.where(mx.arange(5)[None] <= mx.arange(2, 5)[:, None], 0.0, -1e30)
    angles = Angles().at(7, 3, 4, 100.0, 1.0, None)
    pairs = [
        (attention_weights(queries, keys, None, 3), mx.softmax(queries @ keys, axis=-1)),
        (attention_weights(queries, keys, CAUSAL, 3), mx.softmax(queries @ keys + causal, axis=-1)),
        (attention_weights(queries, keys, causal, 3), mx.softmax(queries @ keys + causal, axis=-1)),
        (silu(queries - 0.5), (queries - 0.5) * mx.sigmoid(queries - 0.5)),
        (norm(queries, queries[0, 0], 0.1), mx.fast.rms_norm(queries, queries[0, 0], 0.1)),
        (
            turned(queries[None], angles, of_neighbours=False)[0],
            mx.fast.rope(queries[None], 4, traditional=False, base=100.0, scale=1.0, offset=7)[0],
        ),
    ]
    return all(bool(mx.allclose(found, right, atol=1e-5)) for found, right in pairs)


@functools.lru_cache(256)
def _all(shape: tuple[int, ...], number: float) -> mx.array:
    """An array that is always the same is made once."""
    found = mx.full(shape, number)
    mx.eval(found)  # sync: it has no part in anybody's graph
    return found


@functools.lru_cache(256)
def _alpha(what: int, detail: int = 0) -> float:
    number: float = struct.unpack("<f", struct.pack("<I", what << 16 | detail))[0]
    return number
