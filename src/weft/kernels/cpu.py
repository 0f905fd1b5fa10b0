"""Fused softmax, SiLU, RMSNorm and RoPE for CPUs, through weft's own BLAS, and the layers that use them in place of mlx's.

MLX has up to twenty small operations for each there. Our matrix product can do more than multiply: MLX calls `cblas_sgemm` with
the alpha it is given, and an alpha that no product has asks for one of these operations (native/sgemm.c), so the graph stays
lazy and in MLX's order. Where our product is not bound, mlx's own operations run.
"""

import functools
import math
import struct
from collections import deque
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations
from mlx_lm.models.rope_utils import Llama3RoPE

from weft.kernels import modules_behind
from weft.memory.positions import current_notes

SOFTMAX, SILU, RMS_NORM, ROTATE, RECUR = 0x1B58, 0x1B59, 0x1B5A, 0x1B5B, 0x1B5C  # upper halves of alphas: native/sgemm.c
MAX_CAUSAL_TOKENS = 0xFFFF  # that an alpha can say
LANES, STATE_ROWS = 16, 4  # as in native/: numbers are read in lanes, and rows of a state are taken four at a time


def attention_weights(queries: mx.array, keys: mx.array, mask: mx.array | str | None, tokens: int) -> mx.array:
    """Fused softmax(queries @ keys), (…, heads · tokens, dim) by (…, dim, span); `mask`: additive bias, "causal" or None."""
    if isinstance(mask, mx.array):
        return mx.addmm(mask, queries, keys, alpha=_alpha(SOFTMAX), beta=1.0)
    return mx.addmm(_full((), 0.0), queries, keys, alpha=_alpha(SOFTMAX, tokens if mask == "causal" else 0), beta=0.0)


def fused_silu(gate: mx.array) -> mx.array:
    """Compute gate · sigmoid(gate) as one fused operation of weft's BLAS, which must be bound."""
    return mx.addmm(gate, _full((*gate.shape[:-1], 1), 0.0), _full((1, gate.shape[-1]), 0.0), alpha=_alpha(SILU), beta=1.0)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Compute RMSNorm of x, times the weight, as one fused operation of weft's BLAS, which must be bound."""
    return mx.addmm(x, _full((*x.shape[:-1], 1), eps), weight[None], alpha=_alpha(RMS_NORM), beta=1.0)


def rotate(x: mx.array, angles: mx.array, *, is_traditional: bool) -> mx.array:
    """Apply RoPE to the first dims of x (B, heads, T, dim), fused; `angles` (B or 1, 1, T, dims): cosines, then sines."""
    # is_traditional: the numbers of a pair are neighbours, else half of the rotated numbers apart
    nothing = mx.broadcast_to(_full((angles.shape[-1], x.shape[-1]), 0.0), (*x.shape[:2], angles.shape[-1], x.shape[-1]))
    return mx.addmm(x, angles, nothing, alpha=_alpha(ROTATE, int(is_traditional)), beta=1.0)


class Recurred(NamedTuple):
    """What a recurrence over T tokens gives: outputs (B, H, T, V), the last state (B, H, V, K), all states (B, T, H, V, K)."""

    output: mx.array
    last: mx.array
    states: mx.array | None  # after each token, where they are asked for


def recurrence(
    state: mx.array, value: mx.array, key: mx.array, query: mx.array, gate: mx.array, beta: mx.array | None = None
) -> Recurred:
    """Run a linear recurrence over tokens as one operation, also with the delta rule.

    state (B, H, V, K); of every token value (B, H, T, V), key and query (B, H, T, K), gate (B, H, T, K or 1), beta
    (B, H, T, 1). Per token: S ← S · gate; u = value, with `beta` under the delta rule beta · (value − S key); S ← S + u keyᵀ;
    output = S query. Tokens are taken one by one, so no bit depends on where a prompt is cut into chunks. The states after
    each token are kept while notes are taken (memory/positions.py).
    """
    (rows, heads, height, width), tokens = state.shape, key.shape[2]
    lanes, padded_height = _whole_lanes(max(width, height)), -(-height // STATE_ROWS) * STATE_ROWS
    shape = (rows, heads, tokens, lanes)
    inputs = [_padded(state, (rows, heads, padded_height, lanes)), *(_padded(one, shape) for one in (value, key, query))]
    inputs += [
        mx.broadcast_to(one, shape) if one.shape[-1] == 1 else _padded(one, shape) for one in (gate, beta) if one is not None
    ]
    keeps_states = current_notes() is not None
    if keeps_states:
        inputs.append(mx.broadcast_to(_full((1, 1, 1, 1), 0.0), (rows, heads, padded_height * tokens, lanes)))
    packed = mx.concatenate(inputs, axis=2).reshape(-1, lanes)
    sizes = _sizes(padded_height, _whole_lanes(width), tokens, lanes)
    nothing = _full((packed.shape[0], 1), 0.0)
    alpha = _alpha(RECUR, int(beta is not None) | keeps_states << 1)
    found = mx.addmm(packed, nothing, sizes, alpha=alpha, beta=1.0).reshape(rows, heads, -1, lanes)
    output, last = found[:, :, padded_height : padded_height + tokens, :height], found[:, :, :height, :width]
    if tokens > 1:  # a slice holds on to all of it: the tokens of a chunk are not kept with the state
        last = mx.contiguous(last)
    if not keeps_states:
        return Recurred(output, last, None)
    kept = found[:, :, -padded_height * tokens :].reshape(rows, heads, tokens, padded_height, lanes)
    return Recurred(output, last, kept[..., :height, :width].swapaxes(1, 2))


class RotaryAngles:
    """Memoised cosines and sines for RoPE, computed once for all layers of a step; each model has one."""

    def __init__(self) -> None:  # a model has one or two kinds of positions, asked for by every layer of a step
        self._known: deque[tuple[int | mx.array, mx.array | None, tuple[object, ...], mx.array]] = deque(maxlen=4)

    def at(
        self, offset: int | mx.array, tokens: int, dims: int, base: float | None, scale: float, freqs: mx.array | None
    ) -> mx.array:
        """Return one array (B or 1, 1, T, dims), cosines then sines, for `tokens` positions from each row's offset; memoised."""
        kind = (tokens, dims, base, scale)
        for known, its_freqs, its_kind, angles in self._known:
            is_here = known is offset or (isinstance(known, int) and isinstance(offset, int) and known == offset)
            if is_here and its_freqs is freqs and its_kind == kind:
                return angles
        rates = rotary_rates(dims, base or 1.0) if freqs is None else 1.0 / freqs
        found = angles_at(mx.array(offset).reshape(-1, 1, 1, 1) + mx.arange(tokens).reshape(-1, 1), scale, rates)
        self._known.appendleft((offset, freqs, kind, found))
        return found


def rotary_rates(dims: int, base: float) -> mx.array:
    """Return the angle by which each frequency of RoPE turns from one position to the next, (dims / 2,)."""
    return mx.exp(mx.arange(0, -(dims // 2), -1) * (math.log(base) / (dims // 2)))


def angles_at(places: mx.array, scale: float, rates: mx.array) -> mx.array:
    """Return the cosines, then the sines, of RoPE at these positions."""
    turns = places * scale * rates
    return mx.concatenate([mx.cos(turns), mx.sin(turns)], axis=-1)


@functools.cache
def is_bound(dtype: mx.Dtype) -> bool:
    """Whether MLX's matrix product for this dtype is weft's BLAS, found by testing its fused operations; cached."""
    if dtype != mx.float32 or mx.default_device() == mx.gpu:
        return False
    queries, keys = mx.arange(12).reshape(1, 3, 4) / 12, mx.arange(20).reshape(1, 5, 4).swapaxes(-1, -2) / 20
    causal = mx.where(mx.arange(5)[None] <= mx.arange(2, 5)[:, None], 0.0, -1e30)
    gates, state = mx.full((1, 1, 3, 1), 0.5), mx.zeros((1, 1, 4, 4))
    written = recurrence(state, queries[None], queries[None], queries[None], gates)
    overlaps = mx.tril(queries @ queries.swapaxes(-1, -2)) * mx.array([[1, 0, 0], [0.5, 1, 0], [0.25, 0.5, 1]])
    rotated = rotate(queries[None], RotaryAngles().at(7, 3, 4, 100.0, 1.0, None), is_traditional=False)
    pairs = [
        (attention_weights(queries, keys, None, 3), mx.softmax(queries @ keys, axis=-1)),
        (attention_weights(queries, keys, "causal", 3), mx.softmax(queries @ keys + causal, axis=-1)),
        (attention_weights(queries, keys, causal, 3), mx.softmax(queries @ keys + causal, axis=-1)),
        (fused_silu(queries - 0.5), (queries - 0.5) * mx.sigmoid(queries - 0.5)),
        (rms_norm(queries, queries[0, 0], 0.1), mx.fast.rms_norm(queries, queries[0, 0], 0.1)),
        (written.output, (overlaps @ queries)[None]),
        (rotated, mx.fast.rope(queries[None], 4, traditional=False, base=100.0, scale=1.0, offset=7)),
    ]
    return all(bool(mx.allclose(found, right, atol=1e-5)) for found, right in pairs)


@functools.lru_cache(256)
def _full(shape: tuple[int, ...], number: float) -> mx.array:
    found = mx.full(shape, number)
    mx.eval(found)  # sync: it has no part in anybody's graph
    return found


def _whole_lanes(count: int) -> int:
    return -(-count // LANES) * LANES


def _padded(x: mx.array, shape: tuple[int, ...]) -> mx.array:
    missing = [(0, 0), (0, 0), (0, shape[2] - x.shape[2]), (0, shape[3] - x.shape[3])]
    return x if x.shape == shape else mx.pad(x, missing)


@functools.lru_cache(256)
def _sizes(height: int, width: int, tokens: int, lanes: int) -> mx.array:
    found = mx.array([[height, width, tokens, *[0] * (lanes - 3)]], mx.float32)
    mx.eval(found)  # sync: it has no part in anybody's graph
    return found


@functools.lru_cache(256)
def _alpha(operation: int, detail: int = 0) -> float:
    return float(struct.unpack("<f", struct.pack("<I", operation << 16 | detail))[0])


class FusedRMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """An `nn.RMSNorm` that runs as one fused operation where weft's BLAS is bound."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self["weight"]
        if x.ndim > 1 and weight.dtype == mx.float32 and is_bound(x.dtype):
            return rms_norm(x, weight, self.eps)
        return super().__call__(x)  # type: ignore[no-any-return]


class FusedRotation:
    """Mixin of the fused RoPE layers: one operation on x (B, heads, T, dim), with angles shared by all layers of a step."""

    angles: RotaryAngles  # the model's

    def __call__(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if x.ndim != 4 or not is_bound(x.dtype):
            return super().__call__(x, offset)  # type: ignore[misc,no-any-return]
        freqs = getattr(self, "_freqs", None)
        base, scale = (self.base, self.scale) if freqs is None else (None, 1.0)
        angles = self.angles.at(offset, x.shape[2], self.dims, base, scale, freqs)
        return rotate(x, angles, is_traditional=self.traditional)


class FusedRoPE(FusedRotation, nn.RoPE):  # type: ignore[misc]
    """An `nn.RoPE` that runs as one fused operation where weft's BLAS is bound."""


class FusedLlama3RoPE(FusedRotation, Llama3RoPE):  # type: ignore[misc]
    """A `Llama3RoPE` (RoPE with scaled frequencies) that runs as one fused operation where weft's BLAS is bound."""


FUSED_LAYERS = {nn.RMSNorm: FusedRMSNorm, nn.RoPE: FusedRoPE, Llama3RoPE: FusedLlama3RoPE}


def silu(x: mx.array) -> mx.array:
    """Compute x · sigmoid(x), fused where weft's BLAS is bound; where e^−x overflows the result is zero, as it should be."""
    return fused_silu(x) if x.ndim > 1 and is_bound(x.dtype) else x / (1.0 + mx.power(math.e, -x))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Compute silu(gate) · x."""
    return silu(gate) * x


def precise_swiglu(like: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Compute silu(gate) · x in float32 and return it in the dtype of `like`."""
    return swiglu(gate.astype(mx.float32), x.astype(mx.float32)).astype(like.dtype)


class NNWithOurSilu(ModuleType):
    """A stand-in for the module `mlx.nn` with weft's silu; every other name is looked up in `mlx.nn`."""

    silu = staticmethod(silu)

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)


def bind(model: Any) -> list[str]:
    """Replace layers and functions of a model on a CPU by fused ones; returns the changed modules' names, [] on a GPU.

    Functions that mlx and mlx-lm compile stay uncompiled there: MLX would call the C++ compiler for seconds at the first request
    that needs one, and where there is none that request would fail; compiled they are no faster (docs/log.md).
    """
    if mx.default_device() == mx.gpu:
        return []
    mx.disable_compile()
    angles = RotaryAngles()
    for layer in model.modules():
        layer.__class__ = FUSED_LAYERS.get(type(layer), type(layer))
        if isinstance(layer, FusedRotation):
            layer.angles = angles
    return [module.__name__ for module in modules_behind(model) if _bind_functions(module)]


def _bind_functions(module: ModuleType) -> bool:
    if module is activations or not module.__name__.startswith("mlx_lm."):
        return False
    found, ours = vars(module), {"swiglu": swiglu, "precise_swiglu": precise_swiglu}
    changed: dict[str, Any] = {name: own for name, own in ours.items() if found.get(name) is getattr(activations, name)}
    if found.get("nn") is nn:
        changed["nn"] = NNWithOurSilu("mlx.nn")
    found.update(changed)
    return bool(changed)
